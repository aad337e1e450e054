"""Questions in a file of one's own: what a model is asked, and what no file may hold."""

import gzip
import json

import pytest

from polysketch.integrations.lm_eval import PolysketchLM, evaluate_tasks, load_tasks
from polysketch.models import ModelConfig, TransformerLM

LINES = [
    {"question": "What is {{2 + 2}}?", "choices": ["three", "four"], "answer": 1, "id": "a"},
    {"question": "Which of them sails?", "choices": ["a ship", "a drum", "a hat"], "answer": 0},
    {"question": "Where do fish live?", "choices": ["in air", "in water"], "answer": 1, "source": ["a", "b"]},
]


def write(file, lines):
    """One object a line."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def requests(task, shots: int) -> list[tuple]:
    """What a task asks of a model."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(0)
    task.build_all_requests()
    return [instance.args for instance in task.instances]


def test_every_choice_is_asked_for_after_the_question(tmp_path):
    """As ARC is; braces are no template, and other fields are left alone."""
    (loaded,) = load_tasks([str(write(tmp_path / "facts.jsonl", LINES))], [])
    assert loaded.name == "facts"
    asked = requests(loaded.task, 0)
    assert asked[:2] == [
        ("Question: What is {{2 + 2}}?\nAnswer:", " three"),
        ("Question: What is {{2 + 2}}?\nAnswer:", " four"),
    ]
    assert len(asked) == 7


def test_examples_are_other_questions_or_those_of_a_file_beside(tmp_path):
    """With the right answer behind each."""
    file = write(tmp_path / "facts.jsonl", LINES)
    (loaded,) = load_tasks(["facts"], [tmp_path])
    assert "other questions" in loaded.examples_from
    first = requests(loaded.task, 2)[0][0]
    assert "Question: Which of them sails?\nAnswer: a ship\n\n" in first
    assert "Question: Where do fish live?\nAnswer: in water\n\n" in first
    assert first.endswith("Question: What is {{2 + 2}}?\nAnswer:")
    write(tmp_path / "facts_train.jsonl", [{"question": "Who barks?", "choices": ["a dog", "a tree"], "answer": 0}])
    (loaded,) = load_tasks([str(file)], [])
    assert loaded.examples_from == str(tmp_path / "facts_train.jsonl")
    assert requests(loaded.task, 1)[0][0].startswith("Question: Who barks?\nAnswer: a dog\n\nQuestion: What")


def test_a_model_is_scored_by_the_most_probable_choice(tmp_path, tokenizer):
    """Against the log-likelihoods themselves; guessing is right as often as there are choices."""
    import torch

    torch.manual_seed(0)
    transformer = TransformerLM(ModelConfig(tokenizer.vocab_size, 1, 32, num_heads=2)).eval()
    torch.nn.init.normal_(transformer.embedding.weight, std=0.5)
    file = tmp_path / "facts.jsonl.gz"
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, LINES)).encode()))
    tasks = load_tasks([str(file)], [])
    found = {
        figure.metric: figure
        for figure in evaluate_tasks(PolysketchLM(transformer, tokenizer=tokenizer, max_length=64), tasks)
    }
    values = iter(instance.resps[0][0] for instance in tasks[0].task.instances)
    right = 0
    for line in LINES:
        likely = [next(values) for _ in line["choices"]]
        right += likely.index(max(likely)) == line["answer"]
    assert found["acc"].value == pytest.approx(right / 3)
    assert found["acc"].chance == pytest.approx((1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert found["acc_norm"].num_documents == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "Who?", "choices": ["a", "b"]}, "expected the fields question, choices, answer, found question,"),
        ({"query": "Who?", "choices": ["a", "b"], "gold": 0}, "expected the fields question.*found query, choices"),
        ({"question": "Who?", "choices": ["a", "b"], "answer": 2}, "a number from 0 to 1 as `answer`.* found 2"),
        ({"question": "Who?", "choices": ["a", "b"], "answer": -1}, "from 0 to 1 as `answer`.* found -1"),
        ({"question": "Who?", "choices": ["a", "b"], "answer": "a"}, "from 0 to 1 as `answer`.* found 'a'"),
        ({"question": "Who?", "choices": ["a", "b"], "answer": True}, "from 0 to 1 as `answer`.* found True"),
        ({"question": "Who?", "choices": [], "answer": 0}, "at least two choices, each another, found \\[\\]"),
        ({"question": "Who?", "choices": ["a"], "answer": 0}, "at least two choices, each another"),
        ({"question": "Who?", "choices": ["a", "a"], "answer": 0}, "at least two choices, each another"),
        ({"question": "Who?", "choices": ["a", " "], "answer": 0}, "expected texts, none of them empty, as `choices`"),
        ({"question": "Who?", "choices": "ab", "answer": 0}, "expected texts, none of them empty, as `choices`"),
        ({"question": "Who?", "choices": {"a": 1}, "answer": 0}, "expected texts, none of them empty, as `choices`"),
        ({"question": "", "choices": ["a", "b"], "answer": 0}, "expected text as `question`, found ''"),
        ({"question": 3, "choices": ["a", "b"], "answer": 0}, "expected text as `question`, found 3"),
    ],
)
def test_a_line_that_is_no_question_is_refused_with_its_number(tmp_path, line, message):
    """In one line, with the file; empty lines count."""
    file = tmp_path / "facts.jsonl"
    file.write_text(json.dumps(LINES[0]) + "\n\n" + json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"^line 3 of .*facts.jsonl: .*{message}") as error:
        load_tasks([str(file)], [])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ("", "expected a list of objects in .*facts.jsonl, found nothing"),
        ('["a", "b"]\n', "expected an object in line 1 of .*facts.jsonl, found list"),
        ("question,answer\n", "expected JSON in .*facts.jsonl, line 1"),
    ],
)
def test_another_format_is_refused(tmp_path, contents, message):
    """With what was expected."""
    (tmp_path / "facts.jsonl").write_text(contents)
    with pytest.raises(ValueError, match=message):
        load_tasks(["facts"], [tmp_path])
