"""The hub, through the `kernels` package: whatever its version, as long as it has ``get_kernel``."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from routed_experts.errors import BackendUnavailable
from routed_experts.loaders.bundles import Kernel

REVISIONS = "ROUTED_EXPERTS_KERNEL_REVISIONS"
USE_HUB = "USE_HUB_KERNELS"
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_OFF = ("0", "false", "no", "off")


def hub_source(kernel: Kernel) -> tuple[str, bool, Callable[[], Any]]:
    """Return words, whether no network is needed, and what opens the kernel.

    Raises:
        BackendUnavailable: the hub is switched off, or offline without a copy of the kernel in its cache.
    """
    revision = pinned_revision(kernel)
    where = f"{kernel.repository} at {revision or f'version {kernel.version}'}"
    if os.environ.get(USE_HUB, "").strip().lower() in _OFF:
        raise _blocked(kernel, f"{USE_HUB}={os.environ[USE_HUB]}", f"unset {USE_HUB}")
    offline = is_offline()
    if offline and not _is_cached(kernel, revision):
        hint = f"kernels.install_kernel({kernel.repository!r}, ...) where there is a network fills the cache"
        raise _blocked(kernel, f"{offline}, and {where} is not in the cache", hint)
    return f"{where} on the hub", bool(offline), lambda: _fetch(kernel, revision)


def pinned_revision(kernel: Kernel) -> str | None:
    """Return the revision that the user, or else the kernel, insists on; None where a version is enough.

    Raises:
        BackendUnavailable: the variable of revisions cannot be read.
    """
    text = os.environ.get(REVISIONS, "").strip()
    pins = dict(entry.partition("=")[::2] for entry in text.split(",")) if text else {}
    pins = {name.strip(): revision.strip() for name, revision in pins.items()}
    if not all(name and revision for name, revision in pins.items()):
        raise BackendUnavailable(
            f"{REVISIONS} cannot be read",
            found=repr(text),
            needed="OWNER/NAME=REVISION, with commas between entries",
            hint=f'export {REVISIONS}="{kernel.repository}=COMMIT"',
        )
    return pins.get(kernel.repository, kernel.revision)


def is_offline() -> str:
    """Return the variable that forbids the network, as it is set; "" if none does."""
    for name in OFFLINE:
        value = os.environ.get(name, "").strip()
        if value and value.lower() not in _OFF:
            return f"{name}={value}"
    return ""


def open_local(path: Path) -> Any:
    """Return the variant of a repository's copy that suits this machine."""
    return importlib.import_module("kernels").get_local_kernel(path)


def _fetch(kernel: Kernel, revision: str | None) -> Any:
    get_kernel = importlib.import_module("kernels").get_kernel
    takes = inspect.signature(get_kernel).parameters
    any_name = any(one.kind is one.VAR_KEYWORD for one in takes.values())
    wanted: dict[str, Any] = {"revision": revision} if revision else {"version": kernel.version}
    # Metadata may list "9.0a", which refuses every other device; the architecture was checked before.
    wanted["check_arch"] = False
    if not any_name and "version" in wanted and "version" not in takes:
        wanted["revision"] = f"v{wanted.pop('version')}"  # the branch that a version stands for
    return get_kernel(kernel.repository, **{name: v for name, v in wanted.items() if any_name or name in takes})


def _is_cached(kernel: Kernel, revision: str | None) -> bool:
    """Whether the hub's cache holds a copy of the kernel, of that commit or branch where one is asked for."""
    folder = f"--{kernel.repository.replace('/', '--')}"
    for cache in _caches():
        for copy in cache.glob(f"*{folder}"):
            held = {one.name for one in (copy / "snapshots").glob("*")}
            named = revision or f"v{kernel.version}"
            if (copy / "refs" / named).is_file():
                held.add(named)
            if named in held:
                return True
    return False


def _caches() -> list[Path]:
    get = os.environ.get
    home = Path(get("HF_HOME") or Path(get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface")
    named = (get("KERNELS_CACHE"), get("HF_KERNELS_CACHE"), get("HF_HUB_CACHE"), get("HUGGINGFACE_HUB_CACHE"))
    return [Path(one).expanduser() for one in named if one] + [home.expanduser() / "hub"]


def _blocked(kernel: Kernel, found: str, hint: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"the kernel {kernel.name} cannot be fetched",
        found=found,
        needed=f"the hub, or another source of the kernel {kernel.name}",
        hint=f"{hint}; or name a local copy: LOCAL_KERNELS={kernel.repository}=PATH",
    )
