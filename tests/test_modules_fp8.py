"""from_module on transformers' FP8Experts: what it is, live, and what it refuses."""

from __future__ import annotations

import fp8_modules as fp8
import pytest
import torch
from fp8_modules import KINDS, E, H, I, build, weights
from moe_inputs import inputs
from test_module_shortcut import long_ways  # noqa: F401 (a fixture)
from torch import nn

import routed_experts as rx
from routed_experts.module_weights import bind

CALL = inputs(tokens=6, experts=E, hidden=H)
BACKENDS = ["eager", "batched_mm", "grouped_mm", "auto"]


def run(experts, backend="eager"):
    x, index, scores = CALL
    return rx.run_experts(x, index, scores, experts, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_gate", [True, False])
def test_it_is_what_the_module_is(kind, has_gate):
    module = build(kind, has_gate=has_gate)
    wanted = weights(kind, has_gate=has_gate)
    found = rx.ExpertWeights.from_module(module)
    assert found.quantization == wanted.quantization
    assert (found.num_experts, found.hidden_size, found.has_gate) == (E, H, has_gate)
    assert found.intermediate_size == wanted.intermediate_size
    for one, other in zip(found.tensors(), wanted.tensors(), strict=True):
        assert one is None if other is None else torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    for name in ("up_weight", "up_scale", "down_weight", "down_scale"):
        assert getattr(found, name).data_ptr() in {parameter.data_ptr() for parameter in module.parameters()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_runs(kind, backend):
    wanted = run(weights(kind))
    assert torch.allclose(run(build(kind), backend), wanted, rtol=1e-4, atol=1e-5)


GATES = {
    "plain": {},
    "gelu": {"hidden_act": "gelu"},
    "clamped": {"swiglu_limit": 0.5},
    "clamped slope": {"swiglu_limit": 0.5, "swiglu_alpha": 1.702},
    "softcap": {"mlp_gate_softcap": 0.7, "mlp_up_softcap": 0.6},
}


@pytest.mark.parametrize("gate", GATES)
def test_the_gate_is_the_modules_own(gate):
    settings = dict(GATES[gate])
    module = build("blocks", settings=settings)
    found = bind(rx.ExpertWeights.from_module(module))
    assert found.own_gate == (gate == "softcap")
    assert found.swiglu_limit == settings.get("swiglu_limit")
    assert found.swiglu_alpha == settings.get("swiglu_alpha")
    assert found.activation_name == ("gelu" if gate == "gelu" else "silu")
    tensors = {name: tensor for name, tensor in weights("blocks")._tensors.items() if tensor is not None}
    own = rx.ExpertWeights(**tensors, quantization=weights("blocks").quantization, gate=module._apply_gate)
    assert torch.allclose(run(module), run(own), rtol=1e-5, atol=1e-6)
    assert gate == "plain" or not torch.allclose(run(module), run(weights("blocks")), atol=1e-3)


def test_a_gate_that_changes_is_seen():
    module = build("blocks", settings={"swiglu_limit": 0.5})
    clamped = run(module)
    assert torch.equal(run(module), clamped)
    module.limit = None
    assert torch.equal(run(module), run(weights("blocks")))
    module.gate_softcap, module.up_softcap = 0.7, 0.6
    assert not torch.allclose(run(module), run(weights("blocks")), atol=1e-3)
    assert bind(module).own_gate


def test_sizes_are_those_of_the_parameters_and_not_of_the_config():
    """Experts with a latent width, or split over ranks, are not what their config says."""
    module = build("blocks")
    module.config.hidden_size, module.hidden_dim = 2 * H, 2 * H
    module.config.moe_intermediate_size = 7
    found = rx.ExpertWeights.from_module(module)
    assert (found.hidden_size, found.intermediate_size) == (H, I)
    assert torch.equal(run(module), run(weights("blocks")))


def test_a_norm_is_carried():
    module = build("blocks")
    module.has_post_expert_norm, module.post_expert_norm = True, nn.LayerNorm(H)
    tensors = {name: tensor for name, tensor in weights("blocks")._tensors.items() if tensor is not None}
    scheme = weights("blocks").quantization
    wanted = rx.ExpertWeights(**tensors, quantization=scheme, post_expert_norm=module.post_expert_norm)
    assert torch.equal(run(module), run(wanted))


class Own(nn.Module):
    """Experts of no library, around the tensors of quantized weights."""

    def __init__(self, made, **flags):
        super().__init__()
        self.num_experts, self.block_size, self.act_fn = E, made.quantization.block, nn.SiLU()
        for name, tensor in made._tensors.items():
            if tensor is not None:
                setattr(self, name, nn.Parameter(tensor, requires_grad=False))
        for name, value in flags.items():
            setattr(self, name, value)


@pytest.mark.parametrize("flags", [{"is_transposed": True}, {"is_concatenated": False}])
@pytest.mark.parametrize("fmt", ["fp8_tensor", "mxfp8", "fp8_block"])
def test_flags_are_carried(fmt, flags):
    """Layouts that transformers' own class does not have; a gate of its own splits as it does."""
    shapes = {"gate_up_proj": (E, 2 * I, H), "down_proj": (E, H, I)}
    plain = {name: torch.randn(shape) / shape[2] ** 0.5 for name, shape in shapes.items()}
    if "is_transposed" in flags:
        plain = {name: tensor.mT.contiguous() for name, tensor in plain.items()}
    block = (1, 16) if fmt == "fp8_block" else None
    made = rx.quantize_experts(rx.ExpertWeights(**plain, **flags), fmt, block=block)
    module = Own(made, **flags)
    found = rx.ExpertWeights.from_module(module)
    assert (found.is_transposed, found.is_concatenated) == (made.is_transposed, made.is_concatenated)
    assert found.quantization == made.quantization
    assert torch.equal(run(module), run(made))
    module.is_concatenated, module.is_transposed = True, False
    if "is_transposed" in flags:
        with pytest.raises(rx.LayoutError):
            run(module)
    else:
        assert not torch.allclose(run(module), run(made), atol=1e-3)


def test_static_scales():
    module = build("blocks", activation_scheme="static")
    found = rx.ExpertWeights.from_module(module)
    assert found.quantization.activation_scheme == "static"
    assert torch.equal(found.up_activation_scale, torch.ones(E))
    assert torch.equal(run(module), run(weights("blocks")))  # eager quantizes no activations
    with pytest.raises(rx.UnsupportedScheme, match="static"):
        run(module, "grouped_mm")


def test_raw_bytes_are_the_dtype_they_stand_for():
    """As a checkpoint's uint8 scales lie in a module, before transformers views them."""
    module = build("mx")
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        setattr(module, name, nn.Parameter(getattr(module, name).data.view(torch.uint8), requires_grad=False))
    for _ in range(3):
        assert torch.equal(run(module), run(weights("mx")))
    assert bind(module).up_scale.dtype == torch.float8_e8m0fnu


def test_live(long_ways):  # noqa: F811
    module = build("blocks")
    experts = rx.ExpertWeights.from_module(module)
    assert torch.equal(run(experts), run(weights("blocks")))
    ways = len(long_ways)
    other = weights("blocks", seed=1)
    fp8.fill(module, other)
    assert torch.equal(run(experts), run(other))
    assert len(long_ways) == ways  # nothing but values has changed
    third = weights("blocks", seed=2)
    for name in ("gate_up_proj", "down_proj", "gate_up_proj_scale_inv", "down_proj_scale_inv"):
        setattr(module, name, nn.Parameter(getattr(third, name), requires_grad=False))
    assert torch.equal(run(experts), run(third))


def test_a_scheme_that_changes_is_seen():
    module = build("blocks")
    run(module)
    module.block_size = [16, 16]
    assert torch.equal(run(module), run(weights("blocks")))
    module.block_size[0] = 8
    with pytest.raises(rx.LayoutError, match="does not fit"):
        run(module)
    module.block_size = (16, 16)
    module.activation_scheme = "static"
    with pytest.raises(rx.LayoutError, match="activation_scale is missing"):
        run(module)


def test_dequantized_in_place_and_scales_taken_away():
    module = build("blocks")
    run(module)
    plain = {name: torch.randn_like(getattr(module, name).float()) / 8 for name in ("gate_up_proj", "down_proj")}
    for name, tensor in plain.items():
        setattr(module, name, nn.Parameter(tensor))
    with pytest.raises(rx.UnsupportedScheme, match="not quantized"):
        run(module)
    module.gate_up_proj_scale_inv = module.down_proj_scale_inv = None
    assert torch.equal(run(module), run(rx.ExpertWeights(**plain)))


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "down_proj_scale_inv"])
@pytest.mark.parametrize("how", [rx.ExpertWeights.from_module, run])
def test_scales_that_are_none_are_refused(how, name, value):
    """B43."""
    module = build("blocks")
    with torch.no_grad():
        getattr(module, name)[2, 1, 1] = value
    with pytest.raises(rx.UnsupportedScales, match=name) as caught:
        how(module)
    assert "expert 2" in caught.value.found


