"""Commands that write, small enough to be stopped hundreds of times; what each needs, and what it leaves.

What a command leaves is told as a dictionary: a name, and a digest or JSON without times. Two calls are alike where
their dictionaries are equal. What may be seen of a command that did not end are some of these, or
what was there before.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from campaigns.forked import ALL, TEXT, Commands, Words
from polysketch.data.description import RECORD_FILE
from polysketch.training.checkpoint import list_checkpoints, load_state, require_bound
from polysketch.training.manifest import listed, read_verified
from polysketch.training.run_folder import LoopFolder

Seen = dict[str, Any]

RUN = (
    "train --data {given}/data --preset tiny --layers 1 --attention polysketch-paper --attention-options sketch_size=8 "
    "local_chunk=16 prefix_gain=0.5 --context 48 --batch-size 2 --log-every 1 --device cpu --no-tensorboard --resume"
)
PREPARED = "--cut-text 0 --validation-share 0.2 --test-share 0.1"
_MOVING = re.compile(r"metrics|checkpoint|(model|optimizer|random)(-.*)?[.]safetensors")  # of a loop before its end
_TIMES = ("seconds", "tokens_per_second", "provenance", "date", "load", "crc32")


@dataclass(frozen=True)
class Subject:
    """A command.

    Attributes:
        name: of it.
        words: its command line; `{given}` is the folder of what it reads, `{here}` that of what it writes.
        seen: what it shows in its folder by final names; raises ValueError or OSError where that is not whole.
        once: the folder or file that refuses a second call when it is there, as whole as it will ever be.
        earlier: file that is there before, to be replaced.
        needs: commands that make what it reads; see `given`.
        imports: what it loads.
        before: functions called in its process.
        processes: that do it together.
        environment: of them.
        steps: of a training run.
    """

    name: str
    words: str
    seen: Callable[[Path], Seen]
    once: str = ""
    earlier: str = ""
    needs: tuple[str, ...] = ()
    imports: tuple[str, ...] = TEXT
    before: tuple[str, ...] = ()
    processes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    steps: int = 0

    def argv(self, given: Path, here: Path) -> list[str]:
        """The command line for two folders."""
        return [word.format(given=given, here=here) for word in self.words.split()]

    def begin(self, here: Path) -> Path:
        """Make the folder in which it is to work."""
        here.mkdir(parents=True)
        if self.earlier:
            (here / self.earlier).write_text(EARLIER)
        return here

    def problems(self, here: Path, end: Mapping[str, Any]) -> list[str]:
        """What is taken for whole and is not, of a command that did not end.

        Args:
            here: its folder.
            end: what it shows when nobody stops it.
        """
        try:
            seen = self.seen(here)
        except (ValueError, OSError, KeyError) as error:
            return [f"{type(error).__name__}: {error}"]
        settled = [name for name in seen if not _MOVING.fullmatch(name) and seen[name] != _OLD]
        return [
            f"{name} is another, or a part, of what it is in the end" for name in settled if seen[name] != end.get(name)
        ]


EARLIER = '{"earlier": true}\n'
_OLD = {"earlier": True}


def digests(folder: Path) -> Seen:
    """Of all files in a folder, which is to appear whole: hidden ones and records of unfinished work do not count."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    files = {str(path.relative_to(folder)): path for path in paths if path.name != RECORD_FILE}
    found = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    return {folder.name: found} if found else {}


