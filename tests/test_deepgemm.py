"""The deepgemm backend over a faithful stand-in: every argument of every product, and the values."""

from __future__ import annotations

import pytest
import torch
from external_experts import INNER, E, H, error_of, plain, quantized, routed
from external_fakes import FakeDeepGemm

import routed_experts as rx
from routed_experts import deepgemm_operands, external_calls, padded_steps
from routed_experts.backends import deepgemm


@pytest.fixture(params=[9, 10], ids=["SM90", "SM100"])
def kernel(request, monkeypatch, tmp_path):
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(deepgemm, "capability_major", lambda device: request.param)
    fake = FakeDeepGemm(request.param)
    rx.register_kernel("deepgemm", fake)
    yield fake
    rx.reset_kernels()


def eager(experts, x, ids, weights):
    return rx.run_experts(x, ids, weights, experts, backend="eager", expert_parallel=True, allow_cast=True)


FLAGS = [
    {},
    {"is_transposed": True},
    {"is_concatenated": False},
    {"bias": True},
    {"gated": False, "activation": "relu2"},
    {"gated": False, "activation": "gelu", "bias": True},
    {"swiglu_limit": 0.75, "swiglu_alpha": 1.702, "bias": True, "is_concatenated": False, "is_transposed": True},
    {"gate": lambda u: torch.tanh(u[..., :INNER]) * u[..., INNER:], "bias": True},
    {"activation": lambda g: g.abs()},
]


@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
def test_bf16_equals_eager(kernel, poisoned, flags, tokens):
    experts, call = plain(**flags), routed(tokens, sentinels=tokens > 1)
    wanted = eager(experts, *call)
    poisoned()
    got = deepgemm.run(experts, *call)
    assert got.shape == wanted.shape
    assert got.dtype == torch.bfloat16
    assert error_of(got, wanted) < 1e-2
    assert len(kernel.calls) == 2


@pytest.mark.parametrize("alignment", [64, 128, 256])
def test_rows_are_laid_out_by_the_loaded_kernel_s_own_alignment(kernel, alignment):
    kernel.alignment = alignment
    call = routed(40)
    assert error_of(deepgemm.run(plain(), *call), eager(plain(), *call)) < 1e-2
    assert kernel.calls[0][0].shape[0] == 120 + E * (alignment - 1)


def test_rows_nobody_owns_are_exactly_zero(kernel, poisoned):
    x, ids, weights = routed(6)
    ids[2], ids[4] = -1, E
    weights[2] = float("nan")
    poisoned()
    got = deepgemm.run(plain(), x, ids, weights)
    assert (got[[2, 4]] == 0).all()
    assert got[[0, 1, 3, 5]].isfinite().all()
    assert (deepgemm.run(plain(), x, torch.full_like(ids, -1), weights) == 0).all()


def test_strided_inputs_and_other_ids(kernel):
    x, ids, weights = routed(9)
    wanted = deepgemm.run(plain(), x, ids, weights)
    wide = torch.stack([x, x], 1).transpose(0, 1)[1]
    for dtype in (torch.uint8, torch.int16, torch.int32):
        got = deepgemm.run(plain(), wide, ids.t().contiguous().t().to(dtype), weights.t().contiguous().t())
        assert torch.equal(got, wanted)


def test_equal_calls_give_equal_bits(kernel):
    call = routed(33, sentinels=True)
    assert torch.equal(deepgemm.run(plain(), *call), deepgemm.run(plain(), *call))


@pytest.mark.parametrize("which", ["x", "weights", "experts"])
def test_a_gradient_is_refused_before_anything_runs(kernel, which):
    experts, (x, ids, weights) = plain(), routed(4)
    {"x": x, "weights": weights, "experts": experts.down_proj}[which].requires_grad_()
    with pytest.raises(rx.GradientUnsupported) as caught:
        deepgemm.run(experts, x, ids, weights)
    assert isinstance(caught.value, NotImplementedError)
    assert kernel.calls == []
    with torch.no_grad():
        deepgemm.run(experts, x, ids, weights)


def test_a_gradient_is_refused_by_selection_too():
    x, ids, weights = routed(4)
    with pytest.raises(rx.GradientUnsupported):
        rx.run_experts(x.requires_grad_(), ids, weights, plain(), backend="deepgemm")


SCHEMES = [
    (9, "fp8_block", (128, 128), False),
    (9, "fp8_block", (128, 128), True),
    (10, "fp8_block", (128, 128), True),
    (10, "fp8_block", (1, 128), True),
    (10, "mxfp4", (1, 32), True),
]


