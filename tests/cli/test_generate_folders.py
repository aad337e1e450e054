"""`polysketch generate` continues whatever causal model a folder holds: a run, an exported one, any other."""

import json
import shutil

import pytest
import torch

pytest.importorskip("transformers")

from polysketch.cli import main
from polysketch.generation import beam_search, generate
from polysketch.integrations.continuing import ContinuedHuggingFaceLM, load_to_continue
from polysketch.integrations.huggingface import PolysketchForCausalLM
from polysketch.models import ModelConfig, TransformerLM

SHARES = ["--validation-share", "0.2", "--test-share", "0.2"]
PROMPTS = ["The quick brown fox", "a", "Once upon a time there were two foxes, and"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A run, exported; and a model of transformers with its own softmax, and with replaced attention."""
    folder = tmp_path_factory.mktemp("folders")
    (folder / "texts").mkdir()
    for number in range(40):
        (folder / "texts" / f"{number}.txt").write_text(f"Once upon a time there were {number} foxes. " * 5)
    text = [
        "prepare",
        str(folder / "texts"),
        "--tokenizer",
        "bpe:280",
        "--out",
        str(folder / "data"),
        "--no-progress",
        *SHARES,
    ]
    assert main(text) == 0
    sizes = ["--layers", "1", "--context", "32", "--batch-size", "2", "--steps", "3", "--device", "cpu"]
    assert main(["train", "--data", str(folder / "data"), "--out", str(folder / "run"), *sizes]) == 0
    assert main(["export", str(folder / "run"), str(folder / "exported")]) == 0
    _other_model(folder)
    return folder


def _other_model(folder):
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from polysketch.integrations.replacement import replace_attention, save_replaced

    tokenizer = AutoTokenizer.from_pretrained(folder / "exported")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=280, max_position_embeddings=128, **sizes))
    model.save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    replace_attention(model, "linear")
    save_replaced(model, folder / "replaced")
    tokenizer.save_pretrained(folder / "replaced")


def continued(folder, *more: str, capsys) -> dict:
    capsys.readouterr()
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    assert main(["generate", str(folder), *prompts, "--max-new-tokens", "12", "--json", *more]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_an_exported_run_gives_what_the_run_gives(folders, capsys):
    run, exported = (continued(folders / name, capsys=capsys) for name in ("run", "exported"))
    assert exported["tokens"] == run["tokens"]
    assert exported["texts"] == run["texts"]


@pytest.mark.parametrize("name", ["llama", "replaced"])
def test_another_model_gives_what_transformers_generates(folders, name, capsys):
    from polysketch.integrations.transformers_folder import load_transformers

    found = continued(folders / name, "--temperature", "0", capsys=capsys)
    model, tokenizer = load_transformers(folders / name)
    for prompt, tokens in zip(PROMPTS, found["tokens"], strict=True):
        ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
        expected = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :].tolist()
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == 12 or expected[len(tokens)] == tokenizer.eos_token_id
    assert found["state_bytes"] > 0


@pytest.mark.parametrize("name", ["llama", "replaced"])
def test_a_prompt_draws_the_same_alone_and_with_others(folders, name, capsys):
    together = continued(folders / name, "--seed", "3", capsys=capsys)
    arguments = ["--prompt", PROMPTS[1], "--max-new-tokens", "12", "--json", "--seed", "3"]
    assert main(["generate", str(folders / name), *arguments]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"] == together["tokens"][1:2]


def test_prompts_of_a_file_are_continued_and_gone_on_with(folders, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    out = tmp_path / "out.jsonl"
    command = ["generate", str(folders / "llama"), "--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(out)]
    assert main([*command, "--max-new-tokens", "4", "--batch-size", "2"]) == 0
    whole = out.read_bytes()
    assert len(whole.splitlines()) == 3
    assert main([*command, "--max-new-tokens", "4", "--batch-size", "2"]) == 0
    assert out.read_bytes() == whole


def test_a_state_cut_anywhere_continues_as_if_whole(folders):
    model, tokenizer = load_to_continue(folders / "llama")
    assert isinstance(model, ContinuedHuggingFaceLM)
    assert isinstance(load_to_continue(folders / "exported")[0], TransformerLM)
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    settings = {"max_new_tokens": 6, "temperature": 0.0}
    whole = generate(model, prompts, **settings)
    in_spans = generate(model, prompts, span=3, **settings)
    assert in_spans.tokens == whole.tokens
    state = model.init_state(3)
    first = generate(model, prompts, state=state, max_new_tokens=2, temperature=0.0)
    assert state.position.tolist() == [len(prompt) + 1 for prompt in prompts]
    rest = generate(model, [tokens[-1:] for tokens in first.tokens], state=state, max_new_tokens=4, temperature=0.0)
    assert [a + b for a, b in zip(first.tokens, rest.tokens, strict=True)] == whole.tokens


def test_what_a_folder_of_transformers_has_not_is_refused(folders, tmp_path, capsys):
    assert main(["generate", str(folders / "llama"), "--checkpoint", "step-00000001"]) == 1
    assert "--checkpoint: expected a run, found a model of transformers" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["generate", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("folder", ["exported", "llama"])
def test_beams_and_guesses_of_folders(folders, folder, capsys):
    """Guesses change no text; one beam is greedy; several find a text that is at least as probable."""
    command = ["generate", str(folders / folder), "--prompt", PROMPTS[2], "--max-new-tokens", "12", "--json"]

    def found(*options: str) -> list[int]:
        assert main([*command, *options]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])["tokens"]

    greedy, drawn = found("--temperature", "0"), found("--num-samples", "2", "--temperature", "3")
    assert found("--temperature", "0", "--lookup", "4") == greedy
    assert found("--temperature", "0", "--assistant", str(folders / "exported")) == greedy
    assert found("--num-samples", "2", "--temperature", "3", "--lookup", "4") == drawn
    assert drawn[0] != drawn[1]
    assert found("--beams", "1") == greedy
    model, tokenizer = load_to_continue(folders / folder)
    prompt = tokenizer.encode(PROMPTS[2])
    expected = beam_search(model, [prompt], max_new_tokens=12, num_beams=3, stop=tokenizer.end_of_text).beams[0]
    assert found("--beams", "3") == [expected[0].tokens]
    assert found("--beams", "3", "--num-samples", "2") == [beam.tokens for beam in expected[:2]]
    assert len(expected[0].tokens) == 12
    command += ["--prompt", PROMPTS[0]]  # the samples of each prompt stand together
    assert found("--beams", "3", "--num-samples", "2")[:2] == [beam.tokens for beam in expected[:2]]
    assert found("--beams", "3", "--num-samples", "2")[2] == found("--beams", "3")[1]


def test_what_contradicts_beams_and_guesses_is_refused(folders, tmp_path, capsys):
    other = tmp_path / "other"
    shutil.copytree(folders / "exported", other)
    model = TransformerLM(ModelConfig(50, 1, hidden_size=16, num_heads=1))
    PolysketchForCausalLM.from_transformer(model).save_pretrained(other)
    (other / "SHA256SUMS").unlink()  # of the model that was there
    for options, named in (
        (["--beams", "2", "--lookup", "3"], "found --beams and --lookup"),
        (["--lookup", "2", "--interactive"], "--lookup without --interactive"),
        (["--beams", "0"], "--beams: expected at least 1, found 0"),
        (["--beams", "2", "--top-k", "3"], "--beams without --top-k"),
        (["--beams", "2", "--num-samples", "3"], "--num-samples: expected at most 2"),
        (["--assistant", str(other)], "tokens, found 50 in"),
        (["--assistant", str(tmp_path / "none")], "none"),
    ):
        assert main(["generate", str(folders / "exported"), "--prompt", "a", *options]) != 0
        error = capsys.readouterr().err
        assert named in error
        assert "Traceback" not in error


def test_positions_that_a_model_has_not_learned_are_refused_before_anything_is_written(folders, tmp_path, capsys):
    """On a GPU an index beyond the table ends the process' use of it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shutil.copytree(folders / "llama", tmp_path / "gpt2")
    (tmp_path / "gpt2" / "model.safetensors").unlink()
    config = GPT2Config(vocab_size=280, n_embd=32, n_layer=1, n_head=2, n_positions=24)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    (tmp_path / "prompts.jsonl").write_text(json.dumps("a") + "\n" + json.dumps("a long one, " * 9) + "\n")
    command = ["generate", str(tmp_path / "gpt2"), "--prompts", str(tmp_path / "prompts.jsonl")]
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path / "out.jsonl"), "--max-new-tokens", "8"]) == 1
    assert "expected prompts and new tokens of at most 24 together" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()
    model, tokenizer = load_to_continue(tmp_path / "gpt2")
    assert load_to_continue(folders / "llama")[0].most_tokens is None
    prompt = tokenizer.encode("a" * 5)
    whole = generate(model, [prompt], max_new_tokens=25 - len(prompt), temperature=0)
    assert len(whole.tokens[0]) == 25 - len(prompt)
    with pytest.raises(ValueError, match=r"at most 24 tokens in a row, .* found 25"):
        generate(model, [prompt], max_new_tokens=26 - len(prompt), temperature=0)
    with pytest.raises(ValueError, match=r"at most 24 tokens in a row, .* found 30"):
        model.hidden_states(torch.zeros(1, 30, dtype=torch.int64))