def test_scales_without_a_block_are_refused():
    """B45: the grid of a scale never says which block it has."""
    module = build("blocks")
    del module.block_size
    with pytest.raises(rx.LayoutError) as caught:
        run(module)
    assert "block_size" in caught.value.needed
    module.block_size = (16,)
    with pytest.raises(rx.LayoutError, match="block"):
        run(module)


@pytest.mark.parametrize("name", ["gate_up_proj_scale_inv", "down_proj_scale_inv"])
def test_missing_scales_are_refused(name):
    module = build("blocks")
    setattr(module, name, None)
    with pytest.raises(rx.LayoutError):
        run(module)


def test_wrong_grid_is_refused():
    module = build("blocks")
    module.down_proj_scale_inv = nn.Parameter(torch.ones(E, 3, 2))
    with pytest.raises(rx.LayoutError, match="down_proj_scale_inv does not fit"):
        run(module)


def test_meta_modules_have_a_layout():
    with torch.device("meta"):
        module = fp8.experts_class()(fp8.config(), block_size=(16, 16))
    assert rx.ExpertWeights.from_module(module).quantization == rx.Quantization("fp8_block", (16, 16))


def test_parameters_that_ask_for_gradients_as_built_get_none():
    """transformers makes them so and gives none; hidden states and routing weights have theirs."""
    module = build("blocks")
    assert module.down_proj.requires_grad
    x, index, scores = CALL
    for _ in range(2):  # the long way, and the short one
        for backend in BACKENDS:
            rows, routing = x.clone().requires_grad_(), scores.clone().requires_grad_()
            rx.run_experts(rows, index, routing, module, backend=backend).sum().backward()
            assert rows.grad.abs().sum() > 0
            assert routing.grad.abs().sum() > 0
            assert module.down_proj.grad is None


def test_a_module_of_ones_own_that_asks_for_gradients_is_told():
    module = Own(weights("blocks"))
    module.down_proj.requires_grad_()
    with pytest.raises(rx.GradientUnsupported, match="down_proj"):
        run(module)
    with torch.no_grad():
        assert torch.equal(run(module), run(weights("blocks")))


@pytest.mark.parametrize("kind", ["blocks", "tensor", "fp4"])
def test_the_short_way_is_taken(kind, long_ways):  # noqa: F811
    module = build(kind)
    for _ in range(4):
        run(module)
    assert len(long_ways) == 1


@pytest.mark.parametrize("kind", ["blocks", "tensor", "fp4"])
@pytest.mark.parametrize("backend", ["batched_mm", "grouped_mm", "auto"])
def test_it_compiles_whole(kind, backend):
    torch._dynamo.reset()
    module = build(kind)
    x, index, scores = CALL
    compiled = torch.compile(
        lambda x: rx.run_experts(x, index, scores, module, backend=backend), fullgraph=True, backend="eager"
    )
    assert torch.allclose(compiled(x), run(weights(kind)), rtol=1e-4, atol=1e-5)
