"""A conversion: the report tells the truth, nothing else changes than should, and a kill changes nothing at all."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from polysketch.cli import main
from polysketch.conversion import ConversionConfig, convert, retraining
from polysketch.conversion.report import build_report
from polysketch.data import PreparedData
from polysketch.integrations.huggingface.tokenizer import to_fast_tokenizer
from polysketch.integrations.replacement import load_replaced
from polysketch.storage.sealed import unsealed
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.options import OnResume
from polysketch.training.step import Updater
from polysketch.training.verification import verify


class Killed(Exception):
    """What ends a process in these tests."""


def own_loss(model, data: PreparedData, context: int, tokens: int) -> float:
    """The loss on validation text as transformers computes it, window by window without a cache."""
    ids = torch.from_numpy(np.asarray(data.split("validation").tokens[: tokens + 1], dtype=np.int64))
    inputs, targets = ids[:-1].view(-1, context), ids[1:].view(-1, context)
    with torch.no_grad():
        logits = model(inputs, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_replaced(folder).state_dict()


def stages(result) -> dict[str, dict]:
    return {line["stage"]: line for line in result.report["stages"]}


def made(result) -> list[dict]:
    """The lines of metrics of optimizer steps."""
    lines = MetricsFile(result.folder / "metrics.jsonl").read()
    return [line for line in lines if line["kind"] != "evaluation"]


def test_the_first_figure_is_the_models_own_loss(converted, options, data):
    model = AutoModelForCausalLM.from_pretrained(options["model"])
    expected = own_loss(model, data, options["context"], options["eval_tokens"])
    assert stages(converted)["original"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert expected < 1.0  # far below the 2.3 nats of a model that does not look back


def test_the_last_figure_is_the_loss_of_the_saved_model(converted, options, data):
    model = load_replaced(converted.folder / "model")
    expected = own_loss(model, data, options["context"], options["eval_tokens"])
    assert stages(converted)["tuning"]["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_model_without_a_tokenizer_is_saved_with_that_of_its_text(converted, options, data):
    from transformers import AutoTokenizer

    assert not list(options["model"].glob("*token*"))
    found = AutoTokenizer.from_pretrained(converted.folder / "model")
    assert found("Straße, naïve 漢字").input_ids == data.tokenizer.encode("Straße, naïve 漢字")


def test_every_byte_of_a_conversion_is_verified(converted, tmp_path):
    folder = tmp_path / "conversion"
    shutil.copytree(converted.folder, folder)
    assert verify(folder).kind == "a conversion"
    assert verify(folder).problems == verify(folder / "model").problems == ()
    for path in (folder / "config.json", *folder.glob("checkpoints/*/*"), *folder.glob("model/*")):
        content = path.read_bytes()
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 2]) + content[-1:])
        assert verify(folder).problems, path.relative_to(folder)
        path.write_bytes(content)


def test_replacing_costs_and_every_stage_regains(converted):
    losses = [line["loss"] for line in converted.report["stages"]]
    assert [line["stage"] for line in converted.report["stages"]] == ["original", "replaced", "transfer", "tuning"]
    assert losses[1] > losses[0] + 0.3
    assert losses[1] > losses[2] > losses[3]
    assert 0 < converted.report["regained"] <= 1.5


def test_distillation_stands_between_transfer_and_tuning(distilled, options, data):
    """Each stage has its steps and its own learning rates, and regains; the last figure is the saved model's."""
    report = distilled.report["stages"]
    assert [line["stage"] for line in report] == ["original", "replaced", "transfer", "distillation", "tuning"]
    losses = [line["loss"] for line in report]
    assert losses[1] > losses[2] > losses[3] > losses[4]
    steps = [(line["kind"], line["step"]) for line in made(distilled)]
    middle = [("distillation", 5), ("distillation", 10), ("distillation", 12)]
    assert steps == [("transfer", 4), *middle, ("tuning", 15), ("tuning", 16)]
    rates = [line["learning_rate"] for line in made(distilled)]
    assert rates == pytest.approx([1e-2 / 4, 3e-3, 3e-3 * 3 / 8, 3e-3 / 8, 1e-3 * 2 / 4, 1e-3 / 4])
    loss = own_loss(load_replaced(distilled.folder / "model"), data, options["context"], 640)
    assert losses[4] == pytest.approx(loss, rel=1e-4)


