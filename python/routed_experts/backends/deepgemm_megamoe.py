"""`deepgemm_megamoe`: experts and their exchange between ranks in one kernel, on FP4 weights.

Ids are global, the weights are this rank's share, and what comes back is weighted and summed over all ranks: nobody
adds anything up afterwards. Every rank makes every call, also one without tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from routed_experts.backends.spec import Backend, Spec
from routed_experts.errors import LayoutError, UnsupportedExperts, UnsupportedScheme
from routed_experts.external_calls import bind_device, refuse_gradient
from routed_experts.loaders import load_kernel
from routed_experts.megamoe_buffers import Sizes, buffer_for
from routed_experts.megamoe_weights import transformed
from routed_experts.weights import ExpertWeights

NAME = "deepgemm_megamoe"
_UNIT = 128

_MODULE = (
    {"kind": "gated"},
    {"kind": "not_transposed"},
    {"kind": "concatenated"},
    {"kind": "no_bias"},
    {"kind": "no_post_expert_norm"},
    {"kind": "no_own_gate"},
    {"kind": "activation", "any_of": ["silu"]},
    # A clamp is an argument of the kernel; a slope is not.
    {"kind": "no_swiglu_alpha"},
    {"kind": "no_gradient"},
    {"kind": "quantization", "any_of": ["mxfp4"]},
    {"kind": "process_group"},
    {"kind": "dtype", "any_of": ["bfloat16"]},
    {"kind": "scales", "any_of": [("mxfp4", "ue8m0")]},
    {"kind": "dynamic_activation_scales"},
    {"kind": "multiple_of", "n": _UNIT, "dims": ["hidden_size", "intermediate_size"]},
    {"kind": "experts_packed"},
    {"kind": "single_device"},
    {"kind": "not_compiling"},
)

_MACHINE = (
    {"kind": "kernel", "name": NAME, "package": "kernels", "installed": "deep_gemm"},
    {"kind": "torch", "min": "2.9"},
    {"kind": "capability_major", "any_of": [10]},
    {"kind": "toolkit"},
    {"kind": "nvcc"},
    {"kind": "toolkit_version", "rows": [{"major": 10, "min": "12.9"}]},
    {"kind": "kernel_loads", "name": NAME},
)


def run(
    experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, *, process_group: Any = None
) -> Tensor:
    """Run this rank's tokens through the experts of all ranks: (T, H) in the dtype of x.

    Args:
        experts: this rank's share, FP4; its stored weights are reshaped at the first call and stay so.
        x_TH: (T, H) bfloat16, with T of its own on every rank.
        index_TK: (T, K) global ids, 0..ranks*E-1; any other id skips its slot.
        weights_TK: (T, K) routing weights.
        process_group: the ranks, in the order of their shares.
    """
    refuse_gradient(NAME, x_TH, weights_TK, *experts.tensors())
    _check(experts, process_group)
    kernel = load_kernel(NAME)
    bind_device("deepgemm", x_TH.device)
    tokens, slots = index_TK.shape
    total = experts.num_experts * process_group.size()
    l1, l2 = transformed(kernel, experts)
    sizes = Sizes(experts.hidden_size, slots, total, experts.intermediate_size)
    buffer = buffer_for(kernel, process_group, sizes, tokens, x_TH.device)
    _fill(kernel, buffer, x_TH, index_TK, weights_TK, total)
    y_TH = torch.empty(tokens, experts.hidden_size, dtype=torch.bfloat16, device=x_TH.device)
    kernel.run(y_TH, l1, l2, buffer, activation_clamp=experts.swiglu_limit)
    return y_TH.to(x_TH.dtype)


run.load = partial(load_kernel, NAME)  # type: ignore[attr-defined]


def _fill(kernel: Any, buffer: Any, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor, total: int) -> None:
    """Write a call's tokens and routing to where the other ranks read them."""
    tokens = index_TK.shape[0]
    if tokens == 0:
        return
    values, scales = kernel.cast_to_fp8(x_TH.contiguous(), use_ue8m0=True, gran_k=32, use_packed_ue8m0=True)
    buffer.x[:tokens].copy_(values)
    buffer.x_sf[:tokens].copy_(scales)
    expert_TK = index_TK.long()
    real_TK = (expert_TK >= 0) & (expert_TK < total)
    buffer.topk_idx[:tokens].copy_(expert_TK.masked_fill(~real_TK, -1))
    buffer.topk_weights[:tokens].copy_(weights_TK.float().masked_fill(~real_TK, 0))


def _check(experts: ExpertWeights, process_group: Any) -> None:
    """Refuse, before anything is loaded, what selection has not seen of a call that came around it."""
    if experts.up_weight.dtype != torch.int8:
        raise UnsupportedScheme(
            f"{NAME} runs FP4 weights alone",
            found=f"weights of {experts.up_weight.dtype}",
            needed="mxfp4, stored as int8",
            hint='use backend="deepgemm" for FP8 or bfloat16 experts',
        )
    if process_group is None:
        raise UnsupportedExperts(
            f"{NAME} runs over a process group",
            found="no process group",
            needed="the ranks that hold the experts",
            hint="pass process_group=, or use rx.parallel",
        )
    sizes = {"hidden_size": experts.hidden_size, "intermediate_size": experts.intermediate_size}
    odd = {name: size for name, size in sizes.items() if size % _UNIT}
    if odd:
        raise LayoutError(
            f"{NAME} has no kernel for these sizes",
            found=", ".join(f"{name} {size}" for name, size in odd.items()),
            needed=f"multiples of {_UNIT}",
            hint='use backend="auto"',
        )


# Never chosen by auto: it replaces the stored weights, and every rank must call it.
BACKEND = Backend(
    rows=(
        (
            Spec(
                name=NAME,
                devices=("cuda",),
                requires=(*_MODULE, *_MACHINE),
                auto=False,
                load_time_only=True,
                takes_group=True,
            ),
            run,
        ),
    )
)
