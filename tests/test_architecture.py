"""Who may import whom, who owns which third-party library, and what a bare installation can do.

The source is read as syntax trees, so that an import inside a function counts too.
"""

import ast
import keyword
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from polysketch.extras import EXTRA_OF

SOURCE = Path(__file__).resolve().parents[1] / "src" / "polysketch"

MAY_IMPORT = {
    "ops": set(),
    "storage": set(),
    "data": {"storage"},
    "tasks": {"data", "storage"},
    "feature_maps": {"ops"},
    "attention": {"feature_maps", "ops"},
    "nn": {"attention", "feature_maps", "ops"},
    "distributed": {"ops", "storage"},
    "models": {"nn", "attention", "feature_maps", "distributed", "ops"},
    "evaluation": {"models", "tasks", "data", "attention", "feature_maps"},
    "generation": {"models", "attention", "data", "storage"},
    "training": {"evaluation", "models", "nn", "tasks", "data", "distributed", "storage"},
    "integrations": {
        *("training", "evaluation", "generation", "models", "nn", "tasks", "attention", "ops", "data", "storage"),
    },
    "serving": {"integrations", "training", "generation", "models", "data"},
    "conversion": {"integrations", "training", "evaluation", "models", "attention", "data", "storage"},
    "benchmarking": {
        "integrations",
        "training",
        "evaluation",
        "models",
        "nn",
        "attention",
        "feature_maps",
        "ops",
        "data",
        "storage",
    },
    "studies": {
        *("benchmarking", "conversion", "integrations", "training", "evaluation", "tasks"),
        *("models", "attention", "feature_maps", "ops", "data", "storage"),
    },
    "cli": {
        *("studies", "ops", "feature_maps", "attention", "nn", "models", "data", "tasks"),
        *("evaluation", "generation", "training", "integrations", "conversion", "benchmarking", "distributed"),
        "serving",
    },
}
"""The table of the design: what each package may import of ours, besides itself."""

OWNERS = {
    "PIL": {"tasks"},
    "triton": {"ops"},
    "datasets": {"data", "integrations"},
    "diffusers": {"integrations"},
    "pyarrow": {"data"},
    "ray": {"data", "training"},
    "sentencepiece": {"data"},
    "tokenizers": {"data", "integrations"},
    "lm_eval": {"integrations"},
    "onnx": {"integrations"},
    "onnx_ir": {"integrations"},
    "peft": {"integrations"},
    "transformers": {"integrations"},
    "vllm": {"integrations"},
    "tyro": {"cli"},
    "sklearn": {"tasks"},
    "tensorboard": {"training"},
    "trackio": {"training"},
    "wandb": {"training"},
    "starlette": {"serving"},
    "uvicorn": {"serving"},
    "jinja2": {"integrations"},
    "safetensors": {"ops", "models", "distributed", "generation", "training", "integrations", "conversion"},
    "timm": {"integrations"},
    "matplotlib": {""},  # polysketch/plotting.py
}
"""Every third-party library beyond torch and numpy, and the packages that may import it."""

UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
"""Modules that run whatever a file tells them to."""

EXTRAS = sorted({*EXTRA_OF, "triton"})  # torch brings triton, where it does
BASE = {"torch", "numpy"}


def source_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(SOURCE.rglob("*.py"))


def name_of(file: Path) -> str:
    """Its path in the package, for the names of tests."""
    return file.relative_to(SOURCE).as_posix()


def package_of(file: Path) -> str:
    """The package below polysketch that holds `file`; "" for files of polysketch itself."""
    return file.relative_to(SOURCE).parts[0] if file.parent != SOURCE else ""


def module_of(file: Path) -> str:
    """Its dotted name."""
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def absolute(node: ast.ImportFrom, file: Path) -> str:
    """The module that a `from ... import` names, without leading dots."""
    if node.level == 0:
        return node.module or ""
    package = ["polysketch", *file.relative_to(SOURCE).parts[:-1]]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


@cache
def syntax_of(file: Path) -> ast.Module:
    """Its syntax tree, made once for all tests."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imported_modules(file: Path) -> frozenset[str]:
    """Every module that `file` imports, wherever in the file, by statement or by importlib with a literal name.

    Of `from polysketch import ops` both polysketch and polysketch.ops: the name may be a module.
    """
    found: set[str] = set()
    for node in ast.walk(syntax_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = absolute(node, file)
            found.add(module)
            found |= {f"{module}.{alias.name}" for alias in node.names if module == "polysketch"}
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__", "require", "optional"}:
            found |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
    return frozenset(found)


def called_name(node: ast.Call) -> str:
    """The last part of the name of what is called."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def our_packages() -> set[str]:
    """Folders below polysketch."""
    return {path.parent.name for path in SOURCE.glob("*/__init__.py")}