def without_times(value: Any) -> Any:
    """JSON without what no two runs have in common."""
    if isinstance(value, dict):
        return {name: without_times(item) for name, item in value.items() if name not in _TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def one_json(file: Path) -> Seen:
    """A file of JSON without times; nothing where there is none."""
    return {file.name: without_times(json.loads(file.read_bytes()))} if file.exists() else {}


def whole_lines(file: Path) -> list[Any]:
    """The whole lines of a file of JSON; of a killed process the last may be torn."""
    content = file.read_bytes() if file.exists() else b""
    return [without_times(json.loads(line)) for line in content.split(b"\n")[:-1]]


def _of_loop(folder: LoopFolder) -> Seen:
    """The newest checkpoint and the metrics. All checkpoints are verified, and metrics go at least to the newest."""
    saved, lines = list_checkpoints(folder.checkpoints), whole_lines(folder.metrics)
    for path in saved:
        require_bound(path, load_state(path), folder.identity())
        for name in listed(path):
            read_verified(path, name)
    if not saved:
        return {"metrics": lines}
    steps = [line["step"] for line in lines if line["kind"] != "evaluation"]
    if steps != list(range(1, len(steps) + 1)) or len(steps) < load_state(saved[-1])["step"]:
        raise ValueError(f"metrics of steps {steps} beside {saved[-1].name}")
    tensors = {f"{path.name}": digest for path, digest in _tensors(saved[-1])}
    return {"checkpoint": saved[-1].name, "metrics": lines, **tensors}


def _tensors(checkpoint: Path) -> list[tuple[Path, str]]:
    paths = sorted(checkpoint.glob("*.safetensors"))
    return [(path, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]


def of_run(here: Path) -> Seen:
    """A training run in the folder `run`."""
    run = LoopFolder(here / "run")
    kept = digests(run.path / "tokenizer") if list_checkpoints(run.checkpoints) else {}
    return {**_of_loop(run), **kept}


def of_conversion(here: Path) -> Seen:
    """A conversion in the folder `converted`."""
    folder = LoopFolder(here / "converted")
    report = one_json(folder.path / "report.json")
    return {**_of_loop(folder), **report, **digests(folder.path / "model")}


def of_study(here: Path) -> Seen:
    """Records, summary and table of a study whose runs and results are in this folder."""
    results = here / "runs" / "reversal-smoke" / "results"
    found = {name: value for path in sorted(results.glob("*.json")) for name, value in one_json(path).items()}
    pictures = [path for path in results.glob("*.png")]
    for path in pictures:
        _require_picture(path)
    table = (results / "table.md").read_text() if (results / "table.md").exists() else None
    if table is not None and not table.endswith(".\n"):
        raise ValueError("the table is cut off")
    return found | ({} if table is None else {"table": True}) | {path.name: True for path in pictures}


def _require_picture(path: Path) -> None:
    """A PNG begins and ends as one."""
    content = path.read_bytes()
    if content[:4] != b"\x89PNG" or content[-8:-4] != b"IEND":
        raise ValueError(f"{path.name} is cut off")


def of_benchmark(here: Path) -> Seen:
    """The record of a benchmark: times differ, so the names in it count; the earlier one as it was. And its plot."""
    file = here / "record.json"
    found = json.loads(file.read_bytes()) if file.exists() else None
    seen = {} if found is None else {file.name: found if found == _OLD else sorted(found)}
    if (here / "plot.png").exists():
        _require_picture(here / "plot.png")
        seen["plot.png"] = True
    return seen


def of_report(here: Path) -> Seen:
    """The report of an evaluation, and its plot."""
    seen = one_json(here / "report.json")
    seen.get("report.json", {}).pop("settings", None)
    if (here / "plot.png").exists():
        _require_picture(here / "plot.png")
        seen["plot.png"] = True
    return seen


def of_comparison(here: Path) -> Seen:
    """The plot of a comparison, or what was there before."""
    content = (here / "plot.png").read_bytes()
    if content == EARLIER.encode():
        return {"plot.png": _OLD}
    _require_picture(here / "plot.png")
    return {"plot.png": hashlib.sha256(content).hexdigest()}


def of_continuations(here: Path) -> Seen:
    """Each line of the file counts."""
    return {str(number): line for number, line in enumerate(whole_lines(here / "continued.jsonl"))}


def recorded_always() -> None:
    """In a process of `prepare`: record after every batch how far it is, and let batches be small."""
    from polysketch.data import encoding, unfinished

    unfinished.SECONDS_BETWEEN = 0.0
    encoding.BATCH_BYTES = 4_000


def write_llama(folder: str, vocabulary: int) -> None:
    """A small Llama with random weights."""
    import torch

    from polysketch.integrations.transformers_folder import new_model

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 1}
    more = {"head_dim": 32, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None}
    new_model({"model_type": "llama", "vocab_size": vocabulary, **sizes, **more}).save_pretrained(folder)


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject(
            "train",
            RUN + " --steps 8 --eval-every 2 --eval-tokens 2000 --save-every 2 --out {here}/run",
            of_run,
            needs=("data",),
            steps=8,
        ),
        Subject(
            "pair",
            RUN + " --steps 6 --eval-every 2 --eval-tokens 500 --save-every 2 --mesh shard=2 --out {here}/run",
            of_run,
            needs=("data",),
            processes=2,
            steps=6,
        ),
        Subject(
            "four",
            RUN.replace("--batch-size 2", "--batch-size 4")
            + " --steps 6 --eval-every 2 --eval-tokens 500 --save-every 2 --mesh replicate=2,shard=2 --out {here}/run",
            of_run,
            needs=("data",),
            processes=4,
            steps=6,
        ),
        Subject(
            "compile",
            RUN + " --steps 1 --eval-every 0 --out {here}/run",
            of_run,
            needs=("data",),
            environment={"XDG_CACHE_HOME": "{here}/cache"},
        ),
        Subject(
            "prepare",
            "prepare {given}/text --tokenizer bpe:300 --out {here}/data " + PREPARED,
            lambda here: digests(here / "data"),
            once="data",
            before=("campaigns.subjects:recorded_always",),
        ),
        Subject(
            "task",
            "task texts --train {given}/classes --out {here}/task",
            lambda here: digests(here / "task"),
            once="task",
            needs=("classes",),
        ),
        Subject(
            "evaluate",
            "evaluate {given}/run --split train --max-tokens 2000 --device cpu --out {here}/report.json "
            "--plot {here}/plot.png",
            of_report,
            earlier="report.json",
            needs=("data", "run"),
        ),
        Subject(
            "generate",
            "generate {given}/run --prompts {given}/prompts.jsonl --out {here}/continued.jsonl --batch-size 2 "
            "--max-new-tokens 12 --device cpu",
            of_continuations,
            needs=("data", "run"),
        ),
        Subject(
            "benchmark",
            "benchmark attention --lengths 64 128 --mechanisms softmax --heads 1 --head-dim 32 --device cpu "
            "--out {here}/record.json --plot {here}/plot.png",
            of_benchmark,
            earlier="record.json",
        ),
        Subject(
            "export",
            "export {given}/run {here}/exported",
            lambda here: digests(here / "exported"),
            once="exported",
            needs=("data", "run"),
            imports=ALL,
        ),
        Subject(
            "import",
            "import {given}/exported {here}/imported",
            lambda here: digests(here / "imported"),
            once="imported",
            needs=("data", "run", "exported"),
            imports=ALL,
        ),
        Subject(
            "compare",
            "compare {given}/run --plot {here}/plot.png",
            of_comparison,
            earlier="plot.png",
            needs=("data", "run"),
        ),
        Subject(
            "convert",
            "convert {given}/llama --data {given}/bytes --out {here}/converted --attention polysketch "
            "--attention-options window=8 sketch_size=4 --context 32 --batch-size 2 --transfer-steps 3 "
            "--tuning-steps 3 --save-every 2 --log-every 1 --eval-tokens 400 --device cpu --resume",
            of_conversion,
            needs=("bytes", "llama"),
            imports=ALL,
        ),
        Subject(
            "study",
            "study reversal --size smoke --only softmax linear --out {here}/runs --results {here}/results",
            of_study,
            imports=(*TEXT, "polysketch.studies.task_study"),
        ),
    )
}
"""By name; the first is the one that is stopped most often."""


