"""`polysketch generate`: text as it comes, whole characters only, and figures at the end."""

import io
import json
import re

import pytest
import torch

import polysketch.cli.generate  # noqa: F401  (patched by name)
from polysketch.cli import main
from polysketch.data import PreparedData
from polysketch.models import ModelConfig, TransformerLM
from polysketch.progress import Progress


@pytest.fixture(autouse=True)
def _run(stand_in_run):
    stand_in_run()


class ScriptedModel(TransformerLM):
    """Says a given text byte by byte, whatever it is asked, and then the end of text."""

    def __init__(self, text: str, vocab_size: int = 257) -> None:
        super().__init__(ModelConfig(vocab_size, num_layers=1, hidden_size=64, num_heads=1, attention="softmax"))
        self._script = [*text.encode(), 256]
        self._said = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        token = self._script[self._said]
        self._said += 1
        logits = 1000.0 * torch.nn.functional.one_hot(torch.tensor(token), self.config.vocab_size)
        return logits.expand(*hidden.shape[:-1], -1)


def last_json(output: str) -> dict:
    """The last line, as JSON."""
    return json.loads(output.splitlines()[-1])


def test_one_prompt_is_streamed_and_then_the_figures(capsys):
    """The prompt, its continuation, then speed and size."""
    assert main(["generate", "run", "--prompt", "The ", "--max-new-tokens", "20", "--json"]) == 0
    output, figures = capsys.readouterr()
    found = last_json(output)
    assert output.startswith("The " + found["texts"][0])
    assert "20 tokens" in figures
    assert "tokens per second" in figures
    assert found["state_bytes"] > 0
    assert len(found["tokens"][0]) == 20


def test_a_character_of_several_bytes_is_written_once_it_is_whole(monkeypatch, capsys, stand_in_run):
    """Every piece that reaches the screen is correct text."""
    text = "é 10 € 日本 🙂!"
    stand_in_run(ScriptedModel(text))
    pieces = []
    monkeypatch.setattr("polysketch.cli.generate.write_visible", pieces.append)
    assert main(["generate", "run", "--prompt", "x", "--temperature", "0", "--json"]) == 0
    assert "".join(pieces[1:]) == text
    assert "�" not in "".join(pieces)
    assert len([piece for piece in pieces[1:] if piece]) == len(text)
    found = last_json(capsys.readouterr().out)
    assert found["texts"] == [text]
    assert found["stopped"] == [True]


def test_bytes_that_are_no_text_are_shown_as_such(monkeypatch, stand_in_run):
    """A character that is never finished is not lost in silence."""
    model = ScriptedModel("ab")
    model._script = [ord("a"), 0xE2, 256]
    stand_in_run(model)
    pieces = []
    monkeypatch.setattr("polysketch.cli.generate.write_visible", pieces.append)
    assert main(["generate", "run", "--prompt", "x", "--temperature", "0"]) == 0
    assert "".join(pieces) == "xa�"


def test_several_prompts_are_continued_each_as_if_alone(capsys):
    """And printed one after the other."""
    assert main(["generate", "run", "--prompt", "one", "--prompt", "three", "--max-new-tokens", "9", "--json"]) == 0
    output = capsys.readouterr().out
    found = last_json(output)
    assert found["prompts"] == ["one", "three"]
    assert "--- 1 ---\none" in output
    assert "--- 2 ---\nthree" in output
    assert main(["generate", "run", "--prompt", "three", "--max-new-tokens", "9", "--json"]) == 0
    assert last_json(capsys.readouterr().out)["tokens"] == found["tokens"][1:]


def test_without_a_prompt_a_new_text_is_begun(capsys, data_folder, small_model):
    """As after the end of another text."""
    from polysketch.generation import generate

    assert main(["generate", "run", "--max-new-tokens", "5", "--temperature", "0", "--json"]) == 0
    end_of_text = PreparedData.open(data_folder).tokenizer.end_of_text
    expected = generate(small_model, [[end_of_text]], max_new_tokens=5, temperature=0, stop=end_of_text)
    assert last_json(capsys.readouterr().out)["tokens"] == expected.tokens


def test_text_alone_goes_to_standard_output(capsys):
    """So that it can be piped."""
    assert main(["generate", "run", "--prompt", "The ", "--max-new-tokens", "5", "--temperature", "0"]) == 0
    plain = capsys.readouterr().out
    assert main(["generate", "run", "--prompt", "The ", "--max-new-tokens", "5", "--temperature", "0", "--json"]) == 0
    found = last_json(capsys.readouterr().out)
    assert plain == "The " + found["texts"][0] + "\n"


