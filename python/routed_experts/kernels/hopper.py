"""Which calls the Gluon kernels of kernels/e4m3_hopper.py take, and with what tiles."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect

import torch
from torch import Tensor

from routed_experts.kernels.configs import Config
from routed_experts.kernels.product import IS_INTERPRETED
from routed_experts.quantization.stacks import stack_of
from routed_experts.weights import ExpertWeights

_GLUON = "triton.experimental.gluon"
CAPABILITY = (9, 0)
SIDE = 128
# Two groups of 64 rows; columns of gated units, and of the result; four steps in flight.
UP, DOWN = Config(2 * 64, SIDE, SIDE, 4, 4), Config(2 * 64, 2 * SIDE, SIDE, 4, 4)
_SHARED_BYTES = 213_064
# Measured from 128 rows an expert on; kernels/e4m3.py was left at fewer.
_MEAN_ROWS = 128.0


def suits(experts: ExpertWeights, mean_rows: float, capability: tuple[int, int], shared_bytes: int) -> bool:
    """Whether a call whose rows may be quantized has the sizes and the layout that these kernels are for.

    Args:
        experts: FP8 weights.
        mean_rows: rows an expert.
        capability: of the device.
        shared_bytes: that a block may have there.
    """
    if capability != CAPABILITY or shared_bytes < _SHARED_BYTES or mean_rows < _MEAN_ROWS:
        return False
    is_gated = experts.has_gate and experts.is_concatenated
    biases = (experts.up_bias, experts.down_proj_bias)
    sizes = (experts.hidden_size, experts.intermediate_size)
    if not is_gated or any(bias is not None for bias in biases) or any(size % SIDE for size in sizes):
        return False
    stacks = (stack_of(experts, True), stack_of(experts, False))
    scaled = all(one.scale.dtype == torch.float32 and tuple(one.block) == (SIDE, SIDE) for one in stacks)
    return scaled and all(_is_one_matrix(one.weight) for one in stacks) and has_gluon()


def _is_one_matrix(weight: Tensor) -> bool:
    """Whether the rows of all experts follow one another without gaps, from an address that TMA can read."""
    return weight.is_contiguous() and weight.data_ptr() % 16 == 0


@functools.cache
def has_gluon() -> bool:
    """Whether Triton has what the kernels are written in (3.6 and newer), and is not its interpreter."""
    if IS_INTERPRETED or not _is_there(f"{_GLUON}.language.nvidia.hopper"):
        return False
    language = importlib.import_module(f"{_GLUON}.language")
    hopper = importlib.import_module(f"{_GLUON}.language.nvidia.hopper")
    has_names = all(hasattr(hopper, name) for name in ("mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"))
    specialize = getattr(language, "warp_specialize", None)
    is_known = specialize is not None and "functions_and_args" in inspect.signature(specialize).parameters
    return has_names and is_known and _is_there(f"{_GLUON}.nvidia.hopper")


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # one of the packages around it is not
        return False