@pytest.mark.parametrize(("major", "fmt", "block", "ue8m0"), SCHEMES, ids=str)
def test_quantized_experts(monkeypatch, tmp_path, poisoned, major, fmt, block, ue8m0):
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(deepgemm, "capability_major", lambda device: major)
    fake = FakeDeepGemm(major)
    rx.register_kernel("deepgemm", fake)
    (experts, reference), call = quantized(fmt, block, ue8m0), routed(50, sentinels=True)
    wanted = eager(reference, *call)
    poisoned()
    got = deepgemm.run(experts, *call)
    assert got.dtype == torch.bfloat16
    # e4m3 activations, twice.
    assert error_of(got, wanted) < 5e-2
    assert fake.calls[0][0].dtype == torch.float8_e4m3fn
    # No copy of the weights.
    assert fake.calls[0][1].data_ptr() == experts.up_weight.data_ptr()
    rx.reset_kernels()


def test_dequantized_experts_run_in_bf16(kernel):
    stored, reference = quantized("fp8_block", (128, 128), False)
    tensors = {
        name: rx.quantization.dequantize(
            getattr(stored, name), getattr(stored, f"{name}_scale_inv"), block=(128, 128), dtype=torch.bfloat16
        )
        for name in ("gate_up_proj", "down_proj")
    }
    experts, call = rx.ExpertWeights(**tensors), routed(20)
    assert error_of(deepgemm.run(experts, *call), eager(reference, *call)) < 1e-2
    assert kernel.calls[0][1].dtype == torch.bfloat16


def test_packed_scales_are_kept_until_they_are_written_to():
    scale = quantized("fp8_block", (128, 128), True)[0].up_scale
    scheme = deepgemm_operands.Scheme(padded_steps.Cast(128, True), (1, 1, 128), True)
    weight = torch.empty(E, 2 * INNER, H, dtype=torch.float8_e4m3fn)
    first = deepgemm_operands.weight_operand(weight, scale, scheme)[1]
    assert deepgemm_operands.weight_operand(weight, scale, scheme)[1] is first
    same = scale.view(torch.uint8).view(scale.dtype)
    assert deepgemm_operands.weight_operand(weight, same, scheme)[1] is first
    scale.view(torch.uint8).add_(1)
    again = deepgemm_operands.weight_operand(weight, scale, scheme)[1]
    assert not torch.equal(again, first)


def test_scales_are_packed_lowest_byte_first_and_filled_up_with_ones():
    scale = torch.exp2(torch.tensor([[1.0, -2, 3, 0, 5]]))
    packed = padded_steps.pack_exponents(scale)
    assert packed.view(torch.uint8).tolist() == [[128, 125, 130, 127, 132, 127, 127, 127]]


def test_rows_are_cast_as_deepgemm_casts_them():
    x = torch.randn(6, 256) * torch.tensor([[1e-6], [0.0], [1.0], [1e3], [1e-2], [7.0]])
    values, scale = padded_steps.cast_rows(x, padded_steps.Cast(128, False))
    assert torch.equal(scale, x.view(6, 2, 128).abs().amax(-1).clamp(min=1e-4) / 448)
    parts = (x.view(6, 2, 128) / scale[..., None]).view(6, 256)
    assert torch.equal(values.float(), parts.to(torch.float8_e4m3fn).float())
    _, rounded = padded_steps.cast_rows(x, padded_steps.Cast(32, True))
    assert torch.equal(rounded, torch.exp2(torch.log2(rounded).round()))
    exact = x.view(6, 8, 32).abs().amax(-1).clamp(min=1e-4) / 448
    assert ((rounded >= exact) & (rounded < 2 * exact)).all()


def test_one_device_in_a_process(monkeypatch):
    monkeypatch.setattr(external_calls, "_BOUND", {})
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    external_calls.bind_device("deepgemm", torch.device("cpu"))
    external_calls.bind_device("deepgemm", first)
    external_calls.bind_device("deepgemm", first)
    with pytest.raises(rx.DeviceError) as caught:
        external_calls.bind_device("deepgemm", second)
    assert isinstance(caught.value, RuntimeError)
    assert "cuda:1, after cuda:0" in caught.value.found


def test_a_kernel_that_raises_is_heard(kernel, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("exit_code == 0")

    monkeypatch.setattr(kernel, "m_grouped_bf16_gemm_nt_contiguous", broken)
    rx.register_kernel("deepgemm", kernel)
    with pytest.raises(RuntimeError, match="exit_code == 0"):
        deepgemm.run(plain(), *routed(4))