@pytest.mark.full
def test_distillation_alone_brings_the_model_nearer_to_what_it_was(options, data, tmp_path):
    """Computed in parts it does the same up to rounding."""
    steps = {"transfer_steps": 0, "distillation_steps": 6, "tuning_steps": 0}
    rate = {"distillation_learning_rate": 3e-3, "eval_tokens": 640, "log_every": 1}
    config = ConversionConfig(**{**options, **steps, **rate}, out=tmp_path / "out")
    result = convert(config, progress=False)
    assert list(stages(result)) == ["original", "replaced", "distillation"]
    divergences = [line["loss"] for line in made(result)]
    assert divergences[-1] < 0.9 * divergences[0]
    assert stages(result)["distillation"]["loss"] < stages(result)["replaced"]["loss"]
    loss = own_loss(load_replaced(result.folder / "model"), data, options["context"], 640)
    assert stages(result)["distillation"]["loss"] == pytest.approx(loss, rel=1e-4)
    parts = convert(dataclasses.replace(config, out=tmp_path / "parts", accumulation=2), progress=False)
    assert [line["loss"] for line in made(parts)] == pytest.approx(divergences, rel=1e-3)


@pytest.mark.full
def test_adapters_of_distillation_are_trained_on_in_tuning(three_stages, data, tmp_path, monkeypatch):
    """They are one and the same, merged at the end; killed in tuning, the conversion ends alike."""
    changes = {"tuning": "lora", "lora_rank": 2, "transfer_steps": 0, "distillation_steps": 4, "save_every": 1}
    config = ConversionConfig(**{**three_stages, **changes}, out=tmp_path / "out", resume=True)
    result = convert(config, progress=False)
    original = AutoModelForCausalLM.from_pretrained(config.model).state_dict()
    found = tensors(result.folder / "model")
    changed = {name.split(".")[-2] for name, tensor in original.items() if not torch.equal(found[name], tensor)}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.linalg.matrix_rank(found[name] - original[name], rtol=1e-4) == 2
    loss = own_loss(load_replaced(result.folder / "model"), data, config.context, config.eval_tokens)
    assert result.report["stages"][-1]["loss"] == pytest.approx(loss, rel=1e-4)
    again = dataclasses.replace(config, out=tmp_path / "again")
    kill_at(monkeypatch, 6)
    with pytest.raises(Killed):
        convert(again, progress=False)
    monkeypatch.undo()
    assert_same(convert(again, progress=False).folder, result.folder)


@pytest.mark.parametrize("step", [3, pytest.param(7, marks=pytest.mark.full)])
def test_whole_layers_come_nearer_than_mechanisms_and_a_kill_changes_nothing(step, three_stages, tmp_path, monkeypatch):
    """Projections learn in the transfer too; what is reported is the error of the layers' outputs."""
    changes = {"transfer": "layers", "transfer_steps": 6, "tuning_steps": 2, "distillation_steps": 0, "save_every": 1}
    config = ConversionConfig(**{**three_stages, **changes}, out=tmp_path / "out", resume=True)
    result = convert(config, progress=False)
    before, after = (stages(result)[stage]["transfer_error"] for stage in ("replaced", "transfer"))
    assert before.keys() == {"0", "1"}
    assert all(after[layer] < 0.9 * before[layer] for layer in before)
    again = dataclasses.replace(config, out=tmp_path / "again")
    kill_at(monkeypatch, step)
    with pytest.raises(Killed):
        convert(again, progress=False)
    monkeypatch.undo()
    assert_same(convert(again, progress=False).folder, result.folder)


def test_attention_comes_nearer_in_every_layer(converted):
    before, after = (stages(converted)[stage]["transfer_error"] for stage in ("replaced", "transfer"))
    assert before.keys() == {"0", "1"}
    assert all(after[layer] < 0.8 * before[layer] for layer in before)


def test_transfer_alone_leaves_the_models_own_weights(options, tmp_path):
    config = ConversionConfig(**{**options, "tuning_steps": 0, "transfer_steps": 3}, out=tmp_path / "out")
    result = convert(config, progress=False)
    original = AutoModelForCausalLM.from_pretrained(options["model"]).state_dict()
    found = tensors(result.folder / "model")
    assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
    assert found.keys() > original.keys()


