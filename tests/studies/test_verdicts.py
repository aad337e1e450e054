"""What figures say of a claim: never more than the rows that were made can show."""

from statistics import mean

import pytest

from polysketch.attention import MECHANISMS
from polysketch.studies import verdicts
from polysketch.studies.catalogue import STUDIES, study_called
from polysketch.studies.study import Verdict
from polysketch.studies.task_study import TaskSettings, TaskStudy
from polysketch.studies.two_runs import LISTOPS_PRETRAINED
from polysketch.tasks.listops import SYMBOLS

ALL = {name: study_called(name) for name in STUDIES}
COMPARED = [name for name, study in ALL.items() if getattr(study, "behind_softmax", None) is not None]


def record(row: str, accuracy: float, loss: float = 1.0, whole: float = 0.0) -> dict:
    return {"row": row, "test": {"accuracy": accuracy, "loss": loss, "whole_rows": whole}}


def verdict_of(records: list[dict], **options) -> Verdict:
    """Of a study whose rows are softmax, polynomial, linear and hyper."""
    rows = ("softmax", "polynomial", "linear", "hyper")
    study = TaskStudy("reversal", claim="", paper="", sizes={"smoke": TaskSettings()}, mechanisms=rows, **options)
    return study.verdict(records)


@pytest.mark.parametrize(
    ("options", "records", "verdict"),
    [
        ({"judged": "b"}, [record("a", 1.0), record("b", 0.9), record("b", 1.0)], Verdict("b 95.0 %", True)),
        ({"judged": "b"}, [record("b", 0.8), record("b", 0.9)], Verdict("b 85.0 %", False)),
        ({"judged": "b"}, [record("a", 1.0)], Verdict("a 100.0 %", None, "b not measured")),
        (
            {"judged": "b", "by": "whole_rows"},
            [record("b", 0.99, whole=0.8)],
            Verdict("b 80.0 % of rows without a mistake", False),
        ),
    ],
)
def test_one_row_is_judged_by_the_mean_over_its_seeds(options, records, verdict: Verdict):
    assert verdict_of(records, wanted=0.9, **options) == verdict


def test_the_form_of_the_presets_is_judged_where_a_mechanism_in_every_layer_was_not_made():
    softmax, whole, among = record("softmax", 1.0), record("linear", 0.5), record("linear+attention_every=2", 1.0)
    options = {"judged": "linear", "wanted": 0.9, "as_softmax": True}
    both = Verdict("softmax 100.0 %, linear+attention_every=2 100.0 %", True)
    assert verdict_of([softmax, among], **options) == both
    assert verdict_of([softmax, among, whole], **options).holds is False
    assert verdict_of([softmax, record("linear+rotary=False", 1.0)], **options).why_open == "linear not measured"


def test_one_row_shows_that_some_row_can_and_only_all_rows_show_that_none_can():
    losses = {"softmax": 1.0, "polynomial": 0.5, "linear": 2.0, "hyper": 3.0}
    records = [record(row, 1.0, loss) for row, loss in losses.items()]
    assert verdict_of(records[:2], wanted=0.6, by="loss") == Verdict("polynomial 0.5 nats", True)
    some = verdict_of(records[:2], wanted=0.1, by="loss")
    assert some == Verdict("polynomial 0.5 nats", None, "2 of 4 rows not measured")
    assert verdict_of(records, wanted=0.1, by="loss") == Verdict("polynomial 0.5 nats", False)


@pytest.mark.parametrize(
    ("softmax", "linear", "holds", "why"),
    [
        (None, 1.0, None, "softmax not measured"),
        (None, 0.1, None, "softmax not measured"),
        (1.0, None, None, "linear not measured"),
        (0.5, 1.0, None, "softmax has not learned it, 90 % wanted"),
        (0.5, 0.5, None, "softmax has not learned it, 90 % wanted"),
        (0.9, 0.9, True, ""),
        (1.0, 0.8, False, ""),
    ],
)
def test_as_softmax_needs_softmax_and_that_it_has_learned_the_task(softmax, linear, holds, why):
    figures = {"softmax": softmax, "linear": linear}
    records = [record(row, figure) for row, figure in figures.items() if figure is not None]
    found = verdict_of(records, judged="linear", wanted=0.9, as_softmax=True)
    assert (found.holds, found.why_open) == (holds, why)
    assert found.ours == ", ".join(f"{row} {100 * figure:.1f} %" for row, figure in figures.items() if figure)


