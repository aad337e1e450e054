"""`polysketch generate`: text as it comes, whole characters only, and figures at the end."""

import json

import pytest
import torch

import polysketch.cli.generate  # noqa: F401  (patched by name)
from polysketch.cli import main
from polysketch.data import PreparedData
from polysketch.models import ModelConfig, TransformerLM


@pytest.fixture(autouse=True)
def _run(stand_in_run):
    stand_in_run()


class ScriptedModel(TransformerLM):
    """Says a given text byte by byte, whatever it is asked, and then the end of text."""

    def __init__(self, text: str) -> None:
        super().__init__(ModelConfig(257, num_layers=1, hidden_size=64, num_heads=1, attention="softmax"))
        self._script = [*text.encode(), 256]
        self._said = 0

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        token = self._script[self._said]
        self._said += 1
        return torch.nn.functional.one_hot(torch.tensor(token), 257).float().expand(*hidden.shape[:-1], 257) * 1000


def last_json(output: str) -> dict:
    """The last line, as JSON."""
    return json.loads(output.splitlines()[-1])


def test_one_prompt_is_streamed_and_then_the_figures(capsys):
    """The prompt, its continuation, then speed and size."""
    assert main(["generate", "run", "--prompt", "The ", "--max-new-tokens", "20", "--json"]) == 0
    output = capsys.readouterr().out
    found = last_json(output)
    assert output.startswith("The " + found["texts"][0])
    assert "20 tokens" in output
    assert "tokens per second" in output
    assert found["state_bytes"] > 0
    assert len(found["tokens"][0]) == 20


def test_a_character_of_several_bytes_is_written_once_it_is_whole(monkeypatch, capsys, stand_in_run):
    """Every piece that reaches the screen is correct text."""
    text = "é 10 € 日本 🙂!"
    stand_in_run(ScriptedModel(text))
    pieces = []
    monkeypatch.setattr("polysketch.cli.generate._write", pieces.append)
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
    monkeypatch.setattr("polysketch.cli.generate._write", pieces.append)
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
        (["run", "--top-k", "0"], "top_k"),
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
