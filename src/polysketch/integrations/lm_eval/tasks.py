"""The evaluation tasks by name, on local files: lm_eval's own prompts and metrics, nothing downloaded."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager

from polysketch.integrations.lm_eval import layouts
from polysketch.integrations.lm_eval.bigbench import bigbench_config, require_bigbench
from polysketch.integrations.lm_eval.choices import choices_config, read_questions
from polysketch.integrations.lm_eval.fewshot import QUESTION, OtherQuestions
from polysketch.integrations.lm_eval.files import SUFFIXES, find_file, read_documents
from polysketch.integrations.lm_eval.layouts import Document, Layout
from polysketch.integrations.lm_eval.ruler import RULER_TASKS, RulerTexts, is_of_ruler, make_ruler_tasks

__all__ = ["ALIASES", "LOCAL_TASKS", "LoadedTask", "LocalTask", "load_tasks", "quiet"]


@dataclass(frozen=True)
class LocalTask:
    """How a task of lm_eval is had from a local file.

    Attributes:
        bundled: name of the task in lm_eval, whose prompts and metrics it has; its files begin with it.
        folder: where lm_eval keeps it.
        split: the data set's split that it scores; a file of it is NAME_SPLIT or NAME.
        endings: what else may follow the name of a file of that split.
        layout: turns a document of any known layout into one of the data set.
        question: fields that say what a document asks; the same question is no example for itself.
    """

    bundled: str
    folder: str
    split: str
    endings: tuple[str, ...]
    layout: Layout
    question: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Names, without suffix, of files with the scored split."""
        return tuple(self.bundled + ending for ending in (*self.endings, f"_{self.split}", ""))

    @property
    def train(self) -> tuple[str, ...]:
        """Names of files to draw examples from; without one they are drawn from the scored file."""
        return (f"{self.bundled}_train",)


LOCAL_TASKS = {
    task.bundled: task
    for task in (
        LocalTask("hellaswag", "hellaswag", "validation", ("_val",), layouts.hellaswag, ("ctx_a", "ctx_b")),
        LocalTask("piqa", "piqa", "validation", ("_valid",), layouts.piqa, ("goal",)),
        LocalTask("lambada_openai", "lambada", "test", (), layouts.lambada, ("text",)),
        LocalTask("arc_easy", "arc", "test", (), layouts.arc, ("question",)),
        LocalTask("arc_challenge", "arc", "test", (), layouts.arc, ("question",)),
        LocalTask("winogrande", "winogrande", "validation", ("_dev",), layouts.winogrande, ("option1", "option2")),
        LocalTask("openbookqa", "openbookqa", "test", (), layouts.openbookqa, ("question_stem",)),
        LocalTask("boolq", "super_glue/boolq", "validation", ("_val",), layouts.boolq, ("passage", "question")),
        LocalTask("copa", "super_glue/copa", "validation", ("_val",), layouts.copa, ("premise", "question")),
        LocalTask("wsc", "super_glue/wsc", "validation", ("_val",), layouts.wsc, ("text", "span2_index")),
    )
}
"""Tasks that are made from local files; files of one's own and of BIG-bench are tasks besides, by name or path."""

ALIASES = {"arc": ("arc_easy", "arc_challenge"), "lambada": ("lambada_openai",)}
"""Short names."""


@dataclass(frozen=True)
class LoadedTask:
    """A task that is ready to be run.

    Attributes:
        name: what it was asked for by.
        task: of lm_eval.
        source: the file its documents are from, "downloaded", or "made up".
        examples_from: where examples are drawn from, in words; empty for a task that takes none.
        room: tokens that its longest question takes, with the answer; 0 where it is not known.
    """

    name: str
    task: ConfigurableTask
    source: str
    examples_from: str
    room: int = 0


