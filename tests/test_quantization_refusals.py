"""Quantized experts that are refused before anything is held, quantized or run, and who may run the others."""

from __future__ import annotations

import pytest
import torch
from quantized_cases import quantized, routed
from selection_helpers import machine

import routed_experts as rx
from routed_experts.quantization.checks import check_scale_values

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
CPU = rx.current_facts().replace(device="cpu", capability=None)


def stored(experts=4, hidden=256, inner=128, gate=True, **changes):
    """Keyword arguments of block FP8 experts."""
    name, width = ("gate_up_proj", 2 * inner) if gate else ("up_proj", inner)
    tensors = {
        name: torch.ones(experts, width, hidden).to(E4M3),
        "down_proj": torch.ones(experts, hidden, inner).to(E4M3),
        f"{name}_scale_inv": torch.ones(experts, -(-width // 128), -(-hidden // 128)),
        "down_proj_scale_inv": torch.ones(experts, -(-hidden // 128), -(-inner // 128)),
        "quantization": rx.Quantization("fp8_block"),
    }
    return {**tensors, **changes}


def test_what_the_refusals_start_from_is_accepted():
    assert rx.ExpertWeights(**stored()).quantization == rx.Quantization("fp8_block")
    assert rx.ExpertWeights(**stored(gate=False)).up_scale.shape == (4, 1, 2)


E255 = torch.full((4, 2, 2), 255, dtype=torch.uint8)
STATIC = rx.Quantization("fp8_block", activation_scheme="static")


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"gate_up_proj_scale_inv": torch.ones(4, 2, 3)}, ValueError, "gate_up_proj_scale_inv"),
        ({"down_proj_scale_inv": torch.ones(4, 1, 1)}, ValueError, "down_proj_scale_inv"),
        ({"down_proj_scale_inv": torch.ones(3, 2, 1)}, ValueError, "down_proj_scale_inv"),
        ({"down_proj_scale_inv": torch.ones(2, 1)}, ValueError, "down_proj_scale_inv"),
        ({"down_proj_scale_inv": None}, ValueError, "down_proj_scale_inv is missing"),
        ({"up_proj_scale_inv": torch.ones(4, 2, 2)}, ValueError, "up_proj_scale_inv is not wanted"),
        ({"gate_up_proj_activation_scale": torch.ones(4)}, ValueError, "gate_up_proj_activation_scale is not wanted"),
        ({"quantization": STATIC}, ValueError, "down_proj_activation_scale is missing"),
        ({"quantization": None, "down_proj_scale_inv": None}, ValueError, "without the scheme"),
        ({"quantization": {"fmt": "fp8_block"}}, TypeError, "Quantization"),
        ({"quantization": rx.Quantization("fp8_block", (64, 128))}, ValueError, "gate_up_proj_scale_inv"),
        ({"quantization": rx.Quantization("fp8_tensor")}, ValueError, r"\(4, 2, 1\)"),
        ({"quantization": rx.Quantization("mxfp4")}, NotImplementedError, "int8"),
        ({"quantization": rx.Quantization("fp8_block", scale_dtype=E8M0)}, TypeError, "float8_e8m0fnu"),
        ({"down_proj": torch.ones(4, 256, 128)}, NotImplementedError, "down_proj is not stored as fp8_block"),
        ({"down_proj": torch.ones(4, 256, 64).to(E4M3)}, ValueError, "does not fit the declared layout"),
        ({"is_concatenated": False}, ValueError, "interleaved"),
        ({"down_proj_scale_inv": torch.ones(4, 2, 1, device="meta")}, RuntimeError, "meta"),
        ({"gate_up_proj_bias": torch.ones(4, 256, dtype=torch.int32)}, TypeError, "gate_up_proj_bias"),
        ({"gate_up_proj_bias": torch.ones(4, 255)}, ValueError, "gate_up_proj_bias"),
        (
            {"gate_up_proj_scale_inv": E255, "quantization": rx.Quantization("fp8_block", scale_dtype=E8M0)}
            | {"down_proj_scale_inv": torch.full((4, 2, 1), 127, dtype=torch.uint8)},
            ValueError,
            "nan in expert 0, 1, 2, 3",
        ),
    ],
)
def test_refused(changes, error, words):
    with pytest.raises(error, match=words) as caught:
        rx.ExpertWeights(**stored(**changes))
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "down_proj_scale_inv"])
def test_scales_that_are_none_are_named_with_their_expert(name, value):  # B43
    given = stored()
    given[name][2, -1, -1] = value
    with pytest.raises(rx.UnsupportedScales, match=f"{name}(.|\n)*expert 2") as caught:
        rx.ExpertWeights(**given)
    assert isinstance(caught.value, ValueError)
    scales = {"gate_up_proj_activation_scale": torch.full((4,), value), "down_proj_activation_scale": torch.ones(4)}
    with pytest.raises(rx.UnsupportedScales, match=r"0, 1, 2, 3"):
        rx.ExpertWeights(**stored(**scales, quantization=STATIC))


def test_values_are_checked_once_and_never_at_a_call(monkeypatch):
    calls = []
    check = check_scale_values
    monkeypatch.setattr("routed_experts.weights.check_scale_values", lambda tensors: calls.append(check(tensors)))
    experts = rx.ExpertWeights(**stored(hidden=160, inner=96 + 32))
    x, index, weights = routed()
    for _ in range(3):
        rx.run_experts(x, index % 4, weights, experts)
        experts.with_tensors(experts._tensors)
    assert len(calls) == 1
    meta = {name: t.to("meta") if isinstance(t, torch.Tensor) else t for name, t in stored().items()}
    assert rx.ExpertWeights(**meta).device.type == "meta"


