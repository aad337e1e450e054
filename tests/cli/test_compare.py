"""`polysketch compare`: runs side by side, best first, and never losses that mean different things."""

import json

import pytest

from polysketch.cli import main
from polysketch.storage import strict_json


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """A function that writes what a run says of itself."""
    monkeypatch.chdir(tmp_path)

    def make(name, losses, *, data="a" * 64, steps=100, attention="softmax", training=None, **options):
        folder = tmp_path / name
        folder.mkdir()
        config = {
            "format": 3,
            "training": {"context": 64, "extend": False, "steps": steps, **(training or {})},
            "resolved": {"dtype": "float32"},
            "model": {"attention": attention, "attention_options": options},
            "data": {"folder": "data", "description_sha256": data},
            "environment": {},
        }
        (folder / "config.json").write_text(json.dumps(config))
        lines = [{"kind": "train", "step": 50, "loss": 3.0, "tokens": 6400, "seconds": 61.2}]
        lines += [{"kind": "evaluation", "step": step, "loss": loss} for step, loss in losses]
        (folder / "metrics.jsonl").write_bytes(b"".join(map(strict_json.encoded, lines)))

    return make


@pytest.mark.usefixtures("pixels")
def test_the_best_run_comes_first_with_what_it_is(make_run, capsys, tmp_path):
    make_run("plain", [(10, 2.5), (50, 2.25)])
    make_run("own", [(10, 2.125), (50, 2.375)], steps=50, attention="polysketch", window=16)
    make_run("begun", [])
    assert main(["compare", "plain", "own", "begun", "--plot", "losses.png", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["own", "plain", "begun"]
    assert "polysketch window=16" in lines[1]
    assert "2.1250 at 10" in lines[1]
    assert lines[1].endswith("2.3750")
    assert "50 of 100" in lines[2]
    assert "1:01" in lines[2]
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert [run["validation"] for run in json.loads(lines[-1])] == [
        [[10, 2.5], [50, 2.25]],
        [[10, 2.125], [50, 2.375]],
        [],
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["one", "other"], "expected runs of the same data, found other data in other"),
        (["one", "one"], "found one twice"),
        (["one", "absent"], "expected a run folder"),
        (["one", "--plot", "losses.doc"], ".png"),
        (["one", "masked"], "expected runs of one objective, found masked in masked and auto in one"),
        (["unborn"], "expected a run with a line of metrics"),
        (["one", "--plot", "none/losses.png"], "expected a folder none"),
    ],
)
def test_what_cannot_be_compared_is_refused(make_run, capsys, arguments, message):
    make_run("one", [(10, 2.5)])
    make_run("other", [(10, 2.5)], data="b" * 64)
    make_run("masked", [(10, 2.5)], training={"objective": "masked"})
    make_run("unborn", [])
    open("unborn/metrics.jsonl", "w").close()
    assert main(["compare", *arguments]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_note_says_where_losses_are_measured_otherwise(make_run, capsys):
    make_run("old", [(10, 2.5)], training={"eval_tokens": 99})
    make_run("new", [(10, 2.25)], training={"eval_tokens": 99, "validation": "documents"})
    make_run("same", [(10, 2.5)], training={"eval_tokens": 99, "validation": "windows"})
    assert main(["compare", "old", "same"]) == 0
    assert "note" not in capsys.readouterr().out
    assert main(["compare", "old", "new"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "note: losses are of other --validation: windows in old, documents in new"


def test_without_an_evaluation_there_is_nothing_to_draw(make_run, capsys):
    make_run("begun", [])
    assert main(["compare", "begun", "--plot", "losses.png"]) == 1
    assert "nothing to draw" in capsys.readouterr().err


def test_lines_without_what_is_compared_are_left_out(make_run, capsys):
    make_run("one", [(10, 2.5)])
    with open("one/metrics.jsonl", "a") as file:
        for line in ({"step": 60}, {"kind": "train", "step": 60, "tokens": 7}, {"kind": "evaluation", "step": 60}):
            file.write(json.dumps(line) + "\n")
    assert main(["compare", "one"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == [
        "one",
        "softmax",
        "50",
        "of",
        "100",
        "6,400",
        "1:01",
        "2.5000",
        "at",
        "10",
        "2.5000",
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"model": {"attention": "softmax", "attention_options": "none"}}, "a model's attention and its options"),
        ({"model": {"attention_options": {}}}, "a model's attention and its options"),
        ({"model": {"sizes": []}}, "a model's attention and its options"),
        ({"training": {"context": 64, "extend": False}}, "the number of steps of a training run"),
        ({"training": {"context": 64, "extend": False, "steps": "9"}}, "the number of steps of a training run"),
    ],
)
def test_a_configuration_that_does_not_say_what_a_run_is_is_refused(make_run, capsys, entry, message):
    make_run("one", [(10, 2.5)])
    with open("one/config.json") as file:
        config = json.load(file)
    with open("one/config.json", "w") as file:
        json.dump(config | entry, file)
    assert main(["compare", "one"]) == 1
    assert f"expected {message} in one/config.json" in capsys.readouterr().err


def test_seeds_are_told_where_they_choose_the_hidden_tokens_of_validation(make_run, capsys):
    for seed in (0, 1):
        make_run(f"masked{seed}", [(10, 2.5)], training={"objective": "masked", "mask_share": 0.15, "seed": seed})
        make_run(f"text{seed}", [(10, 2.5)], training={"seed": seed})
    assert main(["compare", "masked0", "masked1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "note: losses are of other --seed: 0 in masked0, 1 in masked1"
    assert main(["compare", "text0", "text1"]) == 0
    assert "note" not in capsys.readouterr().out


def test_shares_of_hidden_tokens_are_told_where_some_are_hidden(make_run, capsys):
    make_run("few", [(10, 2.5)], training={"objective": "masked", "mask_share": 0.15})
    make_run("many", [(10, 2.25)], training={"objective": "masked", "mask_share": 0.5})
    make_run("none", [(10, 2.25)], training={"mask_share": 0.5})
    make_run("old", [(10, 2.25)])
    assert main(["compare", "few", "many"]) == 0
    assert (
        capsys.readouterr().out.splitlines()[-1] == "note: losses are of other --mask-share: 0.15 in few, 0.5 in many"
    )
    assert main(["compare", "none", "old"]) == 0
    assert "note" not in capsys.readouterr().out
