"""What a fused call is run with, and what it refuses: precision, regimes, devices without a compiler, no memory."""

from __future__ import annotations

import pytest
import torch
from cases import BASE_CASE as BASE
from cases import build

import routed_experts as rx

pytest.importorskip("triton", reason="Triton is not installed")

from routed_experts.kernels import choice, fused

HOPPER = choice.Device((9, 0), 232448)
MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def switches():
    """Put torch's switches back as they were: the newer names last, which the older ones write too."""
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = MATMUL.fp32_precision = "none"


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        (lambda: None, "ieee"),
        (lambda: torch.set_float32_matmul_precision("high"), "tf32"),
        (lambda: setattr(MATMUL, "fp32_precision", "tf32"), "tf32"),
        (lambda: setattr(torch.backends, "fp32_precision", "tf32"), "tf32"),
    ],
    ids=["default", "older name", "newer name", "global"],
)
def test_float32_follows_every_switch_of_torch(setting, wanted, switches):
    """Torch refuses to read ``allow_tf32`` once the newer names were used."""
    setting()
    assert choice.float32_precision(torch.float32) == wanted
    assert choice.float32_precision(torch.bfloat16) == "ieee"


@pytest.mark.parametrize(("hidden", "inner"), [(8, 2**21), (2**22, 8)])
def test_more_column_blocks_than_an_axis_has_are_run_by_tile(hidden, inner):
    narrow, wide = (torch.empty(1, dtype=torch.bfloat16).expand(2, *s) for s in ((2 * inner, hidden), (hidden, inner)))
    experts = rx.ExpertWeights(gate_up_proj=narrow, down_proj=wide)
    sizes = choice.Sizes(1, 2, 2, hidden, inner)
    assert choice.choose(experts, sizes, torch.bfloat16, HOPPER).is_sorted
    assert not choice.choose(experts, sizes._replace(hidden=64, inner=64), torch.bfloat16, HOPPER).is_sorted


def test_no_compiler_is_an_error_with_a_way_out(monkeypatch):
    import triton

    class Driver:
        @property
        def utils(self):
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(triton.runtime, "driver", type("Config", (), {"active": Driver()})())
    with pytest.raises(rx.BackendUnavailable, match="Failed to find C compiler") as caught:
        fused.limits(torch.device("cuda", 99))
    assert "C compiler (gcc or clang)" in caught.value.needed
    assert "CC" in caught.value.hint


class Wrapper(torch.Tensor):
    """A tensor over another one, without memory of its own, as a DTensor is."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_without_memory_are_refused(place):
    """A kernel would read address 0, and take the process' CUDA context with it."""
    *inputs, tensors, flags = build(BASE)
    inputs[place] = Wrapper(inputs[place])
    with pytest.raises(rx.DtypeError, match=r"Wrapper of shape .* without an address"):
        fused.run_fused(rx.ExpertWeights(**tensors, **flags), *inputs)
