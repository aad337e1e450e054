"""What `make wheel` adds to a wheel: the native programs, compiled here, and the name of this platform.

Other builds, editable ones among them, leave this out: their wheel is the same on every platform, and the programs are
compiled where it is installed.
"""

import importlib.util
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

NATIVE = Path("src/polysketch/ops/native")


class NativePrograms(BuildHookInterface):
    """Asked for by HATCH_BUILD_HOOK_ENABLE_CUSTOM=true."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory(prefix="polysketch-wheel-")
        native = Path(self.root) / NATIVE
        made = _compiler(native / "compiler.py").compile_for_wheel(native / "source", Path(self._folder.name))
        for path in made:
            path.chmod(0o644)
            build_data["force_include"][str(path)] = f"polysketch/ops/native/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform()}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            self._folder.cleanup()


def _platform() -> str:
    """This platform; on Linux with the version of the C library, for which and for later ones the programs are."""
    tags = list(platform_tags())
    return next((tag for tag in tags if tag.startswith(("manylinux", "musllinux"))), tags[0])


def _compiler(path: Path) -> ModuleType:
    """The module, without its package, which would ask for PyTorch."""
    specification = importlib.util.spec_from_file_location("compiler", path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
