"""What the tests of ``fused`` on a CUDA device share: one call, on poisoned memory, against the oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from cases import BASE_CASE as BASE
from cases import build
from oracle import TOLERANCE, experts_oracle, relative_error

import routed_experts as rx

BACKEND, DEVICE = "fused", "cuda"
NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def to_device(tensor, device=DEVICE):
    """The same values at the same strides and storage offset, zero strides and odd offsets included."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    return storage.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def poison():
    """Leave memory behind on the device that reads NaN in every floating dtype and -1 in every signed one."""
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    held = [torch.full((2**power,), 255, dtype=torch.uint8, device=DEVICE) for power in range(9, 25) for _ in range(3)]
    del held


def on_device(tensors, flags, device=DEVICE):
    return rx.ExpertWeights(**{name: to_device(t, device) for name, t in tensors.items()}, **flags)


def compare(x, index, weights, tensors, flags, *, oracle_flags=None, weights_on="output", **how):
    """Run a call given as CPU tensors on the device, compare it with the oracle, and return the result."""
    experts = on_device(tensors, flags)
    inputs = [to_device(t) for t in (x, index, weights)]
    before = inputs[1].clone()
    poison()
    out = rx.run_experts(*inputs, experts, backend=BACKEND, weights_on=weights_on, **how)
    assert (out.dtype, out.shape, out.device.type) == (x.dtype, x.shape, DEVICE)
    assert out.is_contiguous()
    assert torch.equal(inputs[1], before)
    flags = flags if oracle_flags is None else oracle_flags
    wanted = experts_oracle(x, index, weights, tensors, flags, weights_on=weights_on)
    assert relative_error(out.cpu(), wanted) <= TOLERANCE[tensors["down_proj"].dtype]
    return out


def check(case=BASE, seed=0, **changes):
    """Compare a case of the grid, forward."""
    case = dataclasses.replace(case, **changes)
    return compare(*build(case, seed), weights_on=case.weights_on)


def built(seed=0, **changes):
    """Return (x, index, weights, tensors, flags) of a case, on the CPU."""
    return build(dataclasses.replace(BASE, **changes), seed)


def run(inputs, experts, **how):
    return rx.run_experts(*inputs, experts, backend=BACKEND, **how)


def assert_right(out, inputs, tensors, flags):
    wanted = experts_oracle(*inputs, tensors, flags)
    assert relative_error(out.cpu(), wanted) <= TOLERANCE[out.dtype]
