"""FP8 models inside transformers: what loading does with and without a GPU, and that the experts run here."""

from __future__ import annotations

import json

import fp8_modules as fp8
import pytest
import torch
from fp8_modules import KINDS, E, H, build, weights
from moe_inputs import inputs
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from transformers.integrations import finegrained_fp8, moe
from transformers.quantizers import quantizer_finegrained_fp8
from transformers_models import BACKENDS, build_text, prefixed

import routed_experts as rx
from routed_experts.transformers_integration import forwards

BLOCK = (16, 16)
TOKENS = torch.arange(7)[None]


@pytest.fixture(autouse=True)
def registered():
    rx.register_with_transformers()
    yield
    rx.unregister_from_transformers()


@pytest.fixture
def asked(monkeypatch):
    """The backends that the registered functions ran, call by call."""
    names = []

    def spy(module, backend, *rest):
        names.append(backend)
        return original(module, backend, *rest)

    original = forwards.call_experts
    monkeypatch.setattr(forwards, "call_experts", spy)
    return names


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny Qwen3-MoE in FP8 with names per expert, as it would be on a hub, and the model that it came from."""
    model = build_text().float()
    tensors = {}
    for name, tensor in model.state_dict().items():
        if ".experts." in name:
            continue
        tensors[name] = tensor.clone()
        if "self_attn" in name and name.endswith("proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = rx.quantization.quantize(tensor, "fp8_block", block=BLOCK)
    for number, layer in enumerate(model.model.layers):
        experts = rx.quantize_experts(rx.ExpertWeights.from_module(layer.mlp.experts), "fp8_block", block=BLOCK)
        tensors |= _by_expert(f"model.layers.{number}.mlp.experts.", experts)
    folder = tmp_path_factory.mktemp("qwen3_moe_fp8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    scheme = {
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head", "mlp.gate"],
    }
    settings = model.config.to_dict() | {"architectures": [type(model).__name__], "quantization_config": scheme}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, model


def _by_expert(prefix, experts):
    tensors = {}
    for expert in range(experts.num_experts):
        gate, up = experts.gate_up_proj[expert].view(torch.uint8).chunk(2)
        gate_scale, up_scale = experts.gate_up_proj_scale_inv[expert].chunk(2)
        down, down_scale = experts.down_proj[expert].view(torch.uint8), experts.down_proj_scale_inv[expert]
        for role, matrix, scale in (("gate", gate, gate_scale), ("up", up, up_scale), ("down", down, down_scale)):
            tensors[f"{prefix}{expert}.{role}_proj.weight"] = matrix.clone().view(torch.float8_e4m3fn)
            tensors[f"{prefix}{expert}.{role}_proj.weight_scale_inv"] = scale.clone()
    return tensors


def load(folder, name, **more):
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation=name, **more)


def load_as_on_a_gpu(folder, name, monkeypatch):
    """Load the way transformers does where it finds a GPU: the quantized modules stay, on the CPU."""
    with monkeypatch.context() as patch:
        patch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        return load(folder, name)


def test_accelerate_is_transformers_wish(checkpoint, monkeypatch):
    """It is asked for by the quantizer before anything is loaded; this package has no say in it."""
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: False)
    with pytest.raises(ImportError, match="requires accelerate"):
        load(checkpoint[0], "routed_experts")
    assert rx.ExpertWeights.from_checkpoint(checkpoint[0], 0).quantization == rx.Quantization("fp8_block", BLOCK)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_a_gpu_the_whole_model_is_dequantized_at_load(checkpoint, asked, dtype, monkeypatch):
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    folder, original = checkpoint
    model = load(folder, "routed_experts_grouped_mm", dtype=dtype)
    experts = model.model.layers[1].mlp.experts
    assert not isinstance(experts, finegrained_fp8.FP8Experts)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    exact = rx.ExpertWeights.from_checkpoint(folder, 1, dequantize=True)
    assert torch.equal(experts.gate_up_proj.bfloat16(), exact.gate_up_proj)
    assert torch.equal(experts.down_proj.bfloat16(), exact.down_proj)
    with torch.no_grad():
        logits = model(TOKENS).logits
        assert asked == ["grouped_mm"] * len(model.model.layers)
        model.set_experts_implementation("eager")
        assert torch.allclose(logits, model(TOKENS).logits, atol=1e-5 if dtype == "float32" else 0.1)
        assert (logits.float() - original(TOKENS).logits).abs().max() < 0.3


@pytest.mark.parametrize("name", BACKENDS)
def test_with_a_gpu_the_quantized_modules_run_here(checkpoint, asked, name, monkeypatch):
    folder, _ = checkpoint
    model = load_as_on_a_gpu(folder, prefixed(name), monkeypatch)
    for number, layer in enumerate(model.model.layers):
        module = layer.mlp.experts
        assert isinstance(module, finegrained_fp8.FP8Experts)
        stored = rx.ExpertWeights.from_checkpoint(folder, number)
        x, index, scores = inputs(experts=stored.num_experts, hidden=stored.hidden_size)
        found = module(x, index, scores)  # as in model(tokens), gradients on
        assert asked.pop() == name
        assert torch.allclose(found, rx.run_experts(x, index, scores, stored, backend="eager"), rtol=1e-4, atol=1e-5)
        x.requires_grad_()
        module(x, index, scores).sum().backward()
        assert x.grad.abs().sum() > 0
        assert module.down_proj.grad is None
        asked.clear()


def test_switching_a_quantized_model(checkpoint, monkeypatch):
    model = load_as_on_a_gpu(checkpoint[0], "routed_experts_eager", monkeypatch)
    assert rx.get_experts_implementation(model) == {"": "eager"}
    rx.set_experts_implementation(model, "grouped_mm")
    assert model.get_experts_implementation() == {"": "routed_experts_grouped_mm"}
    rx.set_experts_implementation(model, "transformers:deepgemm")
    assert model.get_experts_implementation() == {"": "deepgemm"}


def test_a_quantized_model_with_bad_scales_is_not_switched(checkpoint, monkeypatch):
    """B43: where every scale of an expert loaded as zero."""
    model = load_as_on_a_gpu(checkpoint[0], "deepgemm", monkeypatch)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj_scale_inv[2] = 0
    with pytest.raises(rx.UnsupportedExperts, match=r"layers\.1") as caught:
        rx.set_experts_implementation(model, "grouped_mm")
    assert "down_proj_scale_inv" in caught.value.found
    assert model.get_experts_implementation() == {"": "deepgemm"}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_module_is_dispatched_here(kind, name, asked):
    module = build(kind)
    module.config._experts_implementation = prefixed(name)
    x, index, scores = inputs(experts=E, hidden=H)
    found = module(x, index, scores)
    assert asked == [name]
    wanted = rx.run_experts(x, index, scores, weights(kind), backend="eager")
    assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_backend_of_ones_own_reaches_both_registries():
    """A name that only one of them held would be valid for a quantized model and end in a KeyError."""
    module = build("blocks")
    x, index, scores = inputs(experts=E, hidden=H)
    rx.register_backend("mine", lambda experts, rows, *_: 2 * rows + experts.down_scale.sum())
    try:
        for registry in (moe.ALL_EXPERTS_FUNCTIONS, finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS):
            assert "routed_experts_mine" in registry
        rx.set_experts_implementation(module, "mine")
        wanted = 2 * x + weights("blocks").down_scale.sum()
        assert torch.allclose(module(x, index, scores), wanted)
    finally:
        rx.unregister_backend("mine")


def test_a_function_that_only_plain_experts_have_is_refused_when_it_is_set():
    """transformers' own check takes both registries together, and its forward then finds nothing."""
    module = build("blocks")
    moe.ExpertsInterface.register("plain_only", moe.grouped_mm_experts_forward)
    try:
        with pytest.raises(rx.UnknownBackend, match="plain_only"):
            rx.set_experts_implementation(module, "transformers:plain_only")
        with pytest.raises(rx.UnknownBackend):
            rx.set_experts_implementation(module, "plain_only")
        module.config._experts_implementation = "plain_only"
        with pytest.raises(KeyError):
            module(*inputs(experts=E, hidden=H))
    finally:
        del moe.ExpertsInterface._global_mapping["plain_only"]


def test_ids_of_other_ranks_contribute_nothing():
    module = build("blocks")
    module._is_expert_parallel = True
    module.config._experts_implementation = "routed_experts_grouped_mm"
    x, index, scores = inputs(experts=E, hidden=H)
    index[:, 1] = E
    wanted = rx.run_experts(x, index[:, :1], scores[:, :1], weights("blocks"), backend="eager")
    assert torch.allclose(module(x, index, scores), wanted, rtol=1e-4, atol=1e-5)
    assert (module(x, torch.full_like(index, E), scores) == 0).all()


def test_a_scheme_that_a_backend_does_not_run_is_named():
    """B42."""
    module = fp8.experts_class()(fp8.config(), block_size=BLOCK, activation_scheme="static")
    fp8.fill(module, weights("blocks"))
    module.config._experts_implementation = "routed_experts_grouped_mm"
    with pytest.raises(rx.UnsupportedScheme, match="static") as caught:
        module(*inputs(experts=E, hidden=H))
    assert caught.value.hint
