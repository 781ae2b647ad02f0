"""`fused`: our own kernels, Triton on CUDA and Rust on CPU (fused_cpu.py).

On CUDA there are two launches for few pairs: every first pair of an expert leads its rows through the first product
and the gate, then through the second; the last program of a column block weighs and sums. Above, ids are sorted on the
device and cut into tiles, and the weighted sum is a launch of its own. A gate or norm of one's own stands between the
launches as it is. Quantized weights are read as they are stored; kernels/quantized_product.py and e4m3.py say how.
Where a gradient is wanted ids are always sorted, and the first product is kept: see
kernels/training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from routed_experts import fused_cpu
from routed_experts.backends.own_kernels import OWN_KERNELS
from routed_experts.backends.spec import Backend, Cost, Requirement, Spec
from routed_experts.combine import wants_grad
from routed_experts.fused_autograd import differentiable
from routed_experts.fused_operators import traced
from routed_experts.mlp import expert_mlp

if TYPE_CHECKING:
    from routed_experts.weights import ExpertWeights

# Gates, norms and layouts of every kind are run, fused or as a step of their own; so little is asked.
_FP8 = ("fp8_block", "mxfp8", "fp8_tensor")
_FLOATS = {"kind": "dtype", "any_of": ["float32", "bfloat16", "float16"]}
_ANYWHERE = (
    _FLOATS,
    {"kind": "dynamic_activation_scales"},
)


def run(experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Run the experts of every token and sum over slots: (T, H) in the dtype of x."""
    training = wants_grad(x_TH, weights_TK, *experts._tensors.values())
    # Gradients go through quantized weights one product at a time.
    in_one = _in_one(experts) and not (training and experts.quantization is not None)
    if torch.compiler.is_compiling():
        return traced(experts, x_TH, index_TK, weights_TK, in_one=in_one, training=training)
    if in_one and training:
        return differentiable("whole", experts, x_TH, index_TK, weights_TK)
    # Triton is an optional package and takes a second to import.
    if in_one:
        from routed_experts.kernels.fused import run_fused

        return run_fused(experts, x_TH, index_TK, weights_TK)
    return _in_steps(experts, x_TH, index_TK, weights_TK)


def _repeated(experts: ExpertWeights) -> Callable[..., Tensor] | None:
    """Return what runs calls that are like one before but for addresses and strides, and want no gradient."""
    if not _in_one(experts):
        return None
    from routed_experts.kernels.fused import Repeated

    return Repeated()


run.repeated = _repeated  # type: ignore[attr-defined]
# The tiles of these kernels can be measured: see tuning/tiles.py.
run.has_tiles = True  # type: ignore[attr-defined]


def _in_one(experts: ExpertWeights) -> bool:
    """Whether the gate is one of ours and nothing stands behind the second product."""
    return experts.gate is None and experts.activation_name is not None and experts.post_expert_norm is None


def _in_steps(experts: ExpertWeights, x_TH: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
    slots_SH = expert_mlp(
        experts,
        x_TH,
        lambda x: differentiable("up", experts, x, index_TK),
        lambda a: differentiable("down", experts, a, index_TK),
    )
    return differentiable("weigh", experts, slots_SH, index_TK, weights_TK)


def _on_cuda(path: str, flops_per_us: float, *requires: Requirement) -> Spec:
    return Spec(
        name="fused",
        path=path,
        devices=("cuda",),
        requires=(*_ANYWHERE, *requires, *OWN_KERNELS),
        cost={"cuda": Cost(call_us=20, captured_us=8, bytes_per_us=4.1e6, flops_per_us=flops_per_us)},
    )


def _on_cpu(path: str, bytes_per_us: float, flops_per_us: float, *requires: Requirement) -> Spec:
    cost = Cost(call_us=40, expert_us=2, bytes_per_us=bytes_per_us, flops_per_us=flops_per_us)
    return Spec(name="fused", path=path, devices=("cpu",), requires=(_FLOATS, *requires), cost={"cpu": cost})


BACKEND = Backend(
    rows=(
        (_on_cuda("triton", 6.2e8, {"kind": "unquantized"}), run),
        (_on_cuda("triton_fp8", 5.1e8, {"kind": "quantization", "any_of": list(_FP8)}), run),
        # Many rows of FP4 are multiplied as bfloat16.
        (_on_cuda("triton_fp4", 3.2e8, {"kind": "quantization", "any_of": ["mxfp4"]}), run),
        # Measured on two cores: dot products along columns keep up with torch's GEMM at any number of rows; sums over
        # the rows of transposed weights do to about 20 rows an expert.
        (_on_cpu("rust", 50e3, 2e5, {"kind": "unquantized"}, {"kind": "not_transposed"}), fused_cpu.run),
        (_on_cpu("rust_transposed", 50e3, 1.1e5, {"kind": "unquantized"}), fused_cpu.run),
        # Unfolding is done anew for every few rows; what is next best dequantizes every expert that is hit.
        (_on_cpu("rust_fp8", 30e3, 7e4, {"kind": "quantization", "any_of": list(_FP8)}), fused_cpu.run),
        (_on_cpu("rust_fp4", 25e3, 7e4, {"kind": "quantization", "any_of": ["mxfp4"]}), fused_cpu.run),
    )
)
