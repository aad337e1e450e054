"""What the campaign of hostile files plants, and what it takes for harm."""

import gzip
import json
import os
import pickle
import random
import re
import shutil
import socket
import struct
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from campaigns.isolated import address_space, complaint, isolated, refusing
from campaigns.readers import ONE_STEP, TEXT, make_sources
from polysketch.cli import main
from polysketch.data import ReadOptions, load_tokenizer
from polysketch.data.corpus.readers import read_file, reader_of
from polysketch.integrations.transformers_folder import read_tokenizer

SECRET = "0f-nobody-else-s-business"
_CANARY = "canary"
_PICKLED = (
    *(
        "pytorch_model.bin",
        "model.bin",
        "model.pt",
        "model.pth",
        "model.pkl",
        "optimizer.bin",
        "optimizer.pt",
        "state.pt",
    ),
    *(
        "scheduler.pt",
        "scaler.pt",
        "rng_state.pth",
        "training_args.bin",
        "random_states_0.pkl",
        "tokenizer.pkl",
        "data.npy",
    ),
    *("tokenizer.bin", "vocab.pkl", "train.npy", "train.npz", "adapter_model.bin", "checkpoint.ckpt", "dataset.pkl"),
    *(
        "pytorch_model-00001-of-00002.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "model.joblib",
        "state.json",
        "cache.pkl",
    ),
    *("train.pt", "train.pkl", "rows.pkl", "config.pkl", "metrics.pkl", "description.pkl", "model.safetensors.pkl"),
)
"""Names under which libraries look for pickles, or might."""

_CODE = ("modeling_polysketch.py", "tokenization_polysketch.py", "configuration_polysketch.py", "sitecustomize.py")
_CODE += ("conftest.py", "setup.py", "__init__.py", "torch.py", "numpy.py", "dataset.py", "custom_generate/generate.py")
_STEERING = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_ESCAPES = (
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "\x1b[31m",
    "\x9b31m",
    "\u202egnp.exe",
    "\x08\x08\x08",
    "\x1b]52;c;cm0=\x07",
    "a\rb",
    "\x00",
)


class _Sings:
    """What an unpickler calls: the canary's file is made."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self._canary, "sang")


def make_outside(folder: Path) -> dict[str, bytes]:
    """A folder of somebody else's, with a secret; what is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "thesis").write_text(SECRET)
    (folder / "secret.json").write_text(json.dumps({"secret": SECRET}))
    return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the canary's."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != _CANARY}


def canary_sang(outside: Path) -> bool:
    """Whether code out of a file ran."""
    return (outside / _CANARY).exists()


def inherited() -> int:
    """Bytes of memory that a fork of this process has without work of its own, at most.

    It begins with less: pages of files, those of libraries above all, come back when they are used.
    """
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def steering(text: str) -> str:
    """The first control characters of a text that are none of ours: bars move with carriage returns alone."""
    found = _STEERING.search(text.replace("\r", ""))
    return text[max(0, found.start() - 20) : found.end() + 20] if found else ""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def plant_pickles(folder: Path, outside: Path, draw: random.Random) -> str:
    """Pickles and scripts that make a canary sing, under names that a reader might take, or in the place of a file."""
    folders = sorted({folder, *(path.parent for path in _files(folder))})
    done = []
    for name in draw.sample(_PICKLED, 12):
        path = draw.choice(folders) / name
        if not path.exists():
            path.write_bytes(_pickled(outside, draw))
            done.append(name)
    for name in draw.sample(_CODE, 4):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(outside / _CANARY)!r}, 'w').write('sang')\nclass Model: pass\nModel.x = open\n")
    if draw.random() < 0.4:
        path = draw.choice(_files(folder))
        path.write_bytes(_pickled(outside, draw))
        done.append(f"in the place of {path.relative_to(folder)}")
    if draw.random() < 0.6:
        for path in [path for path in _files(folder) if path.name in ("config.json", "tokenizer_config.json")]:
            _change(path, lambda values: values | _auto_map(draw))
    if draw.random() < 0.3:
        for path in folder.rglob("*.safetensors"):
            path.unlink()
    return ", ".join(done)


def _auto_map(draw: random.Random) -> dict[str, Any]:
    """What asks transformers to run a folder's own code."""
    names = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    code = {name: f"{draw.choice(_CODE[:3]).removesuffix('.py')}.Model" for name in names}
    return {
        "auto_map": code,
        "custom_pipelines": {"x": {"impl": "modeling_polysketch.Model"}},
        "trust_remote_code": True,
    }


