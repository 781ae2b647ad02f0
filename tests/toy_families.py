"""Experts classes that stand where a family of transformers has its own: in a modeling file of that package."""

from __future__ import annotations

import itertools
import sys
from types import ModuleType

import pytest
import torch
from family_compare import backends_for
from modules_oracle import experts_loop
from moe_inputs import inputs
from oracle import relative_error
from torch import nn

import routed_experts as rx

EXPERTS, HIDDEN, INNER = 4, 8, 6

_SOURCE = """
import torch
from torch import nn
from torch.nn import functional as F

def helper(x):
    return F.silu(x)

class Act(nn.SiLU):
    pass

class ToyExperts(nn.Module):
    def __init__(self, act_fn):
        super().__init__()
        self.num_experts, self.limit, self.alpha, self.act_fn = {experts}, 0.5, 1.25, act_fn
        self.has_gate = self.is_concatenated = True
        self.is_transposed = False
        self.gate_up_proj = nn.Parameter(torch.randn({experts}, 2 * {inner}, {hidden}))
        self.down_proj = nn.Parameter(torch.randn({experts}, {hidden}, {inner}))

    def _apply_gate(self, gate_up):
        {body}
"""

HALVES = "gate, up = gate_up.chunk(2, dim=-1)"
PAIRS = "gate, up = gate_up[..., ::2], gate_up[..., 1::2]"
CLAMPS = "gate = gate.clamp(max=self.limit); up = up.clamp(min=-self.limit, max=self.limit)"
CLAMPED = f"{HALVES}; {CLAMPS}; return self.act_fn(gate) * up"
OAI = f"{PAIRS}; {CLAMPS}; return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))"

TANH = OAI.replace("sigmoid", "tanh")

_numbers = itertools.count()


def toy(
    monkeypatch: pytest.MonkeyPatch, body: str, act_fn: object = None, *, package: str = "transformers"
) -> nn.Module:
    """An experts module whose class, of a modeling file of its own, has this body for a gate."""
    name = f"toy{next(_numbers)}"
    home = ModuleType(f"{package}.models.{name}.modeling_{name}")
    monkeypatch.setitem(sys.modules, home.__name__, home)
    source = _SOURCE.format(experts=EXPERTS, hidden=HIDDEN, inner=INNER, body=body.replace("; ", "\n        "))
    exec(compile(source, home.__name__, "exec"), home.__dict__)
    torch.manual_seed(0)
    return home.ToyExperts(nn.SiLU() if act_fn is None else act_fn)


def large(module, dtype=torch.float32):
    """Inputs whose products reach the clamps."""
    x, index, weights = inputs(7, 3, module.num_experts, HIDDEN)
    return 4 * x.to(dtype), index, weights


def assert_right(module, gate=None):
    """Every backend gives what the module's own gate gives in float64, on the short way and the long one."""
    gate = gate or module._apply_gate
    x, index, weights = large(module)
    with torch.no_grad():
        wanted = experts_loop(module, gate, x, index, weights)
        for backend in backends_for(module, 3):
            for _ in range(2):
                assert relative_error(rx.run_experts(x, index, weights, module, backend=backend), wanted) < 1e-5, (
                    backend
                )