def of_every_file(check: Callable[[Path], None]) -> Callable[[], None]:
    """One test of all files, which names each that fails: a test of its own for each costs more than it computes."""

    def test() -> None:
        failed = {}
        for file in source_files():
            try:
                check(file)
            except AssertionError as error:
                failed[name_of(file)] = str(error)
        assert failed == {}

    test.__name__, test.__doc__ = check.__name__, check.__doc__
    return test


def test_every_module_can_be_imported_by_statement():
    """No file has the name of a word of Python's."""
    parts = {part for file in source_files() for part in file.relative_to(SOURCE).with_suffix("").parts}
    assert not [part for part in parts if keyword.iskeyword(part) or not part.isidentifier()]


def test_every_optional_package_is_one_of_an_extra():
    """Owners are of packages that the table of extras has, and of Triton."""
    assert OWNERS.keys() <= {*EXTRAS}


def test_every_package_has_a_line_in_the_table():
    """A new folder is placed in the order on purpose."""
    assert our_packages() <= MAY_IMPORT.keys()


def test_the_table_has_an_order():
    """A package imports only packages listed before it: so there are no cycles, and any package can come first."""
    earlier: set[str] = set()
    for package, allowed in MAY_IMPORT.items():
        assert allowed <= earlier
        earlier.add(package)


@of_every_file
def test_imports_follow_the_table_of_the_design(file):
    """Downwards only; files of polysketch itself may import the packages for re-export, but not the command line."""
    package = package_of(file)
    allowed = MAY_IMPORT[package] | {package} if package else MAY_IMPORT.keys() - {"cli"}
    ours = {module.split(".")[1] for module in imported_modules(file) if module.startswith("polysketch.")}
    forbidden = (ours & MAY_IMPORT.keys()) - allowed
    assert not forbidden or name_of(file) == "__main__.py"


def test_the_parts_of_the_command_line_import_each_other_in_an_order():
    """Also for type checkers: what two parts need of each other is a part of its own."""
    imports = {module_of(file): imported_modules(file) for file in (SOURCE / "cli").rglob("*.py")}
    TopologicalSorter({module: found & imports.keys() - {module} for module, found in imports.items()}).prepare()


@of_every_file
def test_third_party_libraries_are_imported_by_their_owners_only(file):
    """Whatever is not of the standard library, not torch and not numpy needs an owner."""
    roots = {module.partition(".")[0] for module in imported_modules(file)}
    for root in roots - sys.stdlib_module_names - BASE - {"polysketch"}:
        assert root in OWNERS, f"{root} has no owner: extend the table and pyproject.toml, or do without"
        assert package_of(file) in OWNERS[root], f"{root} belongs to {OWNERS[root]}"


@of_every_file
def test_nothing_is_ever_unpickled(file):
    """No pickle, no torch.load, no numpy.load with pickles: a checkpoint from a stranger must not run code."""
    assert not {module.partition(".")[0] for module in imported_modules(file)} & UNPICKLERS
    for node in ast.walk(syntax_of(file)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            assert (node.value.id, node.attr) not in {("torch", "load"), ("torch", "save")}
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            assert not {"load", "save"} & {alias.name for alias in node.names}
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


def modules_of_the_base_installation() -> list[str]:
    """All modules but the verbs of the command line, the integrations and the conversion, which belong to an extra as a
    whole, and the programs in Triton."""
    modules = ["polysketch.cli"]
    for file in source_files():
        needs_triton = "programs" in file.parts
        if (
            package_of(file) not in {"cli", "integrations", "conversion", "serving"}
            and file.name != "__main__.py"
            and not needs_triton
        ):
            modules.append(module_of(file))
    return modules


@of_every_file
def test_only_programs_import_triton_at_module_level(file):
    """They lie in folders of that name beside their launchers, which import them where they launch."""
    body = syntax_of(file).body
    names = [alias.name for node in body if isinstance(node, ast.Import) for alias in node.names]
    names += [absolute(node, file) for node in body if isinstance(node, ast.ImportFrom)]
    needs_triton = [name for name in names if name.partition(".")[0] == "triton" or ".programs" in name]
    assert "programs" in file.parts or not needs_triton


BLOCKED_IMPORT = """
import importlib, sys

asked = set()

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {extras!r}:
            asked.add(name.partition(".")[0])
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
for name in {modules!r}:
    importlib.import_module(name)
print(*asked)
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter, warnings being errors."""
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)


def test_every_module_imports_with_torch_and_numpy_alone_and_asks_for_no_extra():
    """In a fresh interpreter in which no extra can be found, nor Triton, which comes with torch on some machines.

    Import time and memory are for what is used.
    """
    result = run_python(BLOCKED_IMPORT.format(extras=EXTRAS, modules=modules_of_the_base_installation()))
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.split()) <= {"triton"}