def _pickled(outside: Path, draw: random.Random) -> bytes:
    content = pickle.dumps(_Sings(outside / _CANARY), protocol=draw.choice((0, 2, 4)))
    way = draw.randrange(4)
    if way == 0:  # as torch.save writes it
        path = outside.parent / "zip"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", content)
            file.writestr("archive/version", "3\n")
        return path.read_bytes()
    if way == 1:  # as numpy writes objects
        header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        header += b" " * (63 - (len(header) + 10) % 64) + b"\n"
        return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + content
    return gzip.compress(content) if way == 2 else content


def _change(path: Path, change: Any) -> None:
    values = json.loads(path.read_bytes())
    if isinstance(values, dict):
        values.pop("sha256", None)
        path.write_text(json.dumps(change(values)))


def _texts(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key of a text in a value, and of the names of an object."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(pairs):
        if isinstance(one, str):
            yield value, key
        yield from _texts(one)


def plant_names(folder: Path, outside: Path, draw: random.Random) -> str:
    """Names in JSON and in lists of sums that lead out of the folder."""
    depth = "../" * draw.randrange(1, 6)
    target = draw.choice(
        (str(outside / "thesis"), f"{depth}outside/thesis", f"{depth}{outside}/secret.json", "..", "/dev/zero")
    )
    listed = [
        path for path in _files(folder) if path.suffix in (".json", ".tsv", ".jsonl") or path.name == "SHA256SUMS"
    ]
    if not listed:
        return plant_links(folder, outside, draw)
    path = draw.choice(listed)
    if path.suffix == ".json" and (places := list(_texts(values := json.loads(path.read_bytes())))):
        owner, key = draw.choice(places)
        before = owner[key]
        if isinstance(owner, dict) and draw.random() < 0.3:
            owner[target] = owner.pop(key)
        else:
            owner[key] = target
        if isinstance(values, dict):
            values.pop("sha256", None)
        path.write_text(json.dumps(values))
        return f"{path.name}: {before!r:.40} is now {target}"
    words = re.findall(r"[\w.-]{4,}", path.read_text(errors="replace")) or ["x"]
    word = draw.choice(words)
    path.write_text(path.read_text(errors="replace").replace(word, target, 1))
    return f"{path.name}: {word} is now {target}"


def plant_links(folder: Path, outside: Path, draw: random.Random) -> str:
    """Links in the place of files and folders, and under names that are written."""
    names = ("lock", "metrics.jsonl", ".config.json.tmp", "loss.png", "tensorboard", "checkpoints/.step-00000003.tmp")
    if draw.random() < 0.4:
        path, target = folder / draw.choice(names), draw.choice((outside / "thesis", outside))
    else:
        path = draw.choice(sorted(one for one in folder.rglob("*")))
        target = outside if path.is_dir() else outside / draw.choice(("thesis", "secret.json", "not-there"))
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return f"{path.relative_to(folder)} is a link to {target.name}"


def plant_special(folder: Path, outside: Path, draw: random.Random) -> str:
    """A pipe, a socket, a device, a folder or a loop in the place of a file."""
    path = draw.choice(_files(folder))
    path.unlink()
    kind = draw.choice(("pipe", "socket", "device", "folder", "loop", "no rights"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        before = Path.cwd()
        os.chdir(path.parent)  # the name of a socket is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
        os.chdir(before)
    elif kind == "device":
        path.symlink_to(draw.choice(("/dev/zero", "/dev/random", "/dev/tty", "/proc/self/mem", "/dev/full")))
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.write_bytes(b"")
        path.chmod(0)
    return f"{path.relative_to(folder)} is a {kind}"


def plant_sizes(folder: Path, outside: Path, draw: random.Random) -> str:
    """Terabytes: holes in the place of a file, numbers of a configuration, headers of safetensors, depth."""
    path = draw.choice(_files(folder))
    way = draw.randrange(4)
    if way == 0:
        with path.open("r+b") as file:
            file.truncate(draw.choice((2**42, 2**36)))
        return f"{path.name} has a hole of terabytes"
    if path.suffix == ".safetensors":
        _huge_header(path, draw)
        return f"{path.name} has tensors of terabytes"
    if path.suffix == ".json" and way < 3:
        values = json.loads(path.read_bytes())
        numbers = [(owner, key) for owner, key in _numbers(values)]
        if numbers:
            owner, key = draw.choice(numbers)
            owner[key] = draw.choice((2**31 - 1, 2**40, 2**62, 10**4000 if draw.random() < 0.2 else 10**18, 1_000_000))
            if isinstance(values, dict):
                values.pop("sha256", None)
            with _any_digits():
                path.write_text(json.dumps(values))
            return f"{path.name}: {key} is enormous"
    content = path.read_bytes()
    path.write_bytes(
        draw.choice((b"[" * 50_000_000, b'{"a":' * 5_000_000, b"9" * 100_000_000, b'"' + b"a" * 200_000_000)) + content
    )
    return f"{path.name} begins with millions of brackets, digits or letters"


class _any_digits:
    """Python refuses to write numbers of thousands of digits, and files do not."""

    def __enter__(self) -> None:
        import sys

        self._before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)

    def __exit__(self, *_: object) -> None:
        import sys

        sys.set_int_max_str_digits(self._before)


def _numbers(value: Any) -> Iterator[tuple[Any, Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in list(pairs)[:200]:
        if isinstance(one, int) and not isinstance(one, bool):
            yield value, key
        yield from _numbers(one)


def _huge_header(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    name = draw.choice([name for name in header if name != "__metadata__"] or ["x"])
    header.setdefault(name, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})  # some files hold no tensor
    header[name]["shape"] = draw.choice(([2**40], [2**31, 2**31], [2**62], [0, 2**62], [1] * 100_000))
    if draw.random() < 0.5:
        header[name]["data_offsets"] = [0, draw.choice((2**40, 2**62))]
    said = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", draw.choice((len(said), len(said), 2**50))) + said + content[8 + length :])


def plant_escapes(folder: Path, outside: Path, draw: random.Random) -> str:
    """Sequences that steer a terminal, in texts of JSON, in names of its objects, and in the names of files."""
    escape = draw.choice(_ESCAPES)
    listed = [path for path in _files(folder) if path.suffix in (".json", ".jsonl", ".txt", ".tsv")]
    if not listed or draw.random() < 0.3:
        path = draw.choice(_files(folder))
        path.rename(path.with_name(escape.replace("\0", "\x01") + path.name))
        return f"the name of {path.name} holds {escape!r}"
    path = draw.choice(listed)
    if path.suffix == ".json" and (places := list(_texts(values := json.loads(path.read_bytes())))):
        owner, key = draw.choice(places)
        if isinstance(owner, dict) and draw.random() < 0.3:
            owner[escape] = owner.pop(key)
        else:
            owner[key] = escape + owner[key]
        if isinstance(values, dict):
            values.pop("sha256", None)
        path.write_text(json.dumps(values))
        return f"{path.name}: {key} holds {escape!r}"
    path.write_text(escape + path.read_text())
    return f"{path.name} begins with {escape!r}"


def bombs(folder: Path, draw: random.Random) -> Iterator[tuple[str, str | None]]:
    """Files that are a thousand times larger than they look, prepared."""
    folder.mkdir(parents=True)
    while True:
        path, what = _bomb(folder, draw)
        cut = draw.choice((0, 1_000_000))

        def work(path: Path = path, cut: int = cut) -> int:
            import resource

            limit = address_space() + (3 << 30)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            reader = reader_of(path)
            assert reader is not None
            for _ in read_file(path, reader, ReadOptions(cut_text=cut)):
                pass
            return 0

        ended = isolated(refusing(work), seconds=120)
        wrong = complaint(ended)
        if wrong is None and ended.peak > inherited() + (2 << 30):
            wrong = f"took {ended.peak >> 20} MB"
        yield f"{what}, cut at {cut}", wrong
        path.unlink()


def _bomb(folder: Path, draw: random.Random) -> tuple[Path, str]:
    way = draw.randrange(5)
    size = draw.choice((300_000_000, 1_200_000_000))
    if way == 4:
        return _parquet_bomb(folder, draw)
    inner = (b"a", b'{"text": "', b'text,other\n"', b"\n")[way]
    path = folder / f"bomb{('.txt', '.jsonl', '.csv', '.txt')[way]}.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(inner)
        for _ in range(size // 10_000_000):
            file.write((b"\n" if way == 3 else b"a") * 10_000_000)
    return path, f"{size:,} letters in {path.stat().st_size:,} bytes of {path.name}"


def _parquet_bomb(folder: Path, draw: random.Random) -> tuple[Path, str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    length, rows = draw.choice(((10_000_000, 2_000), (1_000, 2_000_000), (100_000_000, 20)))
    values = arrow.DictionaryArray.from_arrays(arrow.array(np.zeros(rows, np.int32)), arrow.array(["a" * length]))
    path = folder / "bomb.parquet"
    parquet.write_table(arrow.table({"text": values}), path, compression="zstd", store_schema=False)
    return path, f"{rows:,} times {length:,} letters in {path.stat().st_size:,} bytes of parquet"


TEXTS = ("a" * 21 + "! ", "a" * 40 + "! ", "ab" * 30, TEXT)
"""Some of which bad patterns match in years."""

PATTERNS = (
    "(a+)+$",
    "(a|aa)+$",
    "(a*)*b",
    "(.*a){20}b",
    "(?:a?){30}a{30}",
    "((a{1,1000}){1,1000}){1,1000}",
    "(a+)\\1+b",
    "(",
    "a{99999999}",
    "(?<=a{1,99})b",
    "\\X" * 1000,
)

PATIENCE = 120


def patterns(folder: Path, draw: random.Random) -> Iterator[tuple[str, str | None]]:
    """Regular expressions in a tokenizer.json that take years on a text."""
    folder.mkdir(parents=True)
    sources = make_sources(folder / "sources")
    described = json.loads((sources / "data" / "tokenizer.json").read_bytes())
    (sources / "exported" / "SHA256SUMS").unlink(missing_ok=True)  # as a hostile author would
    while True:
        pattern = draw.choice(PATTERNS)
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": draw.random() < 0.2}
        replace = {"type": "Replace", "pattern": {"Regex": pattern}, "content": "a" * draw.choice((0, 1, 1000))}
        changed = described | draw.choice(({"pre_tokenizer": split}, {"normalizer": replace}))
        (sources / "exported" / "tokenizer.json").write_text(json.dumps(changed))
        text = draw.choice(TEXTS) * draw.choice((1, 100, 10_000))
        by = draw.choice((_by_ours, _by_transformers))
        wrong = complaint(isolated(refusing(partial(by, sources / "exported", text)), seconds=PATIENCE))
        where = "pre-tokenizer" if changed["pre_tokenizer"] == split else "normalizer"
        yield f"{pattern} in the {where}, {by.__name__[1:].replace('_', ' ')}", wrong


def _by_ours(model: Path, text: str) -> None:
    load_tokenizer(model / "tokenizer.json").encode(text)


def _by_transformers(model: Path, text: str) -> None:
    read_tokenizer(model)(text)


def temporary_names(folder: Path, draw: random.Random) -> Iterator[tuple[str, str | None]]:
    """Whatever a command opened to write is a link to somebody else's file the next time."""
    folder.mkdir(parents=True)
    sources = make_sources(folder / "sources")
    text, data, run = (str(sources / name) for name in ("text", "data", "run"))
    sizes = [*ONE_STEP, "--no-tensorboard", "--device", "cpu"]
    lines = {
        "prepare": [
            "prepare",
            text,
            "--out",
            "new",
            "--no-progress",
            "--validation-share",
            "0.2",
            "--test-share",
            "0.1",
        ],
        "train": ["train", "--data", data, "--out", "new", *sizes],
        "export": ["export", run, "new"],
        "import": ["import", str(sources / "exported"), "new"],
        "evaluate": ["evaluate", run, "--max-tokens", "20", "--out", "new.json"],
        "task": ["task", "reversal", "--set", "length=4", "--out", "new"],
    }
    os.chdir(folder)
    outside, written = folder / "outside", {}
    while True:
        verb = draw.choice(list(lines))
        _clear(folder)
        if verb not in written:
            written[verb] = _written_by(lines[verb], folder)
            _clear(folder)
        treasure = make_outside(outside)
        path = draw.choice(written[verb])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(draw.choice((outside / "thesis", outside)))
        ended = isolated(lambda verb=verb: main(lines[verb]), seconds=60)
        wrong = "a file outside was changed" if contents(outside) != treasure else complaint(ended)
        yield f"{verb} with a link at {path.relative_to(folder)}", wrong


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name not in ("sources", "outside"):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _written_by(line: list[str], folder: Path) -> list[Path]:
    """Every name that a command opens to write, makes or renames, in a folder."""
    record = folder / "outside-names"

    def work() -> int:
        import sys

        names: set[str] = set()

        def hear(event: str, given: tuple[Any, ...]) -> None:
            if (
                event == "open"
                and isinstance(given[0], str | Path)
                and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            ):
                names.add(os.path.abspath(given[0]))
            elif event in ("os.mkdir", "os.rename"):
                names.update(os.path.abspath(name) for name in given[:2] if isinstance(name, str | Path))

        sys.addaudithook(hear)
        status = main(line)
        record.write_text("\n".join(sorted(names)))
        return status

    ended = isolated(work, seconds=60)
    if ended.status:
        raise RuntimeError(f"expected this to work: polysketch {' '.join(line)}: {ended.text[-300:]}")
    found = [Path(name) for name in record.read_text().splitlines()]
    inside = [
        path
        for path in found
        if folder in path.parents and path != record and not path.is_relative_to(folder / "sources")
    ]
    record.unlink()
    return inside