def make_given(commands: Commands, folder: Path, needs: set[str]) -> None:
    """Write what commands read.

    Args:
        commands: a server.
        folder: new; its part `text` is there always.
        needs: of all subjects.
    """
    from campaigns.harness import write_text

    write_text(folder / "text")
    (folder / "prompts.jsonl").write_text("".join(f'"{number} plus {number}"\n' for number in range(5)))
    lines = {
        "data": f"prepare {{given}}/text --tokenizer bpe:300 --out {{given}}/data {PREPARED}",
        "bytes": f"prepare {{given}}/text --tokenizer bytes --out {{given}}/bytes {PREPARED}",
        "run": RUN.replace("--resume", "--steps 2 --eval-every 2 --eval-tokens 100 --out {given}/run"),
        "exported": "export {given}/run {given}/exported",
    }
    for name, line in lines.items():
        if name in needs:
            _run(commands, folder, [word.format(given=folder) for word in line.split()])
    if "classes" in needs:
        for name in ("plus", "minus"):
            (folder / "classes" / name).mkdir(parents=True)
            for number in range(20):
                (folder / "classes" / name / f"{number}.txt").write_text(f"{number} {name} {number}")
    if "llama" in needs:
        vocabulary = json.loads((folder / "bytes" / "description.json").read_bytes())["tokenizer"]["vocab_size"]
        given = {"folder": str(folder / "llama"), "vocabulary": vocabulary}
        _run(commands, folder, [], before=("campaigns.subjects:write_llama",), given=given)


def _run(commands: Commands, folder: Path, argv: list[str], **more: Any) -> None:
    told = folder / "told.txt"
    if commands.run(Words(argv, told, **more)):
        raise RuntimeError(f"polysketch {' '.join(argv)}: {told.read_text()}")
