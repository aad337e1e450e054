"""Training on packed documents: none sees another, parts weigh what they predict, and a run resumes bit for bit."""

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from attention.covering import first_always
from polysketch.data import DocumentRows, PreparedData, prepare
from polysketch.evaluation import evaluate
from polysketch.storage.sums import sha256_of
from polysketch.training import load_model, train
from polysketch.training.checkpoint import MODEL_FILE, load_checkpoint
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder
from polysketch.training.start import make_plan
from polysketch.training.step import Updater
from polysketch.training.trainer import build_model

CONTEXT = 64


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    """The same documents, of 3 to 150 bytes, in the training split and for validation."""
    folder = tmp_path_factory.mktemp("documents")
    draw = random.Random(0)
    lines = []
    for number in range(40):
        text = f"{number} " + "".join(
            draw.choice("abcdef ") for _ in range(draw.choice([1, 5, 9, 20, 33, 37, 40, 147]))
        )
        lines.append(json.dumps({"text": text}) + "\n")
    for split in ("train", "validation"):
        (folder / split).mkdir()
        (folder / split / "texts.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def documents_folder(text_folder):
    """The documents as bytes."""
    prepare(text_folder, "bytes", text_folder.parent / "documents-data", progress=False)
    return text_folder.parent / "documents-data"


@pytest.fixture
def make_packed(make_config, documents_folder):
    """A function that gives the options of a run on packed documents, with changes."""

    def make(**changes):
        return make_config(**{"data": documents_folder, "pack": "documents", **changes})

    return make


def rows_of(config) -> DocumentRows:
    split = PreparedData.open(config.data).split("train")
    return DocumentRows(split.tokens, config.context, config.seed, 256)


def metrics_of(config, kind="train"):
    lines = MetricsFile(RunFolder(config.out).metrics).read()
    return [line for line in lines if line["kind"] == kind]


def test_the_data_of_these_tests_has_short_and_long_documents_and_padding(make_packed):
    rows = rows_of(make_packed())
    batch = rows.batch(0, rows.num_rows)
    lengths = batch.cu_seqlens.diff()
    assert lengths.min() < 5
    assert (lengths == CONTEXT).any()
    assert 0.01 < rows.padding_share < 0.1
    assert len(lengths) > 1.5 * rows.num_rows


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("polysketch", {"window": 16, "sketch_size": 8}),
        ("polysketch-paper", {"local_chunk": 16, "sketch_size": 8}),
        ("softmax", {}),
    ],
)
def test_changing_one_document_changes_the_loss_of_no_other(make_packed, attention, options):
    plan = make_plan(make_packed(batch_size=3, attention=attention, attention_options=options))
    torch.manual_seed(0)
    model = build_model(plan)
    batch = plan.goal.rows().batch(0, 3)
    bounds = batch.cu_seqlens.tolist()

    def losses(ids):
        with torch.no_grad():
            return model.token_losses(model.hidden_states(ids, cu_seqlens=batch.cu_seqlens), batch.targets)[0]

    before = losses(batch.ids)
    for document in (0, 2, len(bounds) // 2):
        start, stop = bounds[document : document + 2]
        changed = batch.ids.clone()
        changed[0, start:stop] = (changed[0, start:stop] + 1) % 256
        after = losses(changed)
        own = torch.zeros(len(before), dtype=torch.bool)
        own[start:stop] = True
        assert torch.equal(before[~own], after[~own])
        assert (before[own] != after[own]).any() or (batch.targets[0, own] == -100).all()


@pytest.mark.parametrize("accumulation", [2, 3, 6])
def test_parts_of_a_batch_weigh_what_they_predict(make_packed, accumulation):
    """The gradient is that of the mean over all targets: parts with more padding weigh less."""

    def gradients(parts):
        plan = make_plan(make_packed(batch_size=6, context=128, accumulation=parts, clip=1e9))
        torch.manual_seed(0)
        model = build_model(plan)
        updater = Updater(model, plan.config.step_options(), torch.float32)
        rows = plan.goal.rows()
        step = next(step for step in range(50) if len({part.num_tokens for part in rows.batch(step, 6).split(1)}) > 1)
        batch = rows.batch(step, 6)
        counts = [part.num_tokens for part in batch.split(6 // accumulation)]
        return updater.compute_gradient(batch), {name: p.grad for name, p in model.named_parameters()}, counts

    (whole, expected, counts), (parts, found, _) = gradients(1), gradients(accumulation)
    assert len(set(counts)) > 1
    assert parts.tokens == whole.tokens == sum(counts)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=2e-6 * whole.norm)


def test_the_loss_is_the_mean_of_what_each_document_costs_alone(make_packed):
    plan = make_plan(make_packed(batch_size=4))
    torch.manual_seed(0)
    model = build_model(plan)
    batch = plan.goal.rows().batch(1, 4)
    found = Updater(model, plan.config.step_options(), torch.float32).compute_gradient(batch)
    total, count = 0.0, 0
    with torch.no_grad():
        for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
            ids, targets = batch.ids[:, start:stop], batch.targets[:, start:stop]
            total += float(model.token_losses(model.hidden_states(ids), targets).sum())
            count += int((targets != -100).sum())
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.tokens == count


@pytest.mark.parametrize(
    ("where", "log_every"),
    [
        ("in the middle of an epoch", 3),
        pytest.param("at the end of an epoch", 1, marks=pytest.mark.full),
        pytest.param("in the middle of an epoch", 1, marks=pytest.mark.full),
        pytest.param("at the end of an epoch", 3, marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_it_ends_the_same(make_packed, tmp_path, monkeypatch, assert_same_outcome, where, log_every):
    """Two epochs and a step; the process dies in a step, after a checkpoint."""
    two_epochs = -(-rows_of(make_packed()).num_rows // 2)  # in steps of four rows
    config = make_packed(batch_size=4, steps=two_epochs + 1, save_every=1, log_every=log_every, eval_every=0)
    expected = train(dataclasses.replace(config, out=tmp_path / "left-alone"), progress=False).folder
    last = two_epochs // 3 if where == "in the middle of an epoch" else two_epochs
    compute_gradient = Updater.compute_gradient
    calls = []

    class Killed(BaseException):
        pass

    def dying(self, batch):
        calls.append(batch)
        if len(calls) == last + 1:
            raise Killed
        return compute_gradient(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Updater, "compute_gradient", dying)
        with pytest.raises(Killed):
            train(config, progress=False)
    train(dataclasses.replace(config, resume=True), progress=False)
    assert_same_outcome(config.out, expected)


def test_metrics_count_what_is_predicted_and_say_the_share_of_padding(make_packed, capsys):
    config = make_packed(steps=5, log_every=2)
    train(config)
    rows = rows_of(config)
    counts = [rows.batch(step, 2).num_tokens for step in range(5)]
    assert len(set(counts)) > 1
    assert [line["tokens"] for line in metrics_of(config)] == [sum(counts[:steps]) for steps in (2, 4, 5)]
    shares = [1 - sum(counts[:steps]) / (steps * 2 * CONTEXT) for steps in (2, 4, 5)]
    assert [line["padding_share"] for line in metrics_of(config)] == shares
    told = f"documents packed into {rows.num_rows} rows an epoch, {rows.padding_share:.2%} padding"
    assert told in capsys.readouterr().err


def test_speed_counts_what_is_predicted(make_packed):
    config = make_packed(steps=3, log_every=1)
    train(config, progress=False)
    before = {"tokens": 0, "seconds": 0.0}
    for line in metrics_of(config):
        seconds = line["seconds"] - before["seconds"]
        assert line["tokens_per_second"] == pytest.approx((line["tokens"] - before["tokens"]) / seconds, rel=0.2)
        before = line


def test_a_new_run_packs_documents_and_says_so(make_packed):
    config = make_packed(pack="auto", steps=1)
    train(config, progress=False)
    assert RunFolder(config.out).read_config()["training"]["pack"] == "documents"
    assert "padding_share" in metrics_of(config)[0]


def test_a_compiled_run_has_windows_and_refuses_documents(make_packed):
    assert make_plan(make_packed(pack="auto", compile=True)).config.pack == "windows"
    with pytest.raises(ValueError, match=r"--pack documents: expected no --compile.*give --pack windows"):
        make_packed(compile=True)


def test_something_else_to_pack_is_refused(make_packed):
    with pytest.raises(ValueError, match="--pack: expected one of auto, documents, windows, found 'books'"):
        make_packed(pack="books")


def older_than_the_choice(config) -> None:
    """Make of a run one that was begun before rows could be chosen."""
    run = RunFolder(config.out)
    saved = run.read_config()
    del saved["training"]["pack"]
    run.write_config(saved)
    for checkpoint in run.checkpoints.iterdir():
        state = json.loads((checkpoint / "state.json").read_text())
        del state["tokens"]
        replaced = dataclasses.replace(load_checkpoint(checkpoint), state=state)
        shutil.rmtree(checkpoint)
        save(run, replaced)


def save(run, checkpoint) -> None:
    from polysketch.training.checkpoint import save_checkpoint

    save_checkpoint(run.checkpoints, checkpoint, keep=99)


@pytest.mark.parametrize("given", first_always(["auto", "windows"]))
def test_a_run_begun_before_there_was_a_choice_goes_on_with_windows(make_packed, tmp_path, assert_same_outcome, given):
    windows = make_packed(pack="windows", keep=9)
    expected = train(dataclasses.replace(windows, out=tmp_path / "left-alone"), progress=False).folder
    train(windows, progress=False)
    older_than_the_choice(windows)
    resumed = dataclasses.replace(windows, resume=True, checkpoint="step-00000002", pack=given)
    with pytest.raises(ValueError, match="--pack was windows and is now documents"):
        train(dataclasses.replace(resumed, pack="documents"), progress=False)
    train(resumed, progress=False)
    assert_same_outcome(windows.out, expected)
    assert (windows.out / "checkpoints" / "step-00000006" / MODEL_FILE).is_file()
    assert metrics_of(windows)[-1]["tokens"] == 6 * 2 * CONTEXT
    assert "padding_share" not in metrics_of(windows)[-1]


def only_ends(folder: Path, split: str) -> None:
    """Make every token of a split an end of text, in a folder that is whole."""
    file, about = folder / f"{split}.bin", folder / "description.json"
    file.write_bytes(b"\x00\x01" * (file.stat().st_size // 2))
    described = json.loads(about.read_text())
    del described["sha256"]  # the description's own
    described["splits"][split]["sha256"] = sha256_of(file)
    about.write_text(json.dumps(described))


def test_text_in_which_nothing_can_be_predicted_is_refused_before_a_run_is_begun(make_packed, tmp_path, monkeypatch):
    folder = shutil.copytree(make_packed().data, tmp_path / "ends")
    only_ends(folder, "train")
    config = make_packed(data=folder)
    with pytest.raises(ValueError, match="expected a document of at least 2 tokens, found none"):
        train(config, progress=False)
    assert not RunFolder(config.out).has_run()


def test_a_text_of_one_short_document_is_trained_on_again_and_again(make_packed, tmp_path):
    for split in ("train", "validation"):
        (tmp_path / "one" / split).mkdir(parents=True)
        (tmp_path / "one" / split / "text.txt").write_text("ab" * CONTEXT)
    prepare(tmp_path / "one", "bytes", tmp_path / "one-data", progress=False)
    config = make_packed(data=tmp_path / "one-data", batch_size=8, steps=20)
    train(config, progress=False)
    lines = metrics_of(config)
    assert lines[-1]["loss"] < lines[0]["loss"] - 2.0
    assert lines[-1]["tokens"] == 20 * 8 * CONTEXT


def validation_loss(config, **options) -> float:
    """Of the last checkpoint of a run, on the first tokens of its validation split."""
    model, _ = load_model(config.out)
    data = PreparedData.open(config.data)
    given = {"context_length": config.context, "max_tokens": config.eval_tokens, **options}
    return evaluate(model, data.split("validation").tokens, **given).loss


def test_validation_reads_what_training_reads(make_packed, tmp_path, capsys):
    documents = make_packed(eval_tokens=400, eval_every=3)
    windows = dataclasses.replace(documents, pack="windows", out=tmp_path / "windows")
    carried = dataclasses.replace(
        documents, carry_state=True, attention="polysketch", attention_options={}, out=tmp_path / "carried"
    )
    ways = {"documents": {"end_of_text": 256}, "windows": {}, "carried": {"end_of_text": 256, "carry": True}}
    told = {"documents": ", documents apart", "windows": "", "carried": ", whole documents"}
    for config, (name, options) in zip((documents, windows, carried), ways.items(), strict=True):
        train(config)
        assert RunFolder(config.out).read_config()["training"]["validation"] == name
        last = metrics_of(config, "evaluation")[-1]
        assert last["loss"] == pytest.approx(validation_loss(config, **options), rel=1e-6)
        others = [validation_loss(config, **other) for other_name, other in ways.items() if other_name != name]
        assert all(abs(last["loss"] - other) > 1e-5 for other in others)
        assert f"bits per byte{told[name]}\n" in capsys.readouterr().err


def test_a_run_begun_when_validation_was_on_windows_keeps_to_them(make_packed, tmp_path):
    config = make_packed(steps=4, eval_every=2)
    train(config, progress=False)
    run = RunFolder(config.out)
    saved = run.read_config()
    del saved["training"]["validation"]
    run.write_config(saved)
    train(dataclasses.replace(config, resume=True, extend=True, steps=6), progress=False)
    last = metrics_of(config, "evaluation")[-1]
    assert last["loss"] == pytest.approx(validation_loss(config), rel=1e-6)
    assert abs(last["loss"] - validation_loss(config, end_of_text=256)) > 1e-5
    assert run.read_config()["training"]["validation"] == "windows"


def test_a_validation_split_in_which_nothing_can_be_predicted_is_refused(make_packed, tmp_path):
    folder = shutil.copytree(make_packed().data, tmp_path / "ends")
    only_ends(folder, "validation")
    config = make_packed(data=folder)
    with pytest.raises(ValueError, match="--eval-tokens: expected a document of at least 2 tokens among the first 101"):
        train(config, progress=False)
    assert not RunFolder(config.out).has_run()
    train(dataclasses.replace(config, eval_every=0), progress=False)


@pytest.mark.parametrize("changes", [{}, {"validation": "windows", "pack": "windows"}])
def test_a_validation_split_of_one_token_is_refused(make_packed, tmp_path, changes):
    folder = shutil.copytree(make_packed().data, tmp_path / "short")
    file, about = folder / "validation.bin", folder / "description.json"
    file.write_bytes(file.read_bytes()[:2])
    described = json.loads(about.read_text())
    del described["sha256"]  # the description's own
    described["splits"]["validation"] |= {"tokens": 1, "sha256": sha256_of(file)}
    about.write_text(json.dumps(described))
    config = make_packed(data=folder, **changes)
    with pytest.raises(ValueError, match=r"--data: expected at least 2 validation tokens in .*, found 1: prepare more"):
        train(config, progress=False)
    assert not RunFolder(config.out).has_run()