def test_adapters_change_projections_around_attention_alone(options, tmp_path):
    changes = {"tuning": "lora", "transfer_steps": 2, "tuning_steps": 4, "lora_rank": 2}
    result = convert(ConversionConfig(**{**options, **changes}, out=tmp_path / "out"), progress=False)
    original = AutoModelForCausalLM.from_pretrained(options["model"]).state_dict()
    found = tensors(result.folder / "model")
    changed = {name.split(".")[-2] for name, tensor in original.items() if not torch.equal(found[name], tensor)}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}
    difference = found["model.layers.1.self_attn.q_proj.weight"] - original["model.layers.1.self_attn.q_proj.weight"]
    assert torch.linalg.matrix_rank(difference, rtol=1e-4) == 2
    model = load_replaced(result.folder / "model")
    loss = own_loss(model, PreparedData.open(options["data"]), options["context"], options["eval_tokens"])
    assert stages(result)["tuning"]["loss"] == pytest.approx(loss, rel=1e-4)  # merged: nothing was lost


_FULL = pytest.mark.full


@pytest.mark.parametrize("step", [19, *(pytest.param(step, marks=_FULL) for step in (0, 6, 7, 10, 15, 16, 23))])
def test_a_killed_conversion_ends_bit_for_bit_as_one_left_alone(step, converted, options, tmp_path, monkeypatch):
    config = ConversionConfig(**options, out=tmp_path / "out", resume=True)
    kill_at(monkeypatch, step)
    with pytest.raises(Killed):
        convert(config, progress=False)
    monkeypatch.undo()
    result = convert(config, progress=False)
    assert_same(result.folder, converted.folder)


@pytest.mark.parametrize("step", [7, *(pytest.param(step, marks=_FULL) for step in (0, 3, 4, 5, 11, 12, 14))])
def test_a_conversion_killed_around_distillation_ends_alike(step, distilled, three_stages, tmp_path, monkeypatch):
    """The teacher is in no checkpoint: the model's folder has it."""
    config = ConversionConfig(**three_stages, out=tmp_path / "out", resume=True)
    kill_at(monkeypatch, step)
    with pytest.raises(Killed):
        convert(config, progress=False)
    monkeypatch.undo()
    assert_same(convert(config, progress=False).folder, distilled.folder)


def test_random_features_are_drawn_anew_and_a_kill_changes_nothing(options, tmp_path, monkeypatch):
    changes = {"attention": "performer", "transfer_steps": 0, "tuning_steps": 4, "save_every": 1}
    every, never = ({"num_features": 8, "redraw_interval": interval} for interval in (2, None))
    config = ConversionConfig(**{**options, **changes, "attention_options": every}, out=tmp_path / "out", resume=True)
    result = convert(config, progress=False)
    kept = convert(dataclasses.replace(config, attention_options=never, out=tmp_path / "kept"), progress=False)
    drawn, first = (_of_features(each.folder) for each in (result, kept))
    assert len(drawn) == 2
    assert all(not torch.equal(tensor, first[name]) for name, tensor in drawn.items())
    again = dataclasses.replace(config, out=tmp_path / "again")
    kill_at(monkeypatch, 3)
    with pytest.raises(Killed):
        convert(again, progress=False)
    monkeypatch.undo()
    assert_same(convert(again, progress=False).folder, result.folder)


def _of_features(folder):
    return {name: tensor for name, tensor in tensors(folder / "model").items() if name.endswith("feature_map.weight")}