@pytest.mark.parametrize(
    ("figures", "holds", "why"),
    [
        ({"softmax": 0.60, "linear": 0.59}, True, ""),
        ({"softmax": 0.50, "linear": 0.70}, None, "softmax has not learned it, 55 % wanted"),
        ({"softmax": 0.60, "linear": 0.50}, None, "1 of 2 rows not measured"),
        ({"softmax": 0.60, "linear": 0.50, "hyper": 0.59}, True, ""),
        ({"softmax": 0.60, "linear": 0.50, "hyper": 0.50}, False, ""),
        ({"softmax": 0.60, "polynomial": 0.60}, None, "nothing to compare with softmax"),  # its time is quadratic
        ({"softmax": 0.60, "polynomial": 0.60, "linear": 0.5, "hyper": 0.5}, False, ""),
        ({"linear": 0.59}, None, "softmax not measured"),
    ],
)
def test_near_softmax_is_said_of_rows_in_linear_time_beside_a_softmax_that_has_learned(figures, holds, why):
    records = [record(row, figure) for row, figure in figures.items()]
    found = verdict_of(records, behind_softmax=0.02, learned=0.55)
    assert (found.holds, found.why_open) == (holds, why)


def test_where_a_row_is_named_no_other_is_near_in_its_place():
    options = {"behind_softmax": 0.02, "learned": 0.55, "judged": "hyper"}
    records = [record("softmax", 0.6), record("linear", 0.6)]
    assert verdict_of(records, **options) == Verdict("softmax 60.0 %, linear 60.0 %", None, "hyper not measured")
    assert verdict_of([*records, record("hyper", 0.5)], **options) == Verdict("softmax 60.0 %, hyper 50.0 %", False)
    assert verdict_of([*records, record("hyper", 0.59)], **options).holds is True


def test_rows_of_quadratic_time_are_known():
    quadratic = {name for name in MECHANISMS if not verdicts.in_linear_time(name)}
    assert quadratic == {"softmax", "polynomial", "squared-polynomial"}
    assert not verdicts.in_linear_time("squared-polynomial+coefficients=3")
    assert verdicts.in_linear_time("squared-polynomial+coefficients=3+linear=True")


def test_pretraining_adds_to_every_row_or_the_claim_does_not_hold():
    names = [row for row in LISTOPS_PRETRAINED.rows if "+" not in row]
    both = [record(f"{name}{way}", 0.45 + 0.05 * bool(way)) for name in names for way in ("", "+pretrained=true")]
    judge = LISTOPS_PRETRAINED.verdict
    assert judge(both).holds is True
    assert judge(both[:2]) == Verdict("softmax +5.0 %", None, "8 of 10 rows not measured")
    assert judge([*both[1:], record("softmax", 0.6)]).holds is False
    nothing = [record("softmax", 0.1), record("softmax+pretrained=true", 0.2), *both[2:]]
    assert judge(nothing).why_open == "softmax not learned"
    assert judge(both[:1]) == Verdict("softmax 45.0 %", None)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_needs_rows_of_its_own_unless_any_row_will_do(name: str):
    study = ALL[name]
    assert set(study.needs) <= set(study.rows)
    assert study.needs or name in ("reversal", "listops-pretrained")


GUESSED = {"listops": 0.16, "image": 0.1, "image-classification": 0.1, "compression": 1 / 15}
GUESSED |= dict.fromkeys(("reviews", "retrieval", "pathfinder"), 0.5)


@pytest.mark.parametrize("name", COMPARED)
def test_two_models_that_guess_are_not_compared(name: str):
    study = ALL[name]
    rows = ("softmax", study.judged or "linear")
    for accuracy, holds in ((GUESSED.get(name, 1 / 8) + 0.05, None), (study.learned, True)):
        assert study.verdict([record(row, accuracy) for row in rows]).holds is holds


def test_who_knows_the_first_operator_of_listops_alone_has_not_learned_it():
    """The smallest of many digits is mostly 0, the largest mostly 9."""
    study = ALL["listops"]
    task = study.task_of(study.sizes["cpu"], 0)
    guess = {SYMBOLS.index(operator): digit for operator, digit in {"[MIN": 0, "[MAX": 9, "[MED": 4, "[SM": 0}.items()}
    rows = [task.row("train", index) for index in range(60)]
    guessed = mean(guess[int(row.ids[0])] == row.answer for row in rows)
    assert 0.25 < guessed < study.learned
