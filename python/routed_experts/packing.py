"""An optional copy of experts in the layout that a CPU reads fastest.

`fused` on CPU reads weights where and how they lie. Rows of (E, N, K) are read at the speed of memory as they are, so
there is nothing to pack; transposed ones (E, K, N) are not: their columns are turned or summed in place at every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from routed_experts.weights import ExpertWeights

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_KEPT = (
    "activation",
    "gate",
    "swiglu_limit",
    "swiglu_alpha",
    "has_gate",
    "is_concatenated",
    "post_expert_norm",
    "quantization",
    "num_experts",
)


def packed_bytes(experts: ExpertWeights) -> int:
    """Return the bytes that :func:`pack_experts` allocates, beside those of ``experts``; 0 where it copies nothing."""
    return sum(tensor.nbytes for tensor in _turned(experts.bind()).values())


def pack_experts(experts: ExpertWeights) -> ExpertWeights:
    """Return the same experts with (E, N, K) weights: a copy of transposed ones, else ``experts`` itself.

    Values and scales are moved and not changed; biases, gates and norms are shared. The copy
    has no gradient, does not follow later changes of the weights (those of a live module included), and takes
    :func:`packed_bytes` of memory as long as it lives; the original is not freed.
    """
    bound = experts.bind()
    turned = {name: _contiguous(tensor.detach().mT) for name, tensor in _turned(bound).items()}
    if not turned:
        return experts
    kept: dict[str, Any] = {name: getattr(bound, name) for name in _KEPT}
    tensors: dict[str, Any] = {**bound._tensors, **turned}
    packed = ExpertWeights(**tensors, **kept, is_transposed=False)
    packed.__dict__["shard"] = bound.shard
    return packed


def _turned(experts: ExpertWeights) -> dict[str, Tensor]:
    """Return what changes: weights, and scales of blocks; that of a whole matrix has no axes."""
    if not experts.is_transposed:
        return {}
    scheme = experts.quantization
    names = list(_PROJECTIONS)
    if scheme is not None and scheme.block is not None:
        names += [f"{name}_scale_inv" for name in _PROJECTIONS]
    return {name: tensor for name in names if (tensor := experts._tensors[name]) is not None}


def _contiguous(tensor: Tensor) -> Tensor:
    """Copy by bytes where numbers have 8 bits, which not every version of torch copies."""
    if tensor.element_size() > 1:
        return tensor.contiguous()
    return tensor.view(torch.uint8).contiguous().view(tensor.dtype)
