"""The number formats and the reference quantizer: worked numbers, rounding, short blocks, zeros and tiny rows."""

from __future__ import annotations

import pytest
import quantized_oracle as oracle
import torch

import routed_experts as rx
from routed_experts.quantization import codes, quantize_activations, quantize_activations_static

E8M0 = torch.float8_e8m0fnu
W = torch.tensor([[0.10, -0.30, 2.00, 1.00], [0.70, 0.20, -4.00, 0.50]])


def hexes(tensor):
    return [[f"{byte:02X}" for byte in row] for row in tensor.view(torch.uint8).tolist()]


def test_three_steps_with_float32_scales():
    weight, scale = rx.quantization.quantize(W, "fp8_block", block=(2, 2))
    assert scale.tolist() == [[torch.tensor(0.7).div(448).item(), 0.008928571827709675]]
    assert scale[0, 0].item() == pytest.approx(0.0015625, rel=1e-7)
    assert weight.float().tolist() == [[64, -192, 224, 112], [448, 128, -448, 56]]
    assert hexes(weight) == [["68", "F4", "76", "6E"], ["7E", "70", "FE", "66"]]
    torch.testing.assert_close(rx.quantization.dequantize(weight, scale, block=(2, 2)), W, rtol=1e-6, atol=0)


def test_three_steps_with_powers_of_two():
    weight, scale = rx.quantization.quantize(W, "fp8_block", block=(2, 2), scale_dtype=E8M0)
    assert scale.view(torch.uint8).tolist() == [[118, 121]]
    assert weight.float().tolist() == [[52, -160, 128, 64], [352, 104, -256, 32]]
    back = rx.quantization.dequantize(weight, scale, block=(2, 2))
    assert back.tolist() == [[0.1015625, -0.3125, 2, 1], [0.6875, 0.203125, -4, 0.5]]
    assert torch.equal(rx.quantization.dequantize(weight, scale.view(torch.uint8), block=(2, 2)), back)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize(
    "scale", [torch.tensor([[0.25]]), torch.tensor([[125]], dtype=torch.uint8), torch.tensor([[0.25]]).to(E8M0)]
)
def test_fp4_bytes(dtype, scale):
    packed = torch.tensor([[-95, 7, 79, -109] * 4], dtype=torch.int8).view(dtype)
    back = rx.quantization.dequantize(packed, scale)
    assert back.tolist() == [[0.125, -0.25, 1.5, 0, -1.5, 0.5, 0.375, -0.125] * 4]


def test_every_code_of_both_formats():
    byte = torch.arange(256, dtype=torch.uint8)
    torch.testing.assert_close(codes.from_e2m1(byte).double(), oracle.e2m1(byte), rtol=0, atol=0)
    eight = byte.view(torch.float8_e4m3fn)
    torch.testing.assert_close(eight.float().double(), oracle.e4m3(eight), rtol=0, atol=0, equal_nan=True)
    finite = eight[~eight.float().isnan()]
    assert torch.equal(codes.to_e4m3(finite.float()).view(torch.uint8), finite.view(torch.uint8))


def test_fp4_rounds_ties_to_the_smaller_magnitude_and_never_to_minus_zero():
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    below, above = torch.nextafter(bounds, bounds * 0), torch.nextafter(bounds, bounds * 2)
    for value, wanted in ((bounds, oracle.FP4[:7]), (below, oracle.FP4[:7]), (above, oracle.FP4[1:])):
        for sign in (1, -1):
            row = torch.cat((value * sign, torch.zeros(1)))
            back = oracle.e2m1(codes.to_e2m1(row[None]))[0, :7]
            assert back.tolist() == [sign * one if one else 0.0 for one in wanted]
    small = codes.to_e2m1(torch.tensor([[-0.0, -0.25], [-1e-9, 0.0]]))
    assert small.tolist() == [[0], [0]]
    assert oracle.e2m1(codes.to_e2m1(torch.tensor([[9.0, -1e9]]))).tolist() == [[6.0, -6.0]]