def load_tasks(
    names: Sequence[str],
    folders: Sequence[str | Path],
    *,
    download: bool = False,
    ruler: RulerTexts | None = None,
) -> list[LoadedTask]:
    """Make tasks from local files, and those of RULER that need none.

    Args:
        names: of `LOCAL_TASKS`, `ALIASES` or `RULER_TASKS`; the path of a .jsonl file of questions with choices, or of
            a BIG-bench json file; or NAME, for NAME.jsonl, NAME.json or NAME/task.json of these kinds in one of the
            folders.
        folders: where the files are, the first that has one counting.
        download: let lm_eval fetch the data set of a task that it knows and for which there is no file here.
        ruler: which texts `RULER_TASKS` are to have; a task for each length.

    Raises:
        ValueError: a name that is not known, with those that are, a file that is not what its task needs, two tasks of
            one name, another task of RULER, one without `ruler`, or a length that is too short for it.
        FileNotFoundError: a task whose file is missing, with the names it may have.
        ConnectionError: `download` without a network.
    """
    wanted = dict.fromkeys(each for name in names for each in ALIASES.get(name, (name,)))
    places = [Path(folder) for folder in folders]
    with quiet():
        loaded = [task for name in wanted for task in _load(name, places, download, ruler)]
    sources: dict[str, str] = {}
    for each in loaded:
        if sources.setdefault(each.name, each.source) != each.source:
            raise ValueError(
                f"expected tasks of different names, found two {each.name}: {sources[each.name]}, {each.source}"
            )
    return loaded


def _load(name: str, folders: list[Path], download: bool, ruler: RulerTexts | None) -> list[LoadedTask]:
    """The task or, of a downloaded group or of several lengths, tasks of a name."""
    if name in RULER_TASKS:
        return _made_up(name, ruler)
    if name in LOCAL_TASKS and (file := find_file(folders, LOCAL_TASKS[name].files)) is not None:
        return [_local(name, LOCAL_TASKS[name], file, find_file(folders, LOCAL_TASKS[name].train))]
    if (file := _own_file(name, folders)) is not None:
        return [_choices(file) if _is_jsonl(file) else _bigbench(file)]
    if is_of_ruler(name):
        raise ValueError(
            f"expected {' or '.join(RULER_TASKS)} of RULER's tasks, found {name!r}: the others need packages and texts "
            "that are downloaded, and are not there"
        )
    if download:
        return _downloaded(name)
    if name in LOCAL_TASKS:
        raise FileNotFoundError(
            f"expected a file {' or '.join(LOCAL_TASKS[name].files)} ({', '.join(SUFFIXES)}) for the task {name} in "
            f"{_in_words(folders)}, found none: say where it is with --task-data, or have it fetched with --download"
        )
    if name.endswith(SUFFIXES):
        raise FileNotFoundError(f"expected the file of a task, found none called {name}, nor in {_in_words(folders)}")
    missing = [task for task, local in LOCAL_TASKS.items() if find_file(folders, local.files) is None]
    raise ValueError(
        f"expected a task of {', '.join([*LOCAL_TASKS, *ALIASES, *RULER_TASKS])}, a .jsonl file of questions or a "
        f".json file of BIG-bench, found {name!r}, and no file of that name in {_in_words(folders)}"
        + (f" (where files are missing for {', '.join(missing)})" if missing else "")
        + "; a task that lm_eval knows can be fetched with --download"
    )


def _local(name: str, local: LocalTask, file: Path, train: Path | None) -> LoadedTask:
    """A task with lm_eval's own configuration, on the documents of local files."""
    splits = {local.split: documents_of(file, local)}
    if train is not None:
        splits["train"] = documents_of(train, local)
    task = _bundled(local, splits, own_examples=train is None)
    return LoadedTask(name, task, str(file), str(train) if train else f"{file}, other questions")


def _bundled(local: LocalTask, splits: dict[str, list[Document]], *, own_examples: bool) -> ConfigurableTask:
    """lm_eval's task of that name with these documents.

    A group with one member is lm_eval's way to change a task that it has.
    """
    changes: dict[str, Any] = {"task": local.bundled, "custom_dataset": _dataset(splits)}
    if own_examples:
        changes |= {"training_split": None, "validation_split": None, "test_split": local.split}
        changes["fewshot_config"] = {"sampler": OtherQuestions, "split": local.split}
    folder = Path(lm_eval.tasks.__file__).parent / local.folder
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return manager.load({"group": "local", "task": [changes]})["tasks"][local.bundled]