@pytest.mark.full
def test_a_conversion_begun_without_distillation_goes_on(converted, options, tmp_path, monkeypatch):
    """By a version that did not know the stage: its options are not in the folder."""
    config = ConversionConfig(**options, out=tmp_path / "out", resume=True)
    kill_at(monkeypatch, 19)
    with pytest.raises(Killed):
        convert(config, progress=False)
    monkeypatch.undo()
    path = config.out / "config.json"
    written = json.loads(path.read_text())
    for name in ("distillation_steps", "distillation_learning_rate"):
        del written["conversion"][name]
    written.pop("sha256")  # nor did it seal the file
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match="--distillation-steps was 0 and is now 3"):
        convert(dataclasses.replace(config, distillation_steps=3), progress=False)
    assert_same(convert(config, progress=False).folder, converted.folder)


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the process die when it has made `step` steps and is about to make another."""
    made = [0]
    apply = Updater.apply

    def counted(self, number):
        if made[0] == step:
            raise Killed
        made[0] += 1
        return apply(self, number)

    monkeypatch.setattr(Updater, "apply", counted)


def assert_same(found: Path, expected: Path) -> None:
    """The same weights bit for bit, and the same metrics but for speed."""
    ours, theirs = tensors(found / "model"), tensors(expected / "model")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    lines = [MetricsFile(folder / "metrics.jsonl").read() for folder in (found, expected)]
    assert [without_speed(line) for line in lines[0]] == [without_speed(line) for line in lines[1]]


def without_speed(line: dict) -> dict:
    return {name: value for name, value in line.items() if name not in ("seconds", "tokens_per_second")}


def test_a_finished_conversion_can_be_asked_for_again(converted, options):
    config = ConversionConfig(**options, out=converted.folder, resume=True)
    before = tensors(converted.folder / "model")
    again = convert(config, progress=False)
    assert again.report == converted.report
    after = tensors(converted.folder / "model")
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_a_model_that_is_made_again_loses_its_name_before_its_files(converted, options, tmp_path, monkeypatch):
    """An earlier process had written it, and ended before its report."""
    folder, deleted = shutil.copytree(converted.folder, tmp_path / "out"), []
    (folder / "report.json").unlink()
    delete = shutil.rmtree
    monkeypatch.setattr(
        retraining.shutil, "rmtree", lambda path, **given: (deleted.append(path), delete(path, **given))
    )
    assert convert(ConversionConfig(**options, out=folder, resume=True), progress=False).report == converted.report
    assert [path.name for path in deleted if path.parent == folder] == [".model.tmp"]
    assert_same(folder, converted.folder)


def test_every_option_says_what_its_change_means():
    fields = dataclasses.fields(ConversionConfig)
    assert all(isinstance(field.metadata.get("on_resume"), OnResume) for field in fields)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resume": False}, "already holds a conversion: give --resume"),
        ({"transfer_steps": 17}, "--transfer-steps was 16 and is now 17"),
        ({"attention": "performer", "attention_options": {}}, "--attention was polysketch-paper and is now performer"),
    ],
)
def test_a_folder_is_not_gone_on_with_by_another_conversion(converted, options, changes, message):
    config = ConversionConfig(**{**options, "resume": True, **changes}, out=converted.folder)
    with pytest.raises(ValueError, match=message):
        convert(config, progress=False)


def test_another_models_weights_under_the_same_name_are_noticed(converted, options, tmp_path):
    folder = tmp_path / "model"
    model = AutoModelForCausalLM.from_pretrained(options["model"])
    torch.nn.init.ones_(model.model.norm.weight)
    model.save_pretrained(folder)
    config = ConversionConfig(**{**options, "model": folder, "resume": True}, out=converted.folder)
    with pytest.raises(ValueError, match="--model: expected what the conversion was started with"):
        convert(config, progress=False)


def test_a_mechanism_without_parameters_has_no_transfer(options, tmp_path):
    config = ConversionConfig(**{**options, "attention": "hyper", "attention_options": {}}, out=tmp_path / "out")
    with pytest.raises(ValueError, match="no parameters that attention transfer could train"):
        convert(config, progress=False)
    advised = dataclasses.replace(config, transfer_steps=0, tuning_steps=1)
    assert convert(advised, progress=False).step == 1  # in the same folder: nothing was lost, so nothing is in the way


def test_a_layer_that_is_not_there_does_not_spoil_the_folder(options, tmp_path):
    config = ConversionConfig(
        **{**options, "layers": (9,), "transfer_steps": 1, "tuning_steps": 0}, out=tmp_path / "out"
    )
    with pytest.raises(ValueError, match="layer 9"):
        convert(config, progress=False)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()  # refused before anything was measured
    assert convert(dataclasses.replace(config, layers=(1,)), progress=False).step == 1


def test_windows_longer_than_the_model_has_positions_are_refused(options, tmp_path):
    config = ConversionConfig(**{**options, "context": 300}, out=tmp_path / "out")
    with pytest.raises(ValueError, match="--context: expected at most 256 tokens"):
        convert(config, progress=False)


def test_a_converted_model_is_not_converted_again(converted, options, tmp_path):
    config = ConversionConfig(**{**options, "model": converted.folder / "model"}, out=tmp_path / "out")
    with pytest.raises(ValueError, match="one that was replaced before"):
        convert(config, progress=False)


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(options, tmp_path, minutes):
    with pytest.raises(ValueError, match="--max-minutes: expected a finite number above 0"):
        ConversionConfig(**options, out=tmp_path / "out", max_minutes=minutes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distillation_steps": -1}, "--distillation-steps: expected at least 0, found -1"),
        ({"distillation_learning_rate": 0.0}, "--distillation-learning-rate: expected a finite number above 0"),
        ({"transfer_steps": 0, "tuning_steps": 0}, "expected a step of one of them, found none"),
        ({"transfer": "layers", "tuning": "lora"}, "--transfer layers: expected --tuning all, found lora"),
    ],
)
def test_steps_and_rates_that_are_none_are_refused(options, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        ConversionConfig(**{**options, **changes}, out=tmp_path / "out")


@pytest.mark.full
def test_time_that_is_up_saves_and_the_same_command_goes_on(converted, options, tmp_path):
    config = ConversionConfig(**options, out=tmp_path / "out", resume=True)
    stopped = convert(dataclasses.replace(config, max_minutes=1e-6), progress=False)
    assert (stopped.stopped_by, stopped.step) == ("time", 0)
    assert_same(convert(config, progress=False).folder, converted.folder)


def test_polysketch_is_transferred_and_tuned(options, data, tmp_path):
    """It comes nearer to softmax in both layers, and the saved model has the last figure's loss."""
    changes = {"attention": "polysketch", "attention_options": {"window": 4, "sketch_size": 8}}
    result = convert(ConversionConfig(**{**options, **changes}, out=tmp_path / "out"), progress=False)
    before, after = (stages(result)[stage]["transfer_error"] for stage in ("replaced", "transfer"))
    assert all(after[layer] < 0.9 * before[layer] for layer in before)
    losses = [line["loss"] for line in result.report["stages"]]
    assert losses[1] > losses[2] > losses[3]
    loss = own_loss(load_replaced(result.folder / "model"), data, options["context"], options["eval_tokens"])
    assert losses[3] == pytest.approx(loss, rel=1e-4)


