"""What is remembered beside the memory of a weight, for as long as that memory lives.

A tensor that is the same memory in other words (a view, ``.data``, another dtype) finds the same notes. One note says
that a backend has reshaped the weight in place for itself: what it holds is then no matrix for anybody else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from routed_experts.errors import SwitchError

_ATTRIBUTE = "_routed_experts_notes"
_OWNER = "reshaped by"


def notes_of(weight: Tensor) -> dict[Any, Any]:
    """Return the notes on a tensor's memory, to be read and written."""
    storage: Any = weight.untyped_storage()
    notes: dict[Any, Any] | None = getattr(storage, _ATTRIBUTE, None)
    if notes is None:
        notes = {}
        setattr(storage, _ATTRIBUTE, notes)
    return notes


def reshaped_by(weight: Tensor) -> str | None:
    """Return the backend that has reshaped a weight, or None. Cheap: asked at every choice of a backend."""
    if torch.compiler.is_compiling():
        return None  # such a backend is never traced
    try:
        notes = getattr(weight.untyped_storage(), _ATTRIBUTE, None)
    except (NotImplementedError, RuntimeError):
        return None  # what has no memory of its own
    owner: str | None = notes.get(_OWNER) if notes else None
    return owner


def mark_reshaped(weight: Tensor, backend: str) -> None:
    """Say that only ``backend`` can read this weight from now on."""
    notes_of(weight)[_OWNER] = backend


def check_unshaped(weights: Iterable[Tensor | None]) -> None:
    """Refuse to save weights that a backend has reshaped.

    Raises:
        SwitchError: one of them was.
    """
    owners = sorted({owner for weight in weights if weight is not None and (owner := reshaped_by(weight))})
    if owners:
        raise SwitchError(
            "these experts cannot be saved any more",
            found=f"weights that {owners[0]} has reshaped",
            needed="weights as they were loaded",
            hint="load the experts again, on another backend, to save them",
        )
