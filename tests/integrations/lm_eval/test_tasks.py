"""Tasks on local files ask what lm_eval's own tasks ask, in the same words, and no example tells the answer."""

import functools
import json
import re
from pathlib import Path

import datasets
import lm_eval.tasks
import pytest
from lm_eval.api.samplers import ContextSampler
from lm_eval.tasks import TaskManager
from lm_eval.tasks.hellaswag.utils import preprocess

from integrations.lm_eval.conftest import MAKERS, write_documents
from polysketch.integrations.lm_eval import LOCAL_TASKS, load_tasks
from polysketch.integrations.lm_eval.fewshot import QUESTION, OtherQuestions

SCORED, TRAIN = range(12), range(40, 52)


def as_query(document: dict, field: str, prompt: str) -> dict:
    """A question in the layout with the prompt's beginning in it."""
    gold = document["choices"]["label"].index(document["answerKey"])
    return {"query": prompt + document[field], "choices": document["choices"]["text"], "gold": gold}


def begun_hellaswag(document: dict) -> dict:
    """The context as lm_eval prepares it, but for the capital letter of what has been begun."""
    text = f"{document['activity_label']}: {document['ctx_a']} {document['ctx_b']}"
    endings = [preprocess(ending) for ending in document["endings"]]
    return {"ctx": preprocess(text), "endings": endings, "label": int(document["label"])}


def filled_winogrande(document: dict) -> dict:
    """The sentence up to and with each option, and what follows."""
    before, _, after = document["sentence"].partition("_")
    options = [before + document[option] for option in ("option1", "option2")]
    return {"context_options": options, "continuation": after.strip(), "gold": int(document["answer"]) - 1}


def stem_and_choices(document: dict) -> dict:
    """As the authors of ARC and OpenBookQA give a question."""
    stem = document.get("question") or document.get("question_stem")
    pairs = zip(document["choices"]["text"], document["choices"]["label"], strict=True)
    choices = [{"text": text, "label": label} for text, label in pairs]
    return {"id": "x", "question": {"stem": stem, "choices": choices}, "answerKey": document["answerKey"]}


def split_lambada(document: dict) -> dict:
    """The last word apart."""
    context, _, word = document["text"].rpartition(" ")
    return {"context": context, "continuation": word}


def asked_boolq(document: dict) -> dict:
    """The passage and the question in one, as in files in circulation."""
    query = f"Passage: {document['passage']}\nQuestion: {document['question']}?\n"
    return {"query": query, "choices": ["no", "yes"], "gold": document["label"]}


def authors_boolq(document: dict) -> dict:
    """With a title, and the answer as true or false."""
    fields = {name: document[name] for name in ("passage", "question")}
    return {**fields, "title": "x", "answer": bool(document["label"])}


def asked_copa(document: dict) -> dict:
    """The premise with its connector, as in files in circulation."""
    connector = {"cause": "because", "effect": "therefore"}[document["question"]]
    choices = [document[name][0].lower() + document[name][1:] for name in ("choice1", "choice2")]
    return {"query": f"{document['premise'][:-1]}, {connector}", "gold": document["label"], "choices": choices}


def unmended_wsc(document: dict) -> dict:
    """The spans apart, one of them not as it is in the text."""
    target = {name: document[name] for name in ("span1_index", "span1_text", "span2_index", "span2_text")}
    target |= {"span1_text": "mark.", "span2_text": "He"}
    return {"text": document["text"], "target": target, "label": bool(document["label"])}


OTHER_LAYOUTS = [
    ("boolq", asked_boolq),
    ("boolq", authors_boolq),
    ("copa", asked_copa),
    ("wsc", unmended_wsc),
    ("hellaswag", begun_hellaswag),
    ("winogrande", filled_winogrande),
    ("arc_easy", lambda document: as_query(document, "question", "Question: ")),
    ("arc_challenge", stem_and_choices),
    ("openbookqa", lambda document: as_query(document, "question_stem", "")),
    ("openbookqa", stem_and_choices),
    ("lambada_openai", split_lambada),
    *((name, dict) for name in MAKERS),
]


def requests(task, shots: int) -> list[tuple]:
    """What a task asks of a model."""
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(1234)
    task.build_all_requests()
    return [instance.args for instance in task.instances]


@functools.cache
def bundled(name: str):
    """lm_eval's own task, on documents in the Hub's layout, the training split of which has examples."""
    local = LOCAL_TASKS[name]
    splits = {
        split: datasets.Dataset.from_list([MAKERS[name](index) for index in indices])
        for split, indices in ((local.split, SCORED), ("train", TRAIN))
    }
    folder = Path(lm_eval.tasks.__file__).parent / local.folder
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    own = {"task": name, "custom_dataset": lambda **_: splits}
    return manager.load({"group": "own", "task": [own]})["tasks"][name]


