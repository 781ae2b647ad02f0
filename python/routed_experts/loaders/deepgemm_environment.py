"""What DeepGEMM finds around it while it is loaded: the toolkit that was checked, and a folder it can write to."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from routed_experts.toolkit import Toolkit, find_toolkit, own_search

if TYPE_CHECKING:
    from routed_experts.loaders.bundles import Kernel

logger = logging.getLogger("routed_experts")

CACHE = "DG_JIT_CACHE_DIR"
_FAMILY = "deep_gemm"


def prepare(kernel: Kernel) -> None:
    """Settle what DeepGEMM reads from the environment; other kernels read nothing of it.

    CUDA_HOME stays set where its own search would find another toolkit: builds differ in whether they read it when
    they are imported or at their first compilation.
    """
    if kernel.package != _FAMILY:
        return
    toolkit = find_toolkit()
    settle_cache()
    home = handed_over(toolkit)
    if home is not None:
        logger.info("deepgemm: CUDA_HOME=%s is handed over; its own search takes %s", home, own_search() or "none")
        os.environ["CUDA_HOME"] = home


def handed_over(toolkit: Toolkit) -> str | None:
    """Return the toolkit's folder where DeepGEMM's own search ends elsewhere, else None."""
    if toolkit.root is None or toolkit.nvcc is None:
        return None
    own = own_search()
    same = own is not None and os.path.realpath(own) == os.path.realpath(toolkit.root)
    return None if same else toolkit.root


def settle_cache() -> str:
    """Return the folder of compiled kernels; one that cannot be written gives way to a temporary one, with a warning.

    The compiler is started by a shell inside that folder, so a path with a space is no use either.
    """
    named = os.environ.get(CACHE)
    home = os.environ.get("HOME")
    folder = named or (os.path.join(home, ".deep_gemm") if home else None)
    reason = "HOME is not set" if folder is None else _unusable(folder)
    if folder is not None and reason is None:
        return folder
    fresh = tempfile.mkdtemp(prefix="deep_gemm_")
    os.environ[CACHE] = fresh
    warnings.warn(
        f"routed-experts: DeepGEMM cannot keep its compiled kernels ({reason}); they go to {fresh} and are compiled "
        f"again in the next process. Set {CACHE} to a folder that can be written.",
        RuntimeWarning,
        stacklevel=2,
    )
    return fresh


def _unusable(folder: str) -> str | None:
    if any(letter.isspace() for letter in folder):
        return f"{folder!r} holds a space"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # Permissions alone do not tell: the system may be mounted read-only, and root may write anywhere.
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder}: {error.strerror or error}"


def check_tools(kernel: Kernel, module: Any) -> None:
    """Warn where an old or unknown build would fail late: they read symbols with cuobjdump, newer ones do not."""
    toolkit = find_toolkit()
    if kernel.package != _FAMILY or toolkit.nvcc is None or toolkit.helpers.get("cuobjdump"):
        return
    version = str(getattr(module, "__version__", ""))
    numbers = [int(part) for part in version.split(".")[:2] if part.isdecimal()]
    if numbers < [2, 8]:
        logger.warning(
            "deepgemm: no cuobjdump beside %s; build %s may need it and then fail at its first compilation",
            toolkit.nvcc,
            version or "of unknown version",
        )
