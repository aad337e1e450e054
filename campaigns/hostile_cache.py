"""Attacks on the cache of compiled programs: what lies there is loaded, and so it runs."""

import ctypes
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from campaigns.isolated import complaint, isolated, refusing
from polysketch.ops.native import build
from polysketch.ops.native.compiler import find_compiler, named_by_content

_ONE = 'extern "C" int one() { return 1; }\n'
_SINGS = """#include <cstdio>
extern "C" int one() {{ return 1; }}
__attribute__((constructor)) static void sing() {{ if (auto* file = std::fopen("{canary}", "w")) std::fclose(file); }}
"""


def attacks(folder: Path, draw: random.Random) -> Iterator[tuple[str, str | None]]:
    """Without end: what was done to the cache, and what is wrong."""
    folder.mkdir(parents=True)
    canary = folder / "canary"
    sings = _compiled_canary(folder, canary)
    while True:
        place = folder / "place"
        shutil.rmtree(place, ignore_errors=True)
        (place / "source").mkdir(parents=True)
        (place / "source" / "one.cpp").write_text(_ONE)
        kept = place / "polysketch" / "native"
        kept.mkdir(parents=True, mode=0o700)
        made = build.compiled(place / "source", kept)
        name = draw.choice(list(_ATTACKS))
        environment = _ATTACKS[name](made, sings, draw)
        wrong = _used(place, environment, two=name == "two at once")
        if canary.exists():
            wrong = "code that others planted ran"
            canary.unlink()
        yield name, wrong


def _compiled_canary(folder: Path, canary: Path) -> bytes:
    source, made = folder / "sings.cpp", folder / "sings.so"
    source.write_text(_SINGS.format(canary=canary))
    subprocess.run([find_compiler(), "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    return made.read_bytes()


def _used(place: Path, environment: dict[str, str], *, two: bool) -> str | None:
    """Have the programs compiled or found, and called, in a process of its own, or in two."""

    def work() -> None:
        os.environ.update({"XDG_CACHE_HOME": str(place)} | environment)
        build._temporary_folder.cache_clear()
        if two and os.fork() == 0:
            _call(place)
            os._exit(0)
        _call(place)
        if two and os.waitstatus_to_exitcode(os.wait()[1]):
            raise KeyError("the second process failed")

    return complaint(isolated(refusing(work), seconds=60))


def _call(place: Path) -> None:
    if ctypes.CDLL(str(build.compiled(place / "source", build._folder()))).one() != 1:
        raise KeyError("the program computes something else")


def _stem(made: Path) -> str:
    return made.stem.rpartition("-")[0]


def _plant(made: Path, sings: bytes) -> Path:
    """The canary under the very name that is looked for."""
    made.unlink()
    planted = made.with_name(named_by_content(_stem(made), sings))
    planted.write_bytes(sings)
    return planted


def _writable(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    _plant(made, sings).chmod(draw.choice((0o722, 0o770, 0o666, 0o702)))
    return {}


def _of_another(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    planted = _plant(made, sings)
    if os.geteuid() == 0:
        os.chown(planted, 12345, 12345)
    else:
        planted.chmod(0o777)
    return {}


def _linked(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    planted = _plant(made, sings)
    elsewhere = made.parents[3] / "elsewhere.so"
    planted.rename(elsewhere)
    planted.symlink_to(elsewhere)
    return {}


def _in_the_place(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    """The canary under the name of another content."""
    made.write_bytes(sings)
    return {}


def _folder_of_all(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    _plant(made, sings).chmod(0o700)
    draw.choice(list(made.parents)[1:3]).chmod(draw.choice((0o777, 0o702)))
    return {}


def _damaged(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    content = made.read_bytes()
    place = draw.randrange(len(content))
    made.write_bytes(draw.choice((content[:place], content[:place] + b"\xff" + content[place + 1 :], b"")))
    return {}


def _odd_compiler(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    made.unlink()
    canary = made.parents[3] / "canary"
    script = made.parents[3] / "a compiler; touch x"
    script.write_text(
        draw.choice(("#!/bin/sh\necho '\x1b]0;x\x07error: no'\nexit 1\n", "#!/bin/sh\nexit 0\n", "no script"))
    )
    script.chmod(0o700)
    odd = (
        f"c++; touch {canary}",
        f"$(touch {canary})",
        f"`touch {canary}`",
        "",
        "-",
        "--version",
        "/",
        str(script),
        "\x1b[2J",
    )
    return {
        "CXX": draw.choice(odd),
        "CXXFLAGS": draw.choice(("", f"; touch {canary}", "-fplugin=/nothing.so", "-include /etc/passwd")),
    }


def _nothing(made: Path, sings: bytes, draw: random.Random) -> dict[str, str]:
    made.unlink()
    return {}


_ATTACKS: dict[str, Callable[[Path, bytes, random.Random], dict[str, str]]] = {
    "a planted file that others may write": _writable,
    "a planted file of another user": _of_another,
    "a planted link": _linked,
    "a planted file under the name of another": _in_the_place,
    "a folder that all may write to": _folder_of_all,
    "a damaged file": _damaged,
    "an odd compiler": _odd_compiler,
    "two at once": _nothing,
}
