"""Models under our registered names: values, gradients, sentinels, adapters, hooks, compiled whole."""

from __future__ import annotations

import pytest
import torch
from modules_oracle import experts_loop, routing
from test_models_transformers import SIZES, TOKENS, logits
from torch.nn.utils import parametrize
from transformers_models import BACKENDS, BUILD, build_text, prefixed

import routed_experts as rx
from routed_experts.transformers_integration import forward_for

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("family", BUILD)
def test_logits_equal_the_models_own(family, asked):
    model = BUILD[family]()
    model.set_experts_implementation("eager")
    wanted = logits(model)
    for name in BACKENDS:
        asked.clear()
        model.set_experts_implementation(prefixed(name))
        assert (logits(model) - wanted).abs().max().item() < 1e-4
        assert asked == [name] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpointed_training_has_eagers_gradients(backend):
    calls = []

    def checkpoint(*args):
        calls.append(1)
        return torch.utils.checkpoint.checkpoint(*args, use_reentrant=False)

    model = build_text().train()
    grads = {}
    for name in ("eager", prefixed(backend)):
        model.set_experts_implementation(name)
        for module in (m for m in model.modules() if hasattr(m, "gradient_checkpointing")):
            module.gradient_checkpointing = True
            module._gradient_checkpointing_func = checkpoint
        model.zero_grad()
        model(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        grads[name] = {name: p.grad.clone() for name, p in model.named_parameters()}
    wanted, found = grads.values()
    assert len(calls) == 2 * SIZES["num_hidden_layers"]
    for name, grad in wanted.items():
        assert (found[name] - grad).abs().max().item() <= 1e-4 * max(grad.abs().max().item(), 1e-4), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_on_expert_weights_learn(backend):
    """B74 by a parametrization, under our names."""

    class LowRank(torch.nn.Module):
        def __init__(self, like):
            super().__init__()
            self.a = torch.nn.Parameter(torch.randn(*like.shape[:2], 2) / 8)
            self.b = torch.nn.Parameter(torch.randn(like.shape[0], 2, like.shape[2]) / 8)

        def forward(self, weight):
            return weight + self.a @ self.b

    model = build_text()
    experts = model.model.layers[0].mlp.experts
    adapter = LowRank(experts.gate_up_proj)
    parametrize.register_parametrization(experts, "gate_up_proj", adapter)
    grads = []
    for name in ("eager", prefixed(backend)):
        model.set_experts_implementation(name)
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        grads.append(torch.autograd.grad(loss, [adapter.a, adapter.b]))
    for wanted, found in zip(*grads, strict=True):
        assert wanted.abs().max().item() > 1e-4
        assert (found - wanted).abs().max().item() < 1e-4 * wanted.abs().max().item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_other_ranks_contribute_nothing(backend, monkeypatch):
    monkeypatch.setenv("ROUTED_EXPERTS_CHECKED", "1")
    experts = build_text().model.layers[0].mlp.experts
    x, index, weights = routing(7, 2, 6, 32)
    index[::2, 0], index[1, 1] = 6, -1
    wanted = experts_loop(experts, lambda u: experts._apply_gate(u), x, index, weights)
    forward = forward_for(prefixed(backend))
    with pytest.raises(rx.ExpertIndexError):
        forward(experts, x, index, weights)
    experts._is_expert_parallel = True
    for split in range(2):
        found = forward(experts, x, index, weights)
        assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-5
        if not split:
            del experts._is_expert_parallel  # before 5.18 nothing says whether experts are split


def test_forward_takes_the_keywords_of_every_family():
    experts = build_text().model.layers[0].mlp.experts
    x, index, weights = routing(7, 2, 6, 32)
    forward = forward_for("eager")
    wanted = forward(experts, x, index, weights)
    assert torch.equal(forward(experts, x, top_k_weights=weights, top_k_index=index), wanted)
    assert torch.equal(forward(experts, x, routing_weights=weights, router_indices=index), wanted)
    assert torch.equal(forward(experts, x, index, weights, process_group=None), wanted)
    with pytest.raises(TypeError, match="bogus"):
        forward(experts, x, index, weights, bogus=1)


def test_a_hook_around_the_forward_stays(asked):
    """As offloading does: the instance's forward brings the weights, runs the class's, and takes them away."""
    model = build_text()
    model.set_experts_implementation("eager")
    wanted = logits(model)
    calls = []
    for layer in model.model.layers:
        experts = layer.mlp.experts
        weights, inner = dict(experts.named_parameters()), experts.forward
        for name in weights:
            experts._parameters[name] = torch.nn.Parameter(weights[name].to("meta"))

        def forward(*args, experts=experts, weights=weights, inner=inner, **kwargs):
            calls.append(1)
            away = dict(experts._parameters)
            experts._parameters.update(weights)
            try:
                return inner(*args, **kwargs)
            finally:
                experts._parameters.update(away)

        experts.forward = forward
    for name in BACKENDS:
        rx.set_experts_implementation(model, name)
        assert (logits(model) - wanted).abs().max().item() < 1e-4
    assert asked == [name for name in BACKENDS for _ in range(2)]
    assert len(calls) == 2 * len(BACKENDS)


@pytest.mark.parametrize("offloaded", [("gate_up_proj", "down_proj"), ("down_proj",), ("gate_up_proj",)])
def test_offloaded_weights_are_named_with_their_devices(offloaded):
    model = build_text()
    model.set_experts_implementation("routed_experts_batched_mm")
    experts = model.model.layers[0].mlp.experts
    for name in offloaded:
        experts._parameters[name] = torch.nn.Parameter(getattr(experts, name).to("meta"))
    with pytest.raises(rx.DeviceError) as caught:
        logits(model)
    text = str(caught.value)
    assert offloaded[0] in text
    assert "meta" in text
    assert "cpu" in text


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_gives_eagers_logits(backend):
    torch.compiler.reset()
    model = build_text(num_hidden_layers=1)
    model.set_experts_implementation("eager")
    wanted = logits(model)
    model.set_experts_implementation(prefixed(backend))
    model.forward = torch.compile(model.forward, mode="max-autotune-no-cudagraphs")
    assert (logits(model) - wanted).abs().max().item() < 1e-4