def test_a_stop_string_ends_the_text_and_is_not_shown(stand_in_run, capsys):
    """Also where it comes in pieces."""
    stand_in_run(ScriptedModel("a€b END of it"))
    stops = ["--stop", "ENDE", "--stop", "END"]
    assert main(["generate", "run", "--prompt", "x", "--temperature", "0", *stops, "--json"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("xa€b \n")
    assert last_json(output)["texts"] == ["a€b "]
    assert last_json(output)["stopped"] == [True]


def test_samples_of_a_prompt_differ_and_the_first_is_that_of_one(capsys):
    wild = ["generate", "run", "--prompt", "a", "--max-new-tokens", "9", "--temperature", "9", "--json"]
    assert main([*wild, "--num-samples", "3"]) == 0
    several = last_json(capsys.readouterr().out)["tokens"]
    assert len({tuple(tokens) for tokens in several}) == 3
    assert main(wild) == 0
    assert last_json(capsys.readouterr().out)["tokens"] == several[:1]


def test_a_prompt_is_read_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert main(["generate", "run", "--prompt", "-", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("from a pipe\n")


def converse(monkeypatch, capsys, lines, *arguments):
    """What is said in a conversation."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
    assert main(["generate", "run", "--interactive", "--temperature", "0", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("attention", ["softmax", "polysketch", "linear"])
def test_a_conversation_is_what_one_prompt_with_all_turns_gives(
    monkeypatch, capsys, data_folder, stand_in_run, attention
):
    """Nothing is forgotten between turns, nothing is read twice, and the model's last token is read too."""
    from polysketch.generation import generate

    torch.manual_seed(1)
    model = TransformerLM(ModelConfig(257, num_layers=2, hidden_size=64, num_heads=1, attention=attention))
    stand_in_run(model)
    tokenizer = PreparedData.open(data_folder).tokenizer
    tokens, expected = list(b"So: "), ""
    for line in ("first\n", "and second\n", "third\n"):
        tokens += line.encode()
        made = generate(model, [tokens], max_new_tokens=7, temperature=0, stop=256).tokens[0]
        tokens, expected = tokens + made, expected + tokenizer.decode(made) + "\n"
    shown = converse(
        monkeypatch, capsys, ["first\n", "and second\n", "third\n"], "--prompt", "So: ", "--max-new-tokens", "7"
    )
    assert shown == expected


def test_prompts_of_a_file_are_continued_each_as_if_alone(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('"one"\n\n{"prompt": "three", "id": 7}\n"two"\n')
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl"), "--batch-size", "2"]
    assert main(["generate", "run", *files, "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == ""
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in found] == ["one", "three", "two"]
    for one in found:
        assert main(["generate", "run", "--prompt", one["prompt"], "--max-new-tokens", "9", "--json"]) == 0
        assert last_json(capsys.readouterr().out)["texts"] == [one["text"]]


def test_prompts_of_a_file_show_how_many_are_done_and_the_time_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("polysketch.progress._SECONDS_BETWEEN", {False: 0.0})
    monkeypatch.setattr(Progress.__init__, "__kwdefaults__", {**Progress.__init__.__kwdefaults__, "quiet_seconds": 0.0})
    (tmp_path / "prompts.jsonl").write_text('"a"\n' * 3 + '"b"\n' * 2)
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--batch-size", "2", "--max-new-tokens", "3"]
    assert main(["generate", "run", *files, "--out", str(tmp_path / "out.jsonl")]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"0.0 %  0/5 prompts  1 tokens  0 prompts/s  \d+:\d\d left", lines[0])
    assert any(re.fullmatch(r"40.0 %  2/5 prompts  6 tokens  \S+ prompts/s  \d+:\d\d left", line) for line in lines)
    assert any(re.fullmatch(r"100.0 %  5/5 prompts  15 tokens  \S+ prompts/s  0:00 left", line) for line in lines)
    assert lines[-1] == f"5 continuations in {tmp_path / 'out.jsonl'}"


@pytest.mark.parametrize("kept", [0, 1, 30, 250, 400, 10**6])
def test_a_killed_file_of_prompts_goes_on_and_ends_the_same(tmp_path, kept):
    """From any number of bytes; equal prompts have different continuations, and keep them."""
    (tmp_path / "prompts.jsonl").write_text('"a"\n' * 3 + '"b"\n' * 2)
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--batch-size", "2", "--max-new-tokens", "9"]
    files += ["--temperature", "3"]
    assert main(["generate", "run", *files, "--out", str(tmp_path / "whole.jsonl")]) == 0
    whole = (tmp_path / "whole.jsonl").read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(whole[:kept])
    assert main(["generate", "run", *files, "--out", str(tmp_path / "cut.jsonl")]) == 0
    assert (tmp_path / "cut.jsonl").read_bytes() == whole
    assert len({line for line in whole.splitlines() if b'"prompt": "a"' in line}) == 3  # in two batches


@pytest.mark.parametrize("text", ['{"important": 1}', '"a"', "x", '{"prompt": "b'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, capsys, text):
    """Without a line break at its end it could be taken for a line that a kill has cut off."""
    (tmp_path / "prompts.jsonl").write_text('"a"\n')
    (tmp_path / "out.json").write_text(text)
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.json")]
    assert main(["generate", "run", *files, "--max-new-tokens", "3"]) == 1
    assert "found other text: nothing was changed" in capsys.readouterr().err
    assert (tmp_path / "out.json").read_text() == text


def test_ids_beyond_the_tokenizer_are_no_text(stand_in_run, capsys):
    """Of a model whose vocabulary is padded."""
    model = ScriptedModel("ab", vocab_size=300)
    model._script.insert(1, 260)
    stand_in_run(model)
    assert main(["generate", "run", "--prompt", "", "--max-new-tokens", "9"]) == 0
    assert capsys.readouterr().out == "ab\n"


def test_continuations_by_other_settings_are_not_mixed(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('"a"\n')
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    assert main(["generate", "run", *files, "--max-new-tokens", "9"]) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    capsys.readouterr()
    assert main(["generate", "run", *files, "--max-new-tokens", "8"]) == 1
    assert "another --out" in capsys.readouterr().err
    (tmp_path / "prompts.jsonl").write_text('"b"\n')
    assert main(["generate", "run", *files, "--max-new-tokens", "9"]) == 1
    assert (tmp_path / "out.jsonl").read_bytes() == before


def test_states_of_half_the_size_are_told_and_described(tmp_path, stand_in_run, capsys):
    options = {"window": 8, "sketch_size": 4}
    sizes = {
        "num_layers": 1,
        "hidden_size": 64,
        "num_heads": 1,
        "attention": "polysketch",
        "attention_options": options,
    }
    (tmp_path / "prompts.jsonl").write_text('"a"\n')
    files = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    size = {}
    for dtype in (None, "float16"):
        stand_in_run(TransformerLM(ModelConfig(257, **sizes)))
        given = [] if dtype is None else ["--state-dtype", dtype]
        assert main(["generate", "run", "--prompt", "The ", "--max-new-tokens", "20", "--json", *given]) == 0
        size[dtype] = last_json(capsys.readouterr().out)["state_bytes"]
        assert main(["generate", "run", *files, "--max-new-tokens", "3", *given]) == (0 if dtype is None else 1)
    assert size["float16"] < 0.6 * size[None]
    assert "another --out" in capsys.readouterr().err


def test_sums_that_stay_in_float32_are_told(stand_in_run, capsys):
    stand_in_run(TransformerLM(ModelConfig(257, num_layers=1, hidden_size=64, num_heads=1, attention="linear")))
    assert main(["generate", "run", "--prompt", "a", "--state-dtype", "bfloat16"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "polysketch: --state-dtype: states cannot be kept in torch.bfloat16: layer 0: LinearAttention"
    )


@pytest.mark.parametrize("line", ["{", "7", '{"text": "a"}', "[" * 99_999])
def test_a_line_that_is_no_prompt_is_named(tmp_path, capsys, line):
    (tmp_path / "prompts.jsonl").write_text(f'"a"\n{line}\n')
    assert main(["generate", "run", "--prompts", str(tmp_path / "prompts.jsonl"), "--out", "x"]) == 1
    assert "prompts.jsonl:2" in capsys.readouterr().err


def test_the_seed_is_the_users(capsys):
    """The same gives the same, another another."""
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["generate", "run", "--prompt", "a", "--max-new-tokens", "30", "--seed", seed, "--json"]) == 0
        texts.append(last_json(capsys.readouterr().out)["texts"])
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["elsewhere"], "expected a run folder"),
        (["run", "--temperature", "-1"], "temperature"),
        (["run", "--top-p", "0"], "top_p"),
        (["run", "--repetition-penalty", "0"], "repetition_penalty"),
        (["run", "--beams", "2", "--repetition-penalty", "1.2"], "--beams without"),
        (["run", "--top-k", "0"], "top_k"),
        (["run", "--prompts", "absent.jsonl", "--out", "x"], "nothing at absent.jsonl"),
        (["run", "--prompts", "a.jsonl"], "--prompts and --out together"),
        (["run", "--prompts", "a.jsonl", "--out", "x", "--interactive"], "expected --prompts without"),
        (["run", "--interactive", "--json"], "without --json"),
        (["run", "--stop", ""], "no empty --stop"),
        (["run", "--num-samples", "0"], "at least one sample"),
        (["run", "--max-new-tokens", "0"], "max_new_tokens"),
        (["run", "--device", "gpu"], "--device: expected one of auto, cpu"),
        (["run", "--device", "cuda:99"], "--device: expected one of auto, cpu"),
        (["run", "--device", "meta"], "--device: expected one of auto, cpu"),
    ],
)
def test_bad_input_gives_one_line_and_status_1(capsys, arguments, message):
    """And no traceback."""
    assert main(["generate", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("polysketch: ")
    assert message in line


def test_a_setting_that_means_nothing_is_refused_before_the_prompt_is_shown(capsys):
    assert main(["generate", "run", "--prompt", "x", "--temperature", "-1"]) != 0
    told = capsys.readouterr()
    assert told.out == ""
    assert "temperature of at least 0" in told.err