def test_blocks_never_straddle_gate_and_up():  # B39
    assert rx.ExpertWeights(**stored(inner=128))
    with pytest.raises(ValueError, match="intermediate size 192, blocks of 128 rows"):
        rx.ExpertWeights(**stored(inner=192))
    plain = rx.ExpertWeights(gate_up_proj=torch.randn(2, 384, 64), down_proj=torch.randn(2, 64, 192))
    with pytest.raises(ValueError, match="multiple of 128, or at most 128"):
        rx.quantize_experts(plain, "fp8_block")
    assert rx.quantize_experts(plain, "fp8_block", block=(64, 128)).up_scale.shape == (2, 6, 1)


@pytest.mark.parametrize("fmt", ["mxfp8", "mxfp4"])
def test_sizes_that_do_not_divide_by_32(fmt):  # B47
    for hidden, inner in ((64, 48), (48, 64)):
        plain = rx.ExpertWeights(
            gate_up_proj=torch.randn(2, 2 * inner, hidden), down_proj=torch.randn(2, hidden, inner)
        )
        with pytest.raises(ValueError, match=f"{fmt} groups 32 columns"):
            rx.quantize_experts(plain, fmt)


def test_quantize_experts_refuses():
    experts, plain, _ = quantized((("fp8_block", (32, 32), torch.float32), False, True, True, False))
    with pytest.raises(rx.UnsupportedScheme, match="already"):
        rx.quantize_experts(experts, "mxfp4")
    with pytest.raises(rx.UnsupportedScheme, match="calibrated"):
        rx.quantize_experts(plain, "fp8_block", activation_scheme="static")
    turned = rx.ExpertWeights(gate_up_proj=torch.randn(2, 64, 64), down_proj=torch.randn(2, 32, 64), is_transposed=True)
    with pytest.raises(ValueError, match="is_transposed"):
        rx.quantize_experts(turned, "mxfp4")
    mixed = rx.ExpertWeights(
        gate_up_proj=torch.randn(2, 64, 64), down_proj=torch.randn(2, 64, 32), is_concatenated=False
    )
    with pytest.raises(ValueError, match="interleaved"):
        rx.quantize_experts(mixed, "fp8_block")


def test_static_scales_run_where_rows_are_not_quantized():  # B42
    scales = {"gate_up_proj_activation_scale": torch.ones(4), "down_proj_activation_scale": torch.ones(4)}
    experts = rx.ExpertWeights(**stored(**scales, quantization=STATIC))
    assert experts.up_activation_scale is scales["gate_up_proj_activation_scale"]
    dynamic = rx.ExpertWeights(**stored())
    x, index, weights = torch.randn(3, 256), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    wanted = rx.run_experts(x, index, weights, dynamic, backend="eager")
    assert torch.equal(rx.run_experts(x, index, weights, experts, backend="eager"), wanted)
    assert rx.select_backend(experts, num_tokens=3).name == "fused"
    torch.testing.assert_close(
        rx.run_experts(x, index, weights, experts, backend="fused"), wanted, atol=1e-4, rtol=1e-4
    )
    for backend in ("batched_mm", "grouped_mm"):
        with pytest.raises(NotImplementedError) as caught:
            rx.run_experts(x, index, weights, experts, backend=backend)
        assert backend in str(caught.value)
        assert "dynamic" in caught.value.needed
    for facts in (machine((9, 0)), machine((10, 0))):
        for backend in ("fused", "deepgemm"):
            with pytest.raises(NotImplementedError, match=rf"{backend}(.|\n)*dynamic"):
                rx.select_backend(experts, num_tokens=3, backend=backend, facts=facts)


FORMATS = {
    "f32": ("fp8_block", (128, 128), torch.float32),
    "e8m0": ("fp8_block", (128, 128), E8M0),
    "mxfp4": ("mxfp4", None, E8M0),
}


@pytest.mark.parametrize(
    ("capability", "which", "refused"),
    [
        ((9, 0), "mxfp4", True),
        ((10, 0), "f32", True),
        ((9, 0), "f32", False),
        ((10, 0), "e8m0", False),
        ((10, 0), "mxfp4", False),
    ],
)
def test_deepgemm_by_architecture(capability, which, refused):
    experts, _, _ = quantized((FORMATS[which], False, True, True, False))
    facts = machine(capability)
    if refused:
        with pytest.raises(rx.UnsupportedScales) as caught:
            rx.select_backend(experts, num_tokens=8, backend="deepgemm", facts=facts)
        assert isinstance(caught.value, ValueError)
    else:
        assert rx.select_backend(experts, num_tokens=8, backend="deepgemm", facts=facts).name == "deepgemm"
    for other in ("eager", "batched_mm", "grouped_mm"):
        assert rx.select_backend(experts, num_tokens=8, backend=other, facts=facts).name == other


@pytest.mark.parametrize("which", FORMATS)
def test_sonicmoe_takes_none(which):
    experts, _, _ = quantized((FORMATS[which], False, True, True, False))
    with pytest.raises(NotImplementedError, match="unquantized"):
        rx.select_backend(experts, num_tokens=8, backend="sonicmoe", facts=machine((9, 0)))


def test_torchs_grouped_gemm_is_for_plain_weights():
    experts, plain, _ = quantized((FORMATS["f32"], False, True, True, False))
    assert rx.select_backend(plain, num_tokens=8, backend="grouped_mm", dtype=torch.bfloat16).name == "grouped_mm"
    for facts, path in ((machine((9, 0)), "triton"), (CPU, "loop")):
        assert rx.select_backend(experts, num_tokens=8, backend="grouped_mm", facts=facts).path == path
    captured = rx.select_backend(experts, num_tokens=8, backend="grouped_mm", facts=machine((9, 0)), capturing=True)
    assert captured.path == "triton"  # the loop reads the offsets