@pytest.mark.parametrize(("name", "layout"), OTHER_LAYOUTS)
def test_every_layout_gives_the_requests_of_lm_eval(tmp_path, name, layout):
    """The very strings, without examples and with two from a file of training documents."""
    write_documents(tmp_path / f"{name}_{LOCAL_TASKS[name].split}.jsonl", [layout(MAKERS[name](i)) for i in SCORED])
    write_documents(tmp_path / f"{name}_train.jsonl", [layout(MAKERS[name](i)) for i in TRAIN])
    (found,) = load_tasks([name], [tmp_path])
    assert requests(found.task, 0) == requests(bundled(name), 0)
    if name != "lambada_openai":  # whose data set on the Hub has the scored split alone
        assert requests(found.task, 2) == requests(bundled(name), 2)
    assert len(requests(found.task, 0)) >= 12


@pytest.mark.parametrize("name", [*MAKERS, "physics"])
def test_no_example_is_the_question_or_its_twin(task_folder, name):
    """Where examples come from the scored file itself: of twelve documents, many draws hold the question."""
    (loaded,) = load_tasks([name], [task_folder])
    task = loaded.task
    assert "other questions" in loaded.examples_from
    for seed, document in enumerate([*task.eval_docs] * 4):
        task.set_fewshot_seed(seed)
        examples = task.sampler.sample(5, eval_doc=document)
        assert len(examples) == 5
        assert all(example[QUESTION] != document[QUESTION] for example in examples)


def test_where_no_question_occurs_twice_the_draws_are_those_of_lm_eval():
    """For the same seed, of the same documents, without the scored one."""
    documents = [{QUESTION: f"question {index}"} for index in range(12)]
    ours, theirs = OtherQuestions(documents, rnd=7), ContextSampler(documents, rnd=7)
    for scored in documents * 3:
        assert ours.sample(5, eval_doc=scored) == theirs.sample(5, eval_doc=scored)


def test_twins_are_seen_as_one_question(task_folder):
    """Two sentences with the same options and other right answers: WinoGrande is made of such pairs."""
    (loaded,) = load_tasks(["winogrande"], [task_folder])
    asked = [document[QUESTION] for document in loaded.task.eval_docs]
    assert asked[0::2] == asked[1::2]


def test_examples_are_the_same_every_time(task_folder):
    """And those of the first documents do not depend on how many are scored."""
    (first,), (second,) = load_tasks(["piqa"], [task_folder]), load_tasks(["piqa"], [task_folder])
    assert requests(first.task, 3) == requests(second.task, 3)
    second.task.set_fewshot_seed(1234)
    second.task.build_all_requests(limit=4)
    assert [each.args for each in second.task.instances] == requests(first.task, 3)[:8]


def test_too_many_examples_are_refused(task_folder):
    """Twelve documents hold eleven examples."""
    (loaded,) = load_tasks(["piqa"], [task_folder])
    with pytest.raises(ValueError, match="at least 12 other questions for examples, found 11"):
        requests(loaded.task, 12)


def test_short_names_stand_for_tasks(task_folder):
    """In the order of the names."""
    assert [each.name for each in load_tasks(["lambada", "arc"], [task_folder])] == [
        "lambada_openai",
        "arc_easy",
        "arc_challenge",
    ]


def test_a_task_is_loaded_once_and_two_of_one_name_are_refused(task_folder, tmp_path):
    """Named by itself and by a short name; and two files of equal names in other folders."""
    assert [each.name for each in load_tasks(["arc_easy", "arc"], [task_folder])] == ["arc_easy", "arc_challenge"]
    (tmp_path / "physics.json").write_text((task_folder / "physics.json").read_text())
    with pytest.raises(ValueError, match="found two physics"):
        load_tasks(["physics", str(tmp_path / "physics.json")], [task_folder])


def test_an_unknown_task_names_the_known_and_the_missing(tmp_path, task_folder):
    """What there is, what has no file, and how to have lm_eval fetch others."""
    write_documents(tmp_path / "piqa.jsonl", [MAKERS["piqa"](0)])
    with pytest.raises(ValueError, match=r"expected a task of hellaswag, .*found 'hellaswog'.*--download") as error:
        load_tasks(["hellaswog"], [tmp_path])
    assert "files are missing for hellaswag, lambada_openai" in str(error.value)
    assert "piqa" not in str(error.value).partition("files are missing for")[2]
    with pytest.raises(FileNotFoundError, match=r"hellaswag_val or hellaswag_validation or hellaswag .*--task-data"):
        load_tasks(["hellaswag"], [tmp_path])


