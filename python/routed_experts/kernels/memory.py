"""Scratch memory of one call: one allocation, cut into typed pieces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ALIGNMENT = 256  # bytes, as the allocator's own


class Piece(NamedTuple):
    """A tensor inside the allocation."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * self.dtype.itemsize


def places(pieces: Sequence[Piece]) -> tuple[list[int], int]:
    """Byte offsets of the pieces, and the bytes of them all."""
    offsets, end = [], 0
    for piece in pieces:
        offsets.append(end)
        end += -(-piece.bytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


def cut(whole: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """The pieces as tensors over ``whole``, uint8."""
    offsets, _ = places(pieces)
    return [
        whole[offset : offset + piece.bytes].view(piece.dtype).view(piece.shape)
        for offset, piece in zip(offsets, pieces, strict=True)
    ]
