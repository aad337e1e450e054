"""BIG-bench's json: prompts by its rules, choices by their scores, generated answers by their targets."""

import json

import pytest

from integrations.lm_eval.conftest import PHYSICS
from polysketch.integrations.lm_eval import load_tasks


def task_of(folder, contents: dict, name: str = "sums"):
    """The task of a file."""
    (folder / f"{name}.json").write_text(json.dumps(contents))
    (loaded,) = load_tasks([str(folder / f"{name}.json")], [])
    return loaded.task


def contexts(task, shots: int = 0) -> list[str]:
    """The prompt of every document, once."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(0)
    task.build_all_requests()
    return list(dict.fromkeys(instance.args[0] for instance in task.instances))


def test_choices_are_shown_with_the_question_and_scored(tmp_path):
    """In an order of its own, every one a continuation of the same prompt."""
    task = task_of(tmp_path, PHYSICS)
    (first, *_) = contexts(task)
    assert first.startswith("\nQ: A ball no. 0 falls for 2 s. Which formula gives its speed?\n  choice: ")
    assert first.endswith("\nA: ")
    asked = [instance.args for instance in task.instances[:4]]
    assert [choice for _, choice in asked] == list(PHYSICS["examples"][0]["target_scores"])
    assert all(f"\n  choice: {choice}" in context for context, choice in asked)
    places = {context[: -len("\nA: ")].split("\n  choice: ").index("v = a t") for context in contexts(task)}
    assert len(places) > 1  # the right one is not always at the same place


def test_the_fields_of_a_file_change_its_prompts(tmp_path):
    """Prefix of the task, of inputs and outputs, separator of examples, and choices that are not shown."""
    task = task_of(
        tmp_path,
        {
            **PHYSICS,
            "task_prefix": "Formulas {{1}}.",
            "example_input_prefix": "\nProblem: ",
            "example_output_prefix": "\nFormula:",
            "few_shot_example_separator": "\n--",
            "append_choices_to_input": False,
        },
    )
    (first, *_) = contexts(task, shots=1)
    example, question = first.removeprefix("Formulas {{1}}.").split("\n--")
    assert example.startswith("\nProblem: A ball no.")
    assert example.endswith("\nFormula:v = a t")
    assert question == "\nProblem: A ball no. 0 falls for 2 s. Which formula gives its speed?\nFormula:"


def test_the_grade_is_the_score_of_the_most_probable_choice(tmp_path):
    """Which need not be 0 or 1; acc_norm takes the most probable per character."""
    scores = {"long wrong answer": 0.25, "yes": 1}
    task = task_of(tmp_path, {"examples": [{"input": "?", "target_scores": scores}] * 2})
    document = task.eval_docs[0]
    assert task.process_results(document, [(-3.0, False), (-2.0, False)]) == {"acc": 1.0, "acc_norm": 0.25}
    assert task.process_results(document, [(-1.0, False), (-2.0, False)]) == {"acc": 0.25, "acc_norm": 0.25}


def test_answers_without_choices_are_generated_and_compared(tmp_path):
    """With any of several targets, up to the stop string, by a pattern where there is one."""
    examples = [{"input": "1 + 1", "target": ["2", "two"]}, {"input": "2 + 2", "target": "4"}]
    task = task_of(tmp_path, {"examples": examples, "stop_string": "."})
    assert contexts(task, shots=1)[0] == "\nQ: 2 + 2\nA: 4\n\nQ: 1 + 1\nA: "
    assert task.instances[0].args[1]["until"] == ["."]
    grade = {answer: task.process_results(task.eval_docs[0], [answer])["exact_match"] for answer in (" two", "2", "4")}
    assert grade == {" two": 1.0, "2": 1.0, "4": 0.0}
    patterned = task_of(tmp_path, {"examples": examples, "output_regex": r"\d+"}, name="patterned")
    assert patterned.process_results(patterned.eval_docs[1], ["it is 4, I think"])["exact_match"] == 1.0


def test_a_task_is_found_by_name_in_a_folder(tmp_path):
    """As NAME.json, or as BIG-bench has it, NAME/task.json."""
    (tmp_path / "physics").mkdir()
    (tmp_path / "physics" / "task.json").write_text(json.dumps(PHYSICS))
    (loaded,) = load_tasks(["physics"], [tmp_path])
    assert (loaded.name, len(loaded.task.eval_docs)) == ("physics", 8)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"examples": [{"input": "?"}]}, "expected target_scores or target in example 0"),
        ({"examples": [{"input": "?", "target_scores": {}}]}, "expected target_scores or target in example 0"),
        ({"examples": []}, "expected questions in `examples` of .*sums.json, found an empty list: nothing can be"),
        ({"examples": ["?"]}, "expected a field `input` in example 0 of .*sums.json, found '\\?'"),
        ({"examples": [{"input": "?", "target": "!"}, {"target": "!"}]}, "`input` in example 1 of .*, found target"),
        ({"questions": [], "name": "x"}, "an object with a list `examples`.* found one with questions, name"),
        ({}, "found one with nothing in it"),
        ([1, 2], "expected a task of BIG-bench .*sums.json, found list"),
    ],
)
def test_other_json_is_refused(tmp_path, contents, message):
    """With what was expected."""
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path, contents)