def test_scales_round_up():
    given = torch.tensor([0.00446429, 1.4, 1.5, 1.0, 0.7, 6.0, 3.0, 1e-45, 3.4e38])
    wanted = [2.0**-7, 2, 2, 1, 1, 8, 4, 2.0**-126, 2.0**127]
    assert codes.round_scale_up(given).tolist() == wanted
    assert codes.to_ue8m0(codes.round_scale_up(given)).float().tolist() == wanted


def test_powers_of_two_are_read_as_they_are():  # B46
    exact = torch.tensor([0.5, 1.0, 2.0])
    assert codes.scale_values(exact.to(E8M0)).tolist() == exact.tolist()
    every = torch.arange(255, dtype=torch.uint8)
    assert torch.equal(codes.scale_values(every).double(), oracle.scale(every))
    assert codes.scale_values(torch.tensor([255], dtype=torch.uint8)).isnan()
    assert codes.is_power_of_two(torch.tensor([1.0, 2.0**-127, 0.75, 0.0, -2.0, float("inf")])).tolist() == [
        True,
        True,
        False,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("fmt", "block", "scale_dtype", "bound"),
    [
        ("fp8_block", (128, 128), torch.float32, 0.03),
        ("fp8_block", (128, 128), E8M0, 0.03),
        ("fp8_block", (1, 96), torch.float32, 0.03),
        ("fp8_block", (7, 5), torch.float32, 0.03),
        ("mxfp8", None, E8M0, 0.03),
        ("fp8_tensor", None, torch.float32, 0.03),
        ("fp8_tensor", None, E8M0, 0.03),
        ("mxfp4", None, E8M0, 0.14),
        ("mxfp4", None, torch.float32, 0.14),
    ],
)
def test_round_trip(fmt, block, scale_dtype, bound):
    weight = torch.randn(3, 200, 160, generator=torch.Generator().manual_seed(0))
    weight[1, :, :32] = 0
    stored, scale = rx.quantization.quantize(weight, fmt, block=block, scale_dtype=scale_dtype)
    assert scale.dtype == scale_dtype
    back = rx.quantization.dequantize(stored, scale, block=block)
    shape = rx.Quantization(fmt, block).block
    wanted = oracle.matrix(stored, scale, shape, halves=False, interleaved=False, transposed=False)
    torch.testing.assert_close(back.double(), wanted, rtol=1e-6, atol=0)
    assert ((back - weight).norm() / weight.norm()).item() < bound
    assert torch.equal(back[1, :, :32], torch.zeros(200, 32))
    assert rx.quantization.dequantize(stored, scale, block=block, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_a_block_of_zeros_has_scale_one():
    for fmt, block, one in (("fp8_block", (2, 32), None), ("mxfp8", None, 127), ("mxfp4", None, 127)):
        stored, scale = rx.quantization.quantize(torch.zeros(4, 64), fmt, block=block)
        assert (scale == 1.0).all() if one is None else (scale.view(torch.uint8) == one).all()
        assert not stored.view(torch.uint8).any()


@pytest.mark.parametrize("fmt", rx.quantization.FORMATS)
def test_tiny_rows_stay_finite(fmt):  # B44
    weight = torch.ones(2, 64)
    weight[1] = torch.linspace(-6e-38, 6e-38, 64)
    stored, scale = rx.quantization.quantize(weight, fmt, block=(1, 64) if fmt == "fp8_block" else None)
    back = rx.quantization.dequantize(stored, scale, block=(1, 64) if fmt == "fp8_block" else None)
    assert back.isfinite().all()
    assert back[1].abs().max() < 1e-37
    assert (scale.float() > 0).all()
    q, s = quantize_activations(weight)
    assert (q.float() * s).isfinite().all()
    assert quantize_activations(weight, floor=1e-4)[1][1].item() == pytest.approx(1e-4 / 448)


def test_the_last_block_may_be_short_and_the_block_is_never_guessed():
    weight = torch.randn(130, 70, generator=torch.Generator().manual_seed(1))
    weight[128:] *= 1000
    stored, scale = rx.quantization.quantize(weight, "fp8_block", block=(128, 64))
    assert scale.shape == (2, 2)
    back = rx.quantization.dequantize(stored, scale, block=(128, 64))
    torch.testing.assert_close(back, weight, rtol=0.0625, atol=0.05)
    for shape in ((130, 70), (5, 70)):
        wrong = torch.zeros(shape).to(torch.float8_e4m3fn)
        with pytest.raises(ValueError, match="do not fit"):
            rx.quantization.dequantize(wrong, torch.ones(3, 2), block=(128, 64))
    with pytest.raises(ValueError, match="do not fit"):
        rx.quantization.dequantize(torch.zeros(5, 4).to(torch.float8_e4m3fn), torch.ones(2, 1), block=(2, 4))
    with pytest.raises(ValueError, match="32"):
        rx.quantization.dequantize(stored, scale)


def test_scales_without_a_block():
    weight = torch.ones(2, 4, 64).to(torch.float8_e4m3fn)
    for scale in (torch.tensor(2.0), torch.full((2,), 2.0), torch.full((2, 1), 2.0), torch.full((2, 1, 1), 2.0)):
        assert torch.equal(rx.quantization.dequantize(weight, scale), torch.full((2, 4, 64), 2.0))
    halves = torch.tensor([[[2.0], [3.0]], [[4.0], [5.0]]])
    back = rx.quantization.dequantize(weight, halves)
    assert back[:, :, 0].tolist() == [[2, 2, 3, 3], [4, 4, 5, 5]]
    groups = torch.arange(1.0, 17.0).view(2, 4, 2)
    assert torch.equal(rx.quantization.dequantize(weight, groups), groups.repeat_interleave(32, -1))


def test_one_by_one_is_a_scale_for_the_matrix():  # B45
    back = rx.quantization.dequantize(torch.ones(256, 256).to(torch.float8_e4m3fn), torch.full((1, 1), 0.75))
    assert torch.equal(back, torch.full((256, 256), 0.75))


def test_general_scales_are_not_rounded():  # B38
    stored, scale = rx.quantization.quantize(torch.full((128, 128), 336.0), "fp8_block")
    assert scale.item() == 0.75
    assert torch.equal(rx.quantization.dequantize(stored, scale, block=(128, 128)), torch.full((128, 128), 336.0))
    ones = torch.ones(128, 128).to(torch.float8_e4m3fn)
    assert (rx.quantization.dequantize(ones, scale, block=(128, 128)) == 0.75).all()


@pytest.mark.parametrize("block", [(32, 32), (16, 8), (1, 3)])
def test_groups_smaller_than_any_tile(block):  # B40
    stored = torch.ones(64, 64).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 1 + -(-64 // block[0]) * -(-64 // block[1])).view(-(-64 // block[0]), -1)
    wanted = oracle.matrix(stored[None], scale[None], block, halves=False, interleaved=False, transposed=False)[0]
    assert torch.equal(rx.quantization.dequantize(stored, scale, block=block).double(), wanted)


def test_activations_by_group_and_by_a_stored_scale():
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(2))
    x[3] = 0
    q, scale = quantize_activations(x)
    assert q.dtype == torch.float8_e4m3fn
    assert scale.shape == (5, 2)
    assert scale[3].tolist() == [1, 1]
    torch.testing.assert_close(scale[0, 0], x[0, :128].abs().max() / 448)
    torch.testing.assert_close(scale[0, 1], x[0, 128:].abs().max() / 448)
    spread = scale.repeat_interleave(128, -1)[:, :200]
    torch.testing.assert_close(q.float() * spread, x, rtol=0.0626, atol=0.01)
    _, power = quantize_activations(x, 32, scale_dtype=E8M0)
    assert power.shape == (5, 7)
    assert (power.float()[0] >= x[0].abs().amax() * 0).all()
    first = x[0, :32].abs().max() / 448
    assert first <= power.float()[0, 0] < 2 * first
    assert quantize_activations_static(torch.tensor([[1.0, -900.0]]), torch.tensor(2.0)).tolist() == [[0.5, -448.0]]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: rx.quantization.quantize(torch.ones(4, 40), "mxfp4"), ValueError),
        (lambda: rx.quantization.quantize(torch.ones(4, 40), "mxfp8"), ValueError),
        (lambda: rx.quantization.quantize(torch.ones(32), "mxfp8"), ValueError),
        (lambda: rx.quantization.quantize(torch.full((4, 32), float("inf")), "fp8_tensor"), ValueError),
        (lambda: rx.quantization.quantize(torch.ones(4, 32, dtype=torch.int32), "fp8_tensor"), TypeError),
        (lambda: rx.quantization.dequantize(torch.ones(4, 32), torch.ones(1)), NotImplementedError),
        (
            lambda: rx.quantization.dequantize(torch.ones(4, 32).to(torch.float8_e4m3fn), torch.ones(1).half()),
            TypeError,
        ),
        (lambda: rx.Quantization("fp8"), ValueError),
        (lambda: rx.Quantization("fp8_block", (128, 0)), ValueError),
        (lambda: rx.Quantization("fp8_block", 128), ValueError),
        (lambda: rx.Quantization("fp8_tensor", (128, 128)), ValueError),
        (lambda: rx.Quantization("mxfp8", (1, 64)), ValueError),
        (lambda: rx.Quantization("fp8_block", activation_scheme="Static"), ValueError),
        (lambda: rx.Quantization("fp8_block", scale_dtype=torch.bfloat16), TypeError),
        (lambda: rx.Quantization("mxfp8", scale_dtype=torch.float32), ValueError),
        (lambda: quantize_activations(torch.ones(2, 4), scale_dtype=torch.float16), TypeError),
        (lambda: quantize_activations(torch.ones(2, 4), 0), ValueError),
    ],
)
def test_refusals(call, error):
    with pytest.raises(error) as caught:
        call()
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint


def test_defaults_of_a_scheme():
    E4M3 = torch.float8_e4m3fn
    assert rx.Quantization("fp8_block") == rx.Quantization("fp8_block", [128, 128], "dynamic", torch.float32)
    rows = {
        "fp8_block": ((128, 128), torch.float32, E4M3, (3, 2, 2)),
        "mxfp8": ((1, 32), E8M0, E4M3, (3, 256, 5)),
        "fp8_tensor": (None, torch.float32, E4M3, (3, 1, 1)),
        "mxfp4": ((1, 32), E8M0, torch.int8, (3, 256, 5)),
    }
    for fmt, (block, scale, weight, shape) in rows.items():
        scheme = rx.Quantization(fmt)
        assert (scheme.block, scheme.scale_dtype, scheme.weight_dtype) == (block, scale, weight)
        assert scheme.is_fp4 == (fmt == "mxfp4")
        assert scheme.scale_shape(3, 256, 160) == shape
    assert rx.Quantization("fp8_tensor").scale_shape(3, 256, 160, halves=True) == (3, 2, 1)
    assert rx.Quantization("fp8_block").scale_shape(3, 128, 160, halves=True) == (3, 2, 2)
    assert rx.Quantization("mxfp4", (128, 128)).block == (1, 32)
    assert rx.Quantization("mxfp4", scale_dtype=torch.uint8).scale_dtype == E8M0


def test_powers_of_two_need_a_torch_that_has_them(monkeypatch):
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    assert rx.Quantization("fp8_block").scale_dtype == torch.float32
    with pytest.raises(RuntimeError, match=r"torch 2\.7"):
        rx.Quantization("mxfp4")
