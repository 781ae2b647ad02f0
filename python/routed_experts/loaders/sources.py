"""Where a kernel comes from: handed over by the user, a local copy, an installed package, or the hub; in this order."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from routed_experts.errors import BackendUnavailable
from routed_experts.loaders import hub
from routed_experts.loaders.bundles import Kernel

LOCAL = "LOCAL_KERNELS"
PREFER_INSTALLED = "ROUTED_EXPERTS_PREFER_INSTALLED"

#: Modules that users handed over, by the name of the kernel.
REGISTERED: dict[str, Any] = {}


class Source(NamedTuple):
    """One place that a kernel would be loaded from."""

    words: str
    is_local: bool  # no network is asked
    open: Callable[[], Any]


def find_source(kernel: Kernel) -> Source:
    """Return the first source that there is; nothing is imported or fetched.

    Raises:
        BackendUnavailable: there is none, or the variable of local copies cannot be read.
    """
    for name in (kernel.name, kernel.shares):
        if name in REGISTERED:
            return Source(f"a module registered as {name!r}", True, functools.partial(REGISTERED.__getitem__, name))
    if (path := _local_paths().get(kernel.repository)) is not None:
        return Source(f"{LOCAL}, {path}", True, lambda: _open_local(kernel, path))
    if is_on(PREFER_INSTALLED) and is_installed(kernel.package):
        words = f"the installed package {kernel.package}"
        return Source(words, True, lambda: importlib.import_module(kernel.package))
    return Source(*hub.hub_source(kernel))


def is_on(variable: str) -> bool:
    """Whether a switch in the environment is on."""
    return os.environ.get(variable, "").strip().lower() in ("1", "true", "yes", "on")


def is_installed(package: str) -> bool:
    """Whether a package can be imported, found out without importing it."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _local_paths() -> dict[str, Path]:
    text = os.environ.get(LOCAL, "").strip()
    entries = [entry.partition("=") for entry in text.split(":")] if text else []
    wrong = ["".join(entry) for entry in entries if not (entry[0].strip() and entry[2].strip())]
    if wrong:
        raise BackendUnavailable(
            f"{LOCAL} cannot be read",
            found=f"the entry {wrong[0]!r}",
            needed="OWNER/NAME=PATH, with colons between entries and none in a path",
            hint=f'export {LOCAL}="kernels-community/deep-gemm=/path/to/a/copy"',
        )
    return {name.strip(): Path(path.strip()) for name, _, path in entries}


def _open_local(kernel: Kernel, path: Path) -> Any:
    """A variant's folder is imported from where it is; of a repository the `kernels` package picks the variant."""
    short = kernel.repository.rpartition("/")[2].replace("-", "_")
    for folder in (path, path / short):
        if (folder / "__init__.py").is_file():
            return import_folder(short, folder)
    if not path.is_dir():
        raise BackendUnavailable(
            f"{LOCAL} names no folder",
            found=str(path),
            needed="a folder with __init__.py, or a repository with build/VARIANT folders",
            hint="kernels.install_kernel, or a copy of a build, makes one",
        )
    return hub.open_local(path)


def import_folder(name: str, folder: Path) -> ModuleType:
    """Import a package from where it lies, under a name that belongs to that folder."""
    unique = f"_routed_experts_{name}_{abs(hash(str(folder.resolve()))):x}"
    if (module := sys.modules.get(unique)) is not None:
        return module
    spec = importlib.util.spec_from_file_location(
        unique, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[unique] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[unique]
        raise
    return module
