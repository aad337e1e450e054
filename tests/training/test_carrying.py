"""Runs in which documents go on from step to step: what a step computes, what a checkpoint holds, what is refused."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from polysketch.data import PreparedData, prepare
from polysketch.distributed.mesh import Mesh
from polysketch.training import train
from polysketch.training.carried import CarriedStates
from polysketch.training.checkpoint import CARRIED_FILE, find_checkpoint, load_carried, load_checkpoint
from polysketch.training.metrics_file import MetricsFile
from polysketch.training.run_folder import RunFolder
from polysketch.training.start import make_plan
from polysketch.training.step import Updater
from polysketch.training.trainer import build_model

CONTEXT, LANES = 32, 3


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory):
    """Documents of 1 to 9 contexts, as bytes; validation has the same."""
    folder = tmp_path_factory.mktemp("long")
    for split in ("train", "validation"):
        (folder / split).mkdir()
        for number in range(7):
            lines = "\n".join(f"{left} plus {number} is {left + number}." for left in range(2 + 3 * number))
            (folder / split / f"{number}.txt").write_text(lines)
    prepare(folder, "bytes", folder.parent / "long-data", progress=False)
    return folder.parent / "long-data"


@pytest.fixture
def make_carrying(make_config, long_folder):
    """A function that gives the options of a run that carries states, with changes."""

    def make(**changes):
        given = {
            "data": long_folder,
            "carry_state": True,
            "context": CONTEXT,
            "batch_size": LANES,
            "attention": "polysketch",
            "attention_options": {"window": 8, "sketch_size": 4, "far_bias": 0.0},
            "layers": 2,
        }
        return make_config(**given | changes)

    return make


def begun(config, double=True):
    """The first model of a run, what updates it, and its rows."""
    plan = make_plan(config)
    torch.manual_seed(0)
    model = build_model(plan)
    if double:
        model.double()
    return model, Updater(model, plan.config.step_options(), torch.float32), plan.goal.rows()


def metrics_of(config, kind="train"):
    lines = MetricsFile(RunFolder(config.out).metrics).read()
    return [line for line in lines if line["kind"] == kind]


@pytest.mark.full
def test_a_row_costs_what_its_tokens_cost_in_one_pass_over_the_document_so_far(make_carrying):
    """The weights stay: what is carried is then what the document so far gives. Two epochs."""
    model, updater, rows = begun(make_carrying())
    documents = [(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))] * LANES
    compared = 0
    for step in range(2 * rows.num_steps):
        batch = rows.batch(step, LANES)
        found = updater.compute_gradient(batch)
        total = 0.0
        for lane, part in enumerate(batch.split(1)):
            for start, stop in zip(part.cu_seqlens[:-1].tolist(), part.cu_seqlens[1:].tolist(), strict=True):
                piece = part.ids[0, start:stop], part.targets[0, start:stop]
                if start or not part.positions[0]:
                    documents[lane] = piece
                else:
                    documents[lane] = tuple(torch.cat(two) for two in zip(documents[lane], piece, strict=True))
                ids, targets = (each[None] for each in documents[lane])
                with torch.no_grad():
                    losses = model.token_losses(model.hidden_states(ids), targets)
                total += float(losses[0, -(stop - start) :].sum())
                compared = max(compared, ids.shape[1])
        assert found.loss == pytest.approx(total / batch.num_tokens, rel=1e-6)
        assert found.tokens == batch.num_tokens
    assert compared > 4 * CONTEXT


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.full), 3])  # 1: the same call twice
def test_parts_of_a_batch_carry_the_states_of_their_lanes(make_carrying, accumulation):
    def figures(parts):
        model, updater, rows = begun(make_carrying(accumulation=parts, clip=1e9))
        found = [updater.compute_gradient(rows.batch(step, LANES)) for step in range(min(4, rows.num_steps))]
        return found, [parameter.grad for parameter in model.parameters()]

    (whole, expected), (parts, found) = figures(1), figures(accumulation)
    for one, other in zip(parts, whole, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)


def test_the_first_step_of_an_epoch_has_no_state_and_the_last_one_leaves_none(make_carrying):
    _, updater, rows = begun(make_carrying(layers=1))
    for step in range(rows.num_steps):
        updater.compute_gradient(rows.batch(step, LANES))
        lanes = {int(name.split("/")[0]) for name in updater.carried.tensors()}
        assert lanes == {lane for lane, goes_on in enumerate(rows.batch(step, LANES).goes_on) if goes_on}
    assert not lanes


def test_a_state_has_the_same_size_at_every_place(make_carrying):
    _, updater, rows = begun(make_carrying(layers=1))
    sizes = set()
    for step in range(rows.num_steps):
        updater.compute_gradient(rows.batch(step, LANES))
        sizes |= {
            sum(tensor.nbytes for name, tensor in updater.carried.tensors().items() if name.startswith(f"{lane}/"))
            for lane in range(LANES)
        }
    assert len(sizes - {0}) == 1


@pytest.mark.parametrize(
    ("attention", "last"),
    [
        ("polysketch", 2),
        pytest.param("polysketch", 5, marks=pytest.mark.full),
        pytest.param("polysketch-paper", 2, marks=pytest.mark.full),
        pytest.param("polysketch-paper", 5, marks=pytest.mark.full),
    ],
)
def test_killed_and_resumed_it_ends_the_same(
    make_carrying, tmp_path, monkeypatch, assert_same_outcome, last, attention
):
    """The process dies in a step, after a checkpoint that holds the states of lanes."""
    given = {"attention": attention, "attention_options": {"sketch_size": 4}}
    config = make_carrying(steps=last + 2, save_every=1, eval_every=0, **given)
    expected = train(dataclasses.replace(config, out=tmp_path / "left-alone"), progress=False).folder
    compute_gradient, calls = Updater.compute_gradient, []

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
    saved = load_carried(find_checkpoint(RunFolder(config.out).checkpoints))
    assert {name.split("/")[0] for name in saved} == {
        str(lane) for lane, goes_on in enumerate(calls[last - 1].goes_on) if goes_on
    }
    assert saved
    train(dataclasses.replace(config, resume=True), progress=False)
    assert_same_outcome(config.out, expected)
    ended, wanted = (load_carried(find_checkpoint(folder / "checkpoints")) for folder in (config.out, expected))
    assert ended.keys() == wanted.keys()
    assert all(torch.equal(ended[name], wanted[name]) for name in wanted)


def test_a_resumed_run_without_its_states_is_refused(make_carrying, monkeypatch):
    config = make_carrying(steps=3, save_every=1, eval_every=0)
    train(config, progress=False)
    more = dataclasses.replace(config, resume=True, checkpoint="step-00000002")
    monkeypatch.setattr(CarriedStates, "load", lambda *given: None)
    with pytest.raises(
        ValueError, match=r"goes on with a document after \d+ tokens, expected the states there, got none"
    ):
        train(more, progress=False)


def test_an_altered_state_is_refused(make_carrying):
    config = make_carrying(steps=2, save_every=1, eval_every=0)
    train(config, progress=False)
    path = find_checkpoint(RunFolder(config.out).checkpoints) / CARRIED_FILE
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=f"{CARRIED_FILE}: expected sha256"):
        train(dataclasses.replace(config, resume=True, extend=True, steps=4), progress=False)


def test_only_a_run_that_carries_states_saves_them(make_carrying):
    config = make_carrying(carry_state=False, pack="documents", steps=2)
    train(config, progress=False)
    checkpoint = find_checkpoint(RunFolder(config.out).checkpoints)
    assert not (checkpoint / CARRIED_FILE).exists()
    assert load_checkpoint(checkpoint).carried is None


def test_a_run_says_what_it_does_and_learns(make_carrying, capsys):
    config = make_carrying(steps=24, log_every=1, learning_rate=1e-2, layers=1)
    train(config)
    rows = make_plan(config).goal.rows()
    told = (
        f"documents in 3 lanes of {rows.num_steps} rows an epoch, {rows.padding_share:.2%} padding; their states are "
    )
    assert told in capsys.readouterr().err
    lines = metrics_of(config)
    counts = [rows.batch(step, LANES).num_tokens for step in range(24)]
    assert [line["tokens"] for line in lines] == [sum(counts[: step + 1]) for step in range(24)]
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    saved = RunFolder(config.out).read_config()["training"]
    assert (saved["carry_state"], saved["pack"]) == (True, "documents")


def test_a_run_does_not_change_its_mind(make_carrying):
    config = make_carrying(steps=2)
    train(config, progress=False)
    with pytest.raises(ValueError, match="--carry-state was True and is now False"):
        train(dataclasses.replace(config, resume=True, carry_state=False), progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"attention": "softmax", "attention_options": {}},
            r"--carry-state: layer 0: SoftmaxAttention has no state of",
        ),
        (
            {"attention": "performer", "attention_options": {"redraw_interval": 10}},
            "--carry-state: expected features that stay, found redraw_interval=10",
        ),
        (
            {"attention": "polysketch-window", "attention_options": {"features": "random", "redraw_interval": 10}},
            "--carry-state: expected features that stay, found redraw_interval=10 of PolysketchWindowAttention",
        ),
    ],
)
def test_a_mechanism_that_cannot_go_on_is_refused_before_a_run_is_begun(make_carrying, changes, message):
    config = make_carrying(**changes)
    with pytest.raises(ValueError, match=message):
        train(config, progress=False)
    assert not RunFolder(config.out).has_run()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pack": "windows"}, "--carry-state: expected rows of documents, and no --pack windows"),
        ({"compile": True}, "--carry-state: expected rows of documents, and no --compile"),
    ],
)
def test_what_excludes_it_is_refused(make_carrying, changes, message):
    with pytest.raises(ValueError, match=message):
        make_carrying(**changes)


def test_processes_that_share_rows_are_refused(make_carrying):
    processes = SimpleNamespace(alone=False, mesh=Mesh(context=2), local_rank=0)
    with pytest.raises(
        ValueError, match="--carry-state: expected whole rows on every process, found context=2 in --mesh"
    ):
        make_plan(make_carrying(), processes)


def test_more_lanes_than_tokens_are_refused_before_a_run_is_begun(make_carrying):
    config = make_carrying(batch_size=10_000)
    with pytest.raises(ValueError, match="expected at least 10000 tokens that predict another one of their document"):
        train(config, progress=False)
    assert not RunFolder(config.out).has_run()


def test_the_data_of_these_tests_has_documents_of_many_rows(long_folder):
    tokens = PreparedData.open(long_folder).split("train").tokens
    ends = (tokens == 256).nonzero()[0]
    lengths = ends[1:] - ends[:-1]
    assert lengths.max() > 8 * CONTEXT
    assert lengths.min() < 3 * CONTEXT
