"""Adapters on the experts of families of every layout, and the families without the library's decorator."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from family_compare import GRADIENT, NAMED, OUTPUT, TOKENS, assert_equal, backends_for, error, errors, run, scaled
from family_configs import build
from torch import Tensor, nn
from torch.nn.utils import parametrize

import routed_experts as rx
from routed_experts.errors import UnsupportedExperts
from routed_experts.parts import parts_of


class LowRank(nn.Module):
    """weight + A @ B, of rank 2, with fixed A and B."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(*like.shape[:2], 2, generator=generator) / 8)
        self.b = nn.Parameter(torch.randn(like.shape[0], 2, like.shape[2], generator=generator) / 8)

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.a @ self.b


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h", "muse_spark", "deepseek_v4", "gemma4"])
def test_adapters_on_expert_weights_learn_alike(family):
    """B74 in every layout: A and B on both weights get the model's own eager gradients from each backend."""
    model = build(family)
    modules = [experts.module for experts in parts_of(model).experts()]
    leaves = [p for module in modules for p in adapt(module)]
    wanted: list[Tensor] = []
    for backend in ["transformers:eager", *backends_for(modules[0])]:
        rx.set_experts_implementation(model, backend)
        output = model(input_ids=TOKENS)[0]
        noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        found = torch.autograd.grad((output * noise).sum(), leaves)
        wanted = wanted or list(found)
        assert max(map(error, found, wanted)) < GRADIENT, backend


def adapt(module: nn.Module) -> Iterator[nn.Parameter]:
    """Put a low-rank adapter on each 3-D weight, and give its parameters."""
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        weight = getattr(module, name, None)
        if weight is not None:
            adapter = LowRank(weight)
            parametrize.register_parametrization(module, name, adapter)
            yield from adapter.parameters()


def test_an_undecorated_family_whose_weights_fit_runs():
    """step3p7: a gate of its own that clamps behind the activation, and no flags at all."""
    model = build("step3p7")
    wanted = run(model)
    for backend in ("auto", *sorted(NAMED)):
        rx.set_experts_implementation(model, backend)
        assert set(rx.get_experts_implementation(model).values()) == {backend}
        assert_equal(run(model), wanted)
    with scaled([experts.module for experts in parts_of(model).experts()], 1.0):
        assert errors(run(model), wanted)["output"] > 5 * OUTPUT


@pytest.mark.parametrize(
    ("family", "class_name", "reason"),
    [
        ("dbrx", "DbrxExperts", "no experts that can be switched"),
        ("jetmoe", "JetMoeParallelExperts", "no experts that can be switched"),
        ("llama4", "Llama4TextExperts", "not called as routed experts"),
        ("longcat_flash", "LongcatFlashExperts", "no experts that can be switched"),
    ],
)
def test_an_undecorated_family_of_another_layout_is_refused(family, class_name, reason):
    model = build(family)
    wanted = model(input_ids=TOKENS)[0]
    for backend in ("auto", "grouped_mm"):
        with pytest.raises(UnsupportedExperts, match=reason) as refused:
            rx.set_experts_implementation(model, backend)
        assert class_name in refused.value.found
        assert refused.value.needed
        assert refused.value.hint
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model(input_ids=TOKENS)[0], wanted)
