"""Routing that a model made, read from a file, in place of a drawn one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from routed_experts.errors import LayoutError


class Recorded:
    """Expert ids (N, K) of N tokens in their order, and their weights if the file has them.

    The file is safetensors with ``top_k_index`` and perhaps ``top_k_weights``, or a NumPy ``.npy`` of ids alone.
    """

    def __init__(self, path: Path):
        self.path = path
        self.index, self.weights = _read(path)

    def __str__(self) -> str:
        return self.path.name

    def take(self, tokens: int, number: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
        """Return ids and weights of ``tokens`` tokens, another stretch for every ``number``; a short file repeats.

        Raises:
            LayoutError: the file has another K, or ids beyond ``experts``.
        """
        if self.index.shape[1] != top_k or int(self.index.max()) >= experts or int(self.index.min()) < 0:
            raise LayoutError(
                f"{self.path} was recorded on another layer",
                found=f"K={self.index.shape[1]}, ids from {int(self.index.min())} to {int(self.index.max())}",
                needed=f"K={top_k}, ids from 0 to {experts - 1}",
                hint="record the routing of this layer, or give its --shape",
            )
        rows = torch.arange(number * tokens, (number + 1) * tokens) % self.index.shape[0]
        return self.index[rows], self.weights[rows]


def _read(path: Path) -> tuple[Tensor, Tensor]:
    try:
        if path.suffix == ".npy":
            import numpy

            tensors = {"top_k_index": torch.from_numpy(numpy.load(path, allow_pickle=False))}
        else:
            from safetensors.torch import load_file

            tensors = load_file(path)
        index = tensors["top_k_index"].long()
        weights = tensors.get("top_k_weights", torch.full(index.shape, 1 / max(index.shape[-1], 1))).float()
        if index.ndim == 2 and index.numel() and weights.shape == index.shape:
            return index, weights
        found = f"top_k_index {tuple(index.shape)}, top_k_weights {tuple(weights.shape)}"
    except Exception as error:  # each format has its own errors, and all of them mean the same here
        found = f"{type(error).__name__}: {error}"
    raise LayoutError(
        f"cannot read a recorded routing from {path}",
        found=found,
        needed="safetensors with top_k_index (N, K) and perhaps top_k_weights (N, K), or a .npy of ids (N, K)",
        hint='safetensors.torch.save_file({"top_k_index": ids}, path) writes one',
    )
