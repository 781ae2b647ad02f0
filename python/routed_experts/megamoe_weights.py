"""The one-time reshape of a rank's FP4 weights for Mega MoE.

Gate and up rows are interleaved in groups of 8 and scales permuted, in the memory of the stored weights: a second copy
of all experts is what nobody has room for. From then on the weights belong to that backend (reshaped.py).
"""

from __future__ import annotations

import threading
from typing import Any, TypeAlias

import torch
from torch import Tensor

from routed_experts.backends.registry import REGISTRY
from routed_experts.reshaped import mark_reshaped, notes_of
from routed_experts.weights import ExpertWeights

Operand: TypeAlias = tuple[Tensor, Tensor]

_LOCK = threading.Lock()
_SCALES = "scales for Mega MoE"
_GROUP = 32


def transformed(kernel: Any, experts: ExpertWeights) -> tuple[Operand, Operand]:
    """Return (weights, scales) of both products as the kernel takes them; reshapes the stored weights once."""
    up, down = experts.up_weight, experts.down_weight
    with _LOCK:
        notes, key = notes_of(down), (_SCALES, down.data_ptr())
        kept = notes.get(key)
        if kept is None:
            kept = notes[key] = _transform(kernel, experts)
            for weight in (up, down):
                mark_reshaped(weight, "deepgemm_megamoe")
            # Choices that were made for these weights before hold for nobody else now.
            REGISTRY.renew()
    return (up.detach(), kept[0]), (down.detach(), kept[1])


@torch.no_grad()
def _transform(kernel: Any, experts: ExpertWeights) -> tuple[Tensor, Tensor]:
    hidden, inner, count = experts.hidden_size, experts.intermediate_size, experts.num_experts
    up, down = experts.up_weight.detach(), experts.down_weight.detach()
    widths = ((experts.up_scale, 2 * inner, hidden), (experts.down_scale, hidden, inner))
    scales = [
        kernel.lay_out_scales(scale.float(), rows, columns, recipe=(1, _GROUP), num_groups=count)
        for scale, rows, columns in widths
    ]
    (new_up, up_sf), (new_down, down_sf) = kernel.transform_weights((up, scales[0]), (down, scales[1]))
    for old, new in ((up, new_up), (down, new_down)):
        if new.data_ptr() != old.data_ptr():
            old.copy_(new)
    return up_sf, down_sf