def _choices(file: Path) -> LoadedTask:
    """A task of questions with choices, in a file of one's own."""
    name = file.name.removesuffix(".gz").removesuffix(".jsonl")
    train = find_file([file.parent], [f"{name}_train"])
    splits = {"test": read_questions(file)} | ({} if train is None else {"train": read_questions(train)})
    task = ConfigurableTask(
        config={**choices_config(name, train=train is not None), "custom_dataset": _dataset(splits)}
    )
    return LoadedTask(name, task, str(file), str(train) if train else f"{file}, other questions")


def _bigbench(file: Path) -> LoadedTask:
    """A task of BIG-bench."""
    name = file.parent.name if file.name.startswith("task.json") else file.name.partition(".")[0]
    config, documents = bigbench_config(file, name)
    task = ConfigurableTask(config={**config, "custom_dataset": _dataset({"test": documents})})
    return LoadedTask(name, task, str(file), f"{file}, other questions")


def _made_up(name: str, ruler: RulerTexts | None) -> list[LoadedTask]:
    """A task of RULER, at each length."""
    if ruler is None:
        raise ValueError(f"{name}: expected RulerTexts with the model's tokenizer, by which its texts have a length")
    return [LoadedTask(name, made.task, "made up", "", made.room) for made in make_ruler_tasks(name, ruler)]


def _downloaded(name: str) -> list[LoadedTask]:
    """Tasks of lm_eval on the data sets that it fetches."""
    manager = TaskManager()
    if name not in manager.all_tasks:
        raise ValueError(f"expected the name of a task of lm_eval, found {name!r}: `lm_eval ls tasks` lists them")
    try:
        loaded = manager.load([name])["tasks"]
    except ConnectionError as error:
        raise ConnectionError(
            f"expected the data set of the task {name} from the Hub for --download, found no way there ({error}): "
            f"check the network, or put {_file_instead(name)} into the folder of --task-data and leave --download out"
        ) from error
    return [LoadedTask(each, task, "downloaded", "lm_eval's choice") for each, task in loaded.items()]


def _file_instead(name: str) -> str:
    """The file that makes a download needless, for a message."""
    return f"{LOCAL_TASKS[name].files[0]}.jsonl" if name in LOCAL_TASKS else f"a BIG-bench file {name}.json"


def documents_of(file: Path, local: LocalTask) -> list[Document]:
    """The documents of a file in the data set's layout, each with what it asks.

    Raises:
        ValueError: the file is damaged, or a document is of no known layout.
    """
    documents = []
    for place, document in read_documents(file):
        try:
            known = local.layout(document)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            said = error if isinstance(error, ValueError) else f"expected fields of other types ({error})"
            raise ValueError(f"{place} of {file} is not one of {local.bundled}: {said}") from error
        documents.append({**known, QUESTION: "\n".join(str(known[field]) for field in local.question)})
    return documents


def _dataset(splits: dict[str, list[Document]]) -> Any:
    """What lm_eval calls for a task's data."""

    def build(**_: Any) -> dict[str, datasets.Dataset]:
        return {name: datasets.Dataset.from_list(documents) for name, documents in splits.items()}

    return build


def _own_file(name: str, folders: list[Path]) -> Path | None:
    """The file of questions or of BIG-bench that a name stands for: a path, or one of the name in a folder."""
    path = Path(name)
    if path.is_file() and path.name.endswith(SUFFIXES):
        file: Path | None = path
    else:
        file = find_file(folders, (name, f"{name}/task"))
    if file is not None and not _is_jsonl(file):
        require_bigbench(file)
    return file


def _is_jsonl(file: Path) -> bool:
    """Whether a file has one object a line, by its name."""
    return file.name.removesuffix(".gz").endswith(".jsonl")


def _in_words(folders: Sequence[Path]) -> str:
    """The folders, for a message."""
    return ", ".join(map(str, folders)) or "a folder of --task-data (none was given, nor POLYSKETCH_DATA)"


@contextmanager
def quiet() -> Iterator[None]:
    """Keep lm_eval's remarks about changed configurations to itself, and the bars of copying documents in memory."""
    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.is_progress_bar_enabled()
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            datasets.enable_progress_bars()
