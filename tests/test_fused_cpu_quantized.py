"""Quantized experts through the CPU row of `fused`: values against the float64 oracle, bits against itself."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, experts_oracle, relative_error
from quantized_cases import E8M0, LAYOUTS, floating, name_of, quantized, routed
from quantized_oracle import tensors_of

import routed_experts as rx
from routed_experts import fused_cpu

PLAIN = [layout for layout in LAYOUTS if layout[1:] == (False, True, True, False)]


def call(experts, x, index, weights, **how):
    return rx.run_experts(x, index, weights, experts, backend="fused", **how)


def check(experts, flags, x, index, weights):
    wanted = experts_oracle(x, index, weights, tensors_of(experts), flags)
    out = call(experts, x, index, weights)
    assert out.dtype == x.dtype
    assert relative_error(out, wanted) < TOLERANCE[x.dtype]
    return out


@pytest.fixture
def restored_threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_every_format_scale_and_layout(layout, dtype, poisoned):
    poisoned()
    experts, _, flags = quantized(layout)
    check(experts, flags, *routed(dtype=dtype, sentinels=True))


@pytest.mark.parametrize("layout", PLAIN, ids=name_of)
@pytest.mark.parametrize("changes", [{"swiglu_limit": 0.7}, {"swiglu_limit": 7.0, "swiglu_alpha": 1.7}])
def test_gates_with_parameters(layout, changes):
    experts, _, flags = quantized(layout, **changes)
    check(experts, flags, *routed(tokens=5))


@pytest.mark.parametrize("layout", [PLAIN[0], PLAIN[-2]], ids=name_of)
def test_a_gate_and_a_norm_of_ones_own(layout):
    functions = {
        "gate": lambda u: torch.tanh(u.chunk(2, -1)[0]) * u.chunk(2, -1)[1],
        "post_expert_norm": lambda d: d * torch.rsqrt(d.square().mean(-1, keepdim=True) + 0.5),
    }
    experts, _, flags = quantized(layout, **functions)
    inputs = routed(sentinels=True)
    check(experts, flags, *inputs)
    compiled = torch.compile(lambda *a: call(experts, *a), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), call(experts, *inputs))


@pytest.mark.parametrize("layout", PLAIN, ids=name_of)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (1, 0), (3, 4), (200, 3)])
def test_calls_of_every_size(layout, tokens, top_k):
    experts, _, flags = quantized(layout)
    x, index, weights = routed(tokens, top_k)
    out = check(experts, flags, x, index, weights) if tokens and top_k else call(experts, x, index, weights)
    assert out.shape == x.shape


@st.composite
def odd_layers(draw):
    """Sizes that divide by nothing, and blocks that end anywhere."""
    fmt = draw(st.sampled_from(["fp8_block", "fp8_tensor"]))
    block = (draw(st.integers(1, 40)), draw(st.sampled_from([1, 7, 32, 64, 96, 128, 200])))
    transposed, interleaved = draw(st.booleans()), draw(st.booleans())
    block = None if fmt == "fp8_tensor" else (1, block[1]) if interleaved else block
    inner = draw(st.integers(1, 90))
    if block is not None and inner > block[0]:
        inner = inner // block[0] * block[0]
    return fmt, block, (draw(st.integers(2, 150)), inner), transposed, not interleaved


@settings(max_examples=60, deadline=None)
@given(odd_layers(), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 99))
def test_odd_sizes(layer, tokens, dtype, seed):
    fmt, block, (hidden, inner), transposed, concatenated = layer
    g = torch.Generator().manual_seed(seed)
    up = torch.randn(2, 2 * inner, hidden, generator=g) / hidden**0.5
    down = torch.randn(2, hidden, inner, generator=g) / inner**0.5
    flags = {"is_transposed": transposed, "is_concatenated": concatenated, "activation": "silu"}
    tensors = {"gate_up_proj": up.mT if transposed else up, "down_proj": down.mT if transposed else down}
    experts = rx.quantize_experts(rx.ExpertWeights(**tensors, **flags), fmt, block=block)
    x, index = torch.randn(tokens, hidden, generator=g).to(dtype), torch.randint(-1, 3, (tokens, 2), generator=g)
    weights = torch.rand(tokens, 2, generator=g) + 0.1
    out = call(experts, x, index, weights)
    wanted = experts_oracle(x, index, weights, tensors_of(experts), flags)
    # The largest of few numbers may itself be what is left of a cancelled sum.
    scale = max(wanted.abs().max().item(), 0.05)
    assert ((out.double() - wanted).abs().max() / scale).item() < 4 * TOLERANCE[dtype]


@pytest.mark.parametrize("layout", PLAIN, ids=name_of)
@pytest.mark.parametrize("sign", [0, 0x80])
def test_codes_of_nan_are_nan_as_in_the_reference(layout, sign):
    experts, *_ = quantized(layout)
    if experts.quantization.is_fp4:
        pytest.skip("four bits have no NaN")
    experts.down_proj.view(torch.uint8)[2, 7, 11] = 0x7F | sign
    x, index, weights = routed()
    wanted = rx.run_experts(x, index, weights, experts, backend="eager")
    assert wanted.isnan().any()
    assert torch.equal(call(experts, x, index, weights).isnan(), wanted.isnan())


def test_subnormal_codes_and_extreme_scales():
    """The smallest numbers of eight bits, and scales of either end, go in as they are."""
    experts, _, flags = quantized((("mxfp8", None, E8M0), False, True, True, False))
    experts.gate_up_proj.view(torch.uint8).fill_(1)
    experts.down_proj.view(torch.uint8)[:] = torch.arange(8, dtype=torch.uint8).repeat(experts.intermediate_size // 8)
    experts.gate_up_proj_scale_inv.view(torch.uint8).fill_(127 + 6)
    experts.down_proj_scale_inv.view(torch.uint8).fill_(127)
    check(experts, flags, *routed(tokens=3))
    for byte in (0, 1, 240):
        experts.down_proj_scale_inv.view(torch.uint8).fill_(byte)
        x, index, weights = routed(tokens=3)
        wanted = experts_oracle(x, index, weights, tensors_of(experts), flags)
        # Below the normal numbers of float32 their distance is absolute; products are 256 times smaller than results.
        assert ((call(experts, x, index, weights).double() - wanted).abs() <= 1e-5 * wanted.abs() + 1e-41).all()


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("layout", PLAIN, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(layout, dtype, poisoned):
    poisoned()
    g = torch.Generator().manual_seed(0)
    up, down = torch.randn(4, 1024, 512, generator=g) / 23, torch.randn(4, 512, 512, generator=g) / 23
    fmt, block, scale_dtype = layout[0]
    plain = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
    experts = rx.quantize_experts(plain, fmt, block=block, scale_dtype=scale_dtype)
    x, index = torch.randn(20, 512, generator=g).to(dtype), torch.randint(0, 4, (20, 2), generator=g)
    weights = torch.rand(20, 2, generator=g)
    torch.set_num_threads(1)
    serial = call(experts, x, index, weights)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(call(experts, x, index, weights), serial)
    # Tiles differ with the number of rows; sums do not.
    alone = [call(experts, x[t : t + 1], index[t : t + 1], weights[t : t + 1]) for t in range(8)]
    assert torch.equal(torch.cat(alone), serial[:8])


def test_transposed_and_unaligned_weights_give_the_same_bits():
    layout = (("fp8_block", (32, 32), torch.float32), False, True, True, True)
    experts, *_ = quantized(layout)
    inputs = routed(dtype=torch.bfloat16)
    wanted = call(experts, *inputs)
    turned = {
        name: None if t is None else t.view(torch.uint8).mT.contiguous().view(t.dtype) if t.element_size() == 1 else t
        for name, t in experts._tensors.items()
    }
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        turned[name] = experts._tensors[name].mT.contiguous()
    scheme = experts.quantization
    assert torch.equal(call(rx.ExpertWeights(**turned, quantization=scheme, is_transposed=True), *inputs), wanted)
    odd = {name: None if t is None else odd_copy(t) for name, t in experts._tensors.items()}
    assert odd["down_proj_scale_inv"].data_ptr() % 4 == 1
    assert torch.equal(call(rx.ExpertWeights(**odd, quantization=scheme), *inputs), wanted)


def odd_copy(tensor):
    """The same numbers from an odd address on."""
    size = tensor.numel() * tensor.element_size()
    buffer = torch.empty(size + 1, dtype=torch.uint8)
    buffer[1:] = tensor.contiguous().flatten().view(torch.uint8)
    return torch.frombuffer(buffer.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=1).view(tensor.shape)


@pytest.mark.parametrize("layout", PLAIN, ids=name_of)
def test_compiled_forward_and_backward(layout):
    torch.compiler.reset()
    experts, *_ = quantized(layout)
    compiled = torch.compile(lambda *inputs: call(experts, *inputs), fullgraph=True, backend="aot_eager")
    x, index, weights = routed(tokens=5, dtype=torch.bfloat16)
    assert torch.equal(compiled(x, index, weights), call(experts, x, index, weights))
    assert compiled(x[:0], index[:0], weights[:0]).shape == (0, x.shape[1])
    grads = []
    for run, name in ((compiled, None), (call, "fused"), (rx.run_experts, "grouped_mm")):
        leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if name is None:
            out = run(leaves[0], index, leaves[1])
        else:
            out = rx.run_experts(leaves[0], index, leaves[1], experts, backend=name)
        out.float().square().sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for got in grads[:2]:
        torch.testing.assert_close(got, grads[2])


def test_gradients_against_the_oracle():
    experts, _, flags = quantized(PLAIN[0])
    x, index, weights = routed(tokens=5)
    leaves = x.clone().requires_grad_(), weights.clone().requires_grad_()
    call(experts, leaves[0], index, leaves[1]).sum().backward()
    double = x.double().requires_grad_(), weights.double().requires_grad_()
    experts_oracle(double[0], index, double[1], tensors_of(experts), flags).sum().backward()
    for leaf, wanted in zip(leaves, double, strict=True):
        assert relative_error(leaf.grad, wanted.grad) < 1e-5


def test_a_gradient_of_a_quantized_weight_is_refused():
    experts, *_ = quantized(PLAIN[0])
    experts.down_proj_scale_inv.requires_grad_()
    with pytest.raises(rx.GradientUnsupported):
        call(experts, *routed())


def test_operators_obey_their_declarations():
    experts, *_ = quantized(PLAIN[-2])
    x, index, weights = routed(tokens=3)
    tensors, text = experts.tensors(), fused_cpu.declared(experts)
    ops = torch.ops.routed_experts
    torch.library.opcheck(ops.fused_cpu.default, (x, index, weights, tensors, text), test_utils="test_faketensor")
    torch.library.opcheck(ops.fused_cpu_rows.default, (x, index, tensors, text, False), test_utils="test_faketensor")


def test_plans_are_of_one_layout():
    """Copies that lie elsewhere, and scales that do, are read where they lie."""
    experts, *_ = quantized(PLAIN[0])
    inputs = routed()
    wanted = call(experts, *inputs)
    assert torch.equal(call(copy.deepcopy(experts), *inputs), wanted)
    spread = dict(experts._tensors)
    spread["down_proj_scale_inv"] = torch.stack([experts.down_proj_scale_inv] * 2, -1)[..., 0]
    assert torch.equal(call(rx.ExpertWeights(**spread, quantization=experts.quantization), *inputs), wanted)


def test_static_activation_scales_are_a_permission():
    tensors, flags = floating(PLAIN[0])
    experts = rx.quantize_experts(rx.ExpertWeights(**tensors, **flags), "fp8_block", block=(32, 32))
    scales = {f"{name}_activation_scale": torch.ones(experts.num_experts) for name in ("gate_up_proj", "down_proj")}
    scheme = dataclasses.replace(experts.quantization, activation_scheme="static")
    static = rx.ExpertWeights(**{**experts._tensors, **scales}, quantization=scheme)
    inputs = routed()
    assert torch.equal(call(static, *inputs), call(experts, *inputs))


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp4"])
@pytest.mark.parametrize(("tokens", "name"), [(1, "fused"), (512, "fused"), (4096, "fused"), (65536, "grouped_mm")])
def test_auto_dequantizes_only_for_many_rows(fmt, tokens, name):
    """At the sizes of Qwen1.5-MoE: the loop over dequantized experts takes its time whatever the tokens."""
    scheme = rx.Quantization(fmt)

    def stack(rows, columns, halves):
        stored = columns // 2 if scheme.is_fp4 else columns
        weight = torch.empty(60, rows, stored, dtype=scheme.weight_dtype, device="meta")
        shape = scheme.scale_shape(60, rows, columns, halves)
        return weight, torch.empty(shape, dtype=scheme.scale_dtype, device="meta")

    (up, up_scale), (down, down_scale) = stack(2816, 2048, True), stack(2048, 1408, False)
    scales = {"gate_up_proj_scale_inv": up_scale, "down_proj_scale_inv": down_scale}
    experts = rx.ExpertWeights(gate_up_proj=up, down_proj=down, **scales, quantization=scheme)
    facts = rx.current_facts("cpu")
    assert rx.select_backend(experts, num_tokens=tokens, num_top_k=4, facts=facts).name == name
