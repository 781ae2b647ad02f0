"""The CUDA toolkit that kernels compiled on this machine would use, and the verdict on every candidate.

The search itself is Rust (``rust/core/src/toolkit.rs``); it asks neither torch nor the CUDA runtime, so it
starts no CUDA context.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from dataclasses import dataclass
from typing import Any

from routed_experts import _core

#: The variables that decide the search; a change of one of them makes a new search.
VARIABLES = ("CUDA_HOME", "CUDA_PATH", "PATH", "DG_JIT_NVCC_COMPILER")


@dataclass(frozen=True)
class Candidate:
    """One place that was looked at.

    ``source`` is a variable, ``nvcc on PATH`` or a fixed folder; ``path`` what it names, as written; ``root``
    the toolkit folder behind it. ``needed`` is None for an accepted candidate.
    """

    source: str
    path: str | None
    root: str | None
    accepted: bool
    found: str
    needed: str | None
    hint: str | None


@dataclass(frozen=True)
class Toolkit:
    """The toolkit in use, or with ``nvcc`` None the reasons why there is none.

    ``root`` without ``nvcc`` is a folder that is named or usual and holds no compiler: the search ends there.
    ``version`` is (major, minor) of ``nvcc``, None if unreadable; ``helpers`` maps each tool to its path, or
    to None if it is missing; ``include`` is the folder of the CUDA headers.
    """

    root: str | None
    nvcc: str | None
    version: tuple[int, int] | None
    helpers: dict[str, str | None]
    include: str | None
    candidates: tuple[Candidate, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, nested: the form in which the facts of a machine hold a toolkit."""
        return {
            **dataclasses.asdict(self),
            "candidates": [dataclasses.asdict(one) for one in self.candidates],
        }


def find_toolkit() -> Toolkit:
    """Return the toolkit that the environment variables of this moment lead to.

    Remembered for each value of those variables. An nvcc that is a wrapper is started and asked, for up to
    2 s.
    """
    return _search(tuple(os.environ.get(name) for name in VARIABLES))


def own_search() -> str | None:
    """Return the toolkit folder that DeepGEMM's own search takes: links are not followed, wrappers not asked."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(name):
            return folder
    if nvcc := shutil.which("nvcc"):
        return os.path.dirname(os.path.dirname(nvcc))
    return "/usr/local/cuda" if os.path.isdir("/usr/local/cuda") else None


def forget_toolkits() -> None:
    """Search anew at the next call, for instance after an installation."""
    _search.cache_clear()


@functools.lru_cache(maxsize=8)
def _search(environment: tuple[str | None, ...]) -> Toolkit:
    found = _core.find_toolkit()
    candidates = tuple(Candidate(**candidate) for candidate in found.pop("candidates"))
    return Toolkit(**found, candidates=candidates)