@pytest.mark.parametrize(("name", "file"), [("piqa", "piqa_valid.jsonl"), ("cola", "a BIG-bench file cola.json")])
def test_a_download_without_a_network_says_so_and_what_else_to_do(tmp_path, monkeypatch, name, file):
    """In one line; a missing network is no mistake of the task's name."""

    def unreachable(self, wanted):
        raise ConnectionError(f"Couldn't reach '{wanted[0]}' on the Hub")

    monkeypatch.setattr(TaskManager, "__init__", lambda self: None)
    monkeypatch.setattr(TaskManager, "all_tasks", [name])
    monkeypatch.setattr(TaskManager, "load", unreachable)
    with pytest.raises(
        ConnectionError, match=f"task {name} from the Hub.*check the network, or put {file} into"
    ) as error:
        load_tasks([name], [tmp_path], download=True)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ('{"goal": "x"}\n', "line 1 of .*piqa.jsonl is not one of piqa: expected the fields goal, sol1"),
        ('{"goal"\n', "expected JSON in .*piqa.jsonl, line 1"),
        ("", "expected a list of objects in .*piqa.jsonl, found nothing"),
        ("3\n", "expected an object in line 1 of .*piqa.jsonl, found int"),
    ],
)
def test_a_file_that_is_not_the_tasks_is_refused(tmp_path, contents, message):
    """With its name, and where in it."""
    (tmp_path / "piqa.jsonl").write_text(contents)
    with pytest.raises(ValueError, match=message):
        load_tasks(["piqa"], [tmp_path])


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("hellaswag", {"label": "4"}, "a number from 0 to 3 as `label`, the place of a choice, found 4"),
        ("hellaswag", {"endings": []}, "found"),
        ("piqa", {"label": 2}, "from 0 to 1 as `label`.*found 2"),
        ("piqa", {"label": "first"}, "from 0 to 1 as `label`.*found 'first'"),
        ("arc_easy", {"answerKey": "E"}, "expected one of .*as `answerKey`, found 'E'"),
        ("openbookqa", {"choices": {"text": [], "label": []}}, "expected one of \\[\\] as `answerKey`"),
        ("winogrande", {"answer": "3"}, "expected '1' or '2' as `answer`, found '3'"),
        ("boolq", {"label": -1}, "from 0 to 1 as `label`.*found -1"),
        ("copa", {"question": "why"}, "expected cause or effect as `question`, found 'why'"),
        ("copa", {"label": 2}, "from 0 to 1 as `label`.*found 2"),
        ("wsc", {"span2_text": None}, "line 3"),
    ],
)
def test_a_label_that_is_none_is_refused_with_its_line(tmp_path, name, changed, message):
    """Before anything is scored; empty lines count."""
    good, bad = MAKERS[name](0), MAKERS[name](1) | changed
    (tmp_path / f"{name}.jsonl").write_text(json.dumps(good) + "\n\n" + json.dumps(bad) + "\n")
    with pytest.raises(ValueError, match=f"^line 3 of .*{name}.jsonl is not one of {name}: .*") as error:
        load_tasks([name], [tmp_path])
    assert re.search(message, str(error.value))


def test_a_file_that_is_not_gzip_is_refused(tmp_path):
    """Although its name says so."""
    (tmp_path / "piqa.jsonl.gz").write_text("{}")
    with pytest.raises(ValueError, match=r"expected a whole gzip file.*piqa.jsonl.gz"):
        load_tasks(["piqa"], [tmp_path])


def test_a_byte_order_mark_before_the_first_line_is_left_out(tmp_path):
    (tmp_path / "piqa.jsonl").write_text("\ufeff" + json.dumps(MAKERS["piqa"](0)), encoding="utf-8")
    (loaded,) = load_tasks(["piqa"], [tmp_path])
    assert len(loaded.task.eval_docs) == 1


def test_documents_may_be_one_json_list(tmp_path):
    """As well as one a line."""
    (tmp_path / "piqa.json").write_text(json.dumps([MAKERS["piqa"](index) for index in range(3)]))
    (loaded,) = load_tasks(["piqa"], [tmp_path])
    assert len(loaded.task.eval_docs) == 3


@pytest.mark.full
@pytest.mark.data
def test_the_files_in_circulation_are_read_whole(outside_data):
    """Every document of seven tasks; a sentence of HellaSwag that was begun has its capital letter, as in lm_eval."""
    names = [name for name in LOCAL_TASKS if name not in ("boolq", "copa", "wsc")]
    loaded = {each.name: each.task for each in load_tasks(names, [outside_data / "eval"])}
    counts = {name: len(task.eval_docs) for name, task in loaded.items()}
    assert counts == {
        "hellaswag": 10042,
        "piqa": 1838,
        "lambada_openai": 5153,
        "arc_easy": 2376,
        "arc_challenge": 1172,
        "winogrande": 1267,
        "openbookqa": 500,
    }
    first = loaded["hellaswag"].eval_docs[0]
    assert first["query"] == "Roof shingle removal: A man is sitting on a roof. He"
    assert sum(document["ctx_b"] != "" for document in loaded["hellaswag"].eval_docs) >= 3242