def test_dropout_is_refused_before_a_step_and_can_be_left_out(options, data, tmp_path):
    """GPT-2 as it comes: learned positions, transposed projections, and dropout of the attention weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": data.tokenizer.vocab_size, "n_positions": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).save_pretrained(tmp_path / "gpt2")
    changes = {"model": tmp_path / "gpt2", "transfer_steps": 2, "tuning_steps": 2, "tuning": "lora"}
    config = ConversionConfig(**{**options, **changes}, out=tmp_path / "out")
    with pytest.raises(ValueError, match=r"attention dropout of 0\.1"):
        convert(config, progress=False)
    result = convert(dataclasses.replace(config, dropout="ignore"), progress=False)
    found, original = tensors(result.folder / "model"), GPT2LMHeadModel.from_pretrained(tmp_path / "gpt2").state_dict()
    changed = {name for name, tensor in original.items() if not torch.equal(found[name], tensor)}
    assert changed == {f"transformer.h.0.attn.{name}.weight" for name in ("c_attn", "c_proj")}


def test_text_of_another_tokenizer_is_refused(options, data, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(options["model"])
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "model")
    config = ConversionConfig(**{**options, "model": tmp_path / "model"}, out=tmp_path / "out")
    with pytest.raises(ValueError, match="vocabulary has 100 tokens"):
        convert(config, progress=False)


def test_a_tokenizer_of_the_same_size_with_other_ids_is_refused(options, data, tmp_path):
    """The model's folder has its own tokenizer: the same bytes in another order."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = AutoModelForCausalLM.from_pretrained(options["model"])
    model.save_pretrained(tmp_path / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*reversed(alphabet), "<|endoftext|>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    config = ConversionConfig(**{**options, "model": tmp_path / "model"}, out=tmp_path / "out")
    with pytest.raises(ValueError, match="gives other ids for the same text"):
        convert(config, progress=False)


def test_a_tokenizer_from_elsewhere_goes_with_the_converted_model(options, data, tmp_path):
    """Its files, chat template and all; and the text has to be its own."""
    elsewhere = tmp_path / "tokenizer"
    to_fast_tokenizer(data.tokenizer).save_pretrained(elsewhere)
    (elsewhere / "chat_template.jinja").write_text("{{ messages[0].content }}")
    steps = {"transfer_steps": 1, "tuning_steps": 1, "tokenizer": elsewhere}
    result = convert(ConversionConfig(**{**options, **steps}, out=tmp_path / "out"), progress=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (result.folder / "model" / name).read_bytes() == (elsewhere / name).read_bytes()


def test_a_tokenizer_that_is_none_is_refused_before_work(options, tmp_path):
    config = ConversionConfig(**options, tokenizer=tmp_path, out=tmp_path / "out")
    with pytest.raises(ValueError, match="--tokenizer: expected a folder with one of"):
        convert(config, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("pixels")
def test_the_command_prints_what_was_regained(options, tmp_path, capsys):
    steps = ["--transfer-steps", "2", "--distillation-steps", "2", "--tuning-steps", "2"]
    flags = [*steps, "--context", "64", "--eval-tokens", "640"]
    chosen = ["--attention", "polysketch-paper", "--attention-options", "local_chunk=4", "sketch_size=8", "--layers=-1"]
    folders = ["convert", str(options["model"]), "--data", str(options["data"]), "--out", str(tmp_path / "out")]
    assert main([*folders, *flags, *chosen, "--json"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "after replacing it" in printed[2]
    assert printed[4].startswith("after distillation")
    assert printed[5].startswith("after fine-tuning")
    report = json.loads(printed[-1])
    assert list(report["stages"][1]["transfer_error"]) == ["1"]
    assert report == unsealed(json.loads((tmp_path / "out" / "report.json").read_text()), "report.json")
    assert (tmp_path / "out" / "report.png").is_file()


def test_the_regained_share_is_of_the_perplexity_gap():
    figures = {
        name: {"stage": name, "loss": 0.0, "perplexity": perplexity}
        for name, perplexity in (
            *(("original", 10.0), ("replaced", 30.0)),
            *(("tuning", 12.0), ("distillation", 15.0), ("transfer", 20.0)),
        )
    }
    report = build_report(figures)
    assert [line["regained"] for line in report["stages"]] == [1.0, 0.0, 0.5, 0.75, 0.9]
    assert report["regained"] == 0.9
    for perplexity in (9.0, 10.05, None):  # better, no worse than noise, infinite
        assert (
            build_report({**figures, "replaced": {**figures["replaced"], "perplexity": perplexity}})["regained"] is None
        )


def test_a_model_of_our_own_is_refused_by_name(options, data, tmp_path):
    """It has its mechanism already, and no softmax attention of transformers."""
    from polysketch.integrations.huggingface import PolysketchForCausalLM
    from polysketch.models import ModelConfig, TransformerLM

    own = TransformerLM(ModelConfig(data.tokenizer.vocab_size, 1, 32, num_heads=1, attention="softmax"))
    PolysketchForCausalLM.from_transformer(own).save_pretrained(tmp_path / "own")
    config = ConversionConfig(**{**options, "model": tmp_path / "own"}, out=tmp_path / "out")
    with pytest.raises((TypeError, ValueError), match="PolysketchForCausalLM"):
        convert(config, progress=False)


def test_a_conversion_whose_plot_cannot_be_written_is_finished_all_the_same(options, tmp_path, monkeypatch, capsys):
    def fail(stages, path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retraining, "plot_report", fail)
    few = {**options, "transfer_steps": 1, "tuning_steps": 1, "eval_tokens": 64}
    result = convert(ConversionConfig(**few, out=tmp_path / "out"))
    assert result.stopped_by == "finished"
    assert (result.folder / "model" / "model.polysketch.safetensors").exists()
    assert "note: no plot of the report" in capsys.readouterr().err
