"""pytest plugin: the library's shared experts test becomes a test of numbers.

As it is, experts' outputs lie four orders below the residual stream and under its tolerances: it passes with
outputs times 0. Its two helpers against flakiness are replaced: experts are drawn at unit gain, norms keep
their epsilon.
"""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


def draw_unit_gain(model: nn.Module) -> None:
    """Redraw every experts module's weights as normal / sqrt(fan-in), its biases as 0.1 * normal."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if not (hasattr(module, "has_gate") and hasattr(module, "down_proj")):
            continue
        for name in WEIGHTS + BIASES:
            parameter = getattr(module, name, None)
            if parameter is None:
                continue
            fan_in = parameter.shape[-2] if module.is_transposed else parameter.shape[-1]
            gain = 0.1 if name in BIASES else fan_in**-0.5
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Replace the helpers in every loaded copy of the shared test module; none is a mistake of the run."""
    shared = [module for name, module in sys.modules.items() if name.endswith("test_modeling_common")]
    for module in shared:
        assert hasattr(module, "set_model_for_less_flaky_test"), f"{module.__name__} has no such helper any more"
        module.set_model_for_less_flaky_test = draw_unit_gain
        module.set_config_for_less_flaky_test = lambda config: None
    if not shared:
        raise pytest.UsageError("harden_experts: test_modeling_common was not imported")
    print(f"peer suite: experts at unit gain in {len(shared)} shared test module(s)")
