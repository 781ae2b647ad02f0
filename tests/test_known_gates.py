"""Families' own gates that are ours: which they are, that they give the same bits, and what undoes it."""

from __future__ import annotations

import functools

import pytest
import torch
from family_configs import UNDECORATED, build, has_own_gate, installed
from modules_oracle import experts_loop
from oracle import relative_error
from torch import nn
from toy_families import CLAMPED, CLAMPS, HALVES, OAI, PAIRS, assert_right, large, toy

import routed_experts as rx
from routed_experts import known_gates
from routed_experts.gates import apply_gate
from routed_experts.module_weights import resolve
from routed_experts.parts import parts_of

# (swiglu_limit, swiglu_alpha, is_concatenated) where the library's defaults are used.
RECOGNISED = {
    "deepseek_v4": (10.0, None, True),
    "glm5_next": (10.0, None, True),
    "gpt_oss": (7.0, 1.702, False),
    "hy_v4": (10.0, None, True),
    "hy_v4_vl": (10.0, None, True),
    "minimax_m3_vl": (7.0, 1.702, True),
    "openai_privacy_filter": (7.0, 1.702, True),
}
# In float32 whatever the dtype; softcapped; clamped behind the activation.
OWN = ("beam", "inkling2", "inkling2_loop", "step3p7")
HERE = [name for name in RECOGNISED if name in installed()]


@functools.cache
def experts_of(family):
    return next(parts_of(build(family)).experts()).module


def rows(inner, dtype):
    """(rows, 2I): every pair of values within, at and beyond the clamps, of both signs, infinities and NaN."""
    values = torch.tensor([0.0, 1e-6, 0.3, 1.0, 6.99, 7.0, 7.01, 9.99, 10.0, 30.0, 1e4, float("inf")])
    values = torch.cat([values, -values, torch.tensor([float("nan")])])
    pairs = torch.cartesian_prod(values, values)
    count = pairs.shape[0] // inner * inner
    gate, up = pairs[:count].reshape(-1, inner, 2).unbind(-1)
    return [u.to(dtype) for u in (torch.cat([gate, up], -1), torch.stack([gate, up], -1).flatten(-2))]


def test_the_list():
    assert HERE
    assert {name for name in installed() if has_own_gate(name)} <= {*RECOGNISED, *OWN}


@pytest.mark.parametrize("family", HERE)
def test_a_gate_that_we_have_is_described(family):
    experts = rx.ExpertWeights.from_module(experts_of(family))
    assert (experts.gate, experts.own_gate, experts.activation_name) == (None, False, "silu")
    assert (experts.swiglu_limit, experts.swiglu_alpha, experts.is_concatenated) == RECOGNISED[family]


@pytest.mark.parametrize("family", [name for name in OWN if name in installed() or name in UNDECORATED])
def test_a_gate_that_we_do_not_have_stays(family):
    module = experts_of(family)
    experts = rx.ExpertWeights.from_module(module)
    assert experts.gate == module._apply_gate
    assert (experts.swiglu_limit, experts.swiglu_alpha) == (None, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", HERE)
def test_bits_and_gradients_are_the_familys(family, dtype):
    module = experts_of(family)
    for up in rows(16, dtype):
        results = []
        for gate in (module._apply_gate, lambda u: apply_gate(resolve(module), u)):
            leaf = up.clone().requires_grad_()
            out = gate(leaf)
            noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
            results.append((out.detach(), *torch.autograd.grad(out, leaf, noise)))
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


ACCEPTED = {
    "clamped": (CLAMPED, (0.5, None, True)),
    "clamped pairs": (f"{PAIRS}; {CLAMPS}; return up * self.act_fn(gate)", (0.5, None, False)),
    "silu": (f"{HALVES}; {CLAMPS}; return F.silu(gate) * up", (0.5, None, True)),
    "OAI": (OAI, (0.5, 1.25, False)),
    "OAI in halves": (OAI.replace(PAIRS, HALVES), (0.5, 1.25, True)),
    "OAI unclamped": (f"{PAIRS}; return (up + 1) * (gate * torch.sigmoid(self.alpha * gate))", (None, 1.25, False)),
    "unclamped": (f"{PAIRS}; return self.act_fn(gate) * up", (None, None, False)),
    "other names": (CLAMPED.replace("self.limit", "self.alpha"), (1.25, None, True)),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_formulas_that_are_ours(case, monkeypatch):
    body, wanted = ACCEPTED[case]
    module = toy(monkeypatch, body)
    experts = resolve(module)
    assert experts.gate is None
    assert (experts.swiglu_limit, experts.swiglu_alpha, experts.is_concatenated) == wanted
    assert_right(module)


REFUSED = {
    "no lower clamp": CLAMPED.replace("min=-self.limit, ", ""),
    "a lower clamp of the gate": CLAMPED.replace("gate.clamp(max", "gate.clamp(min=-self.limit, max"),
    "a lower clamp that is not the negative": CLAMPED.replace("min=-self.limit", "min=-self.alpha"),
    "clamped behind": f"{HALVES}; return self.act_fn(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)",
    "a number for the limit": CLAMPED.replace("max=self.limit", "max=0.5"),
    "halves exchanged": CLAMPED.replace("gate, up =", "up, gate ="),
    "the activation of the linear half": CLAMPED.replace("self.act_fn(gate) * up", "gate * self.act_fn(up)"),
    "minus one": OAI.replace("(up + 1)", "(up + -1)"),
    "another offset": OAI.replace("(up + 1)", "(up + 1.0001)"),
    "no offset": OAI.replace("(up + 1)", "up"),
    "another order": OAI.replace("(up + 1) * (gate * torch", "(up + 1) * gate * (torch"),
    "tanh": OAI.replace("sigmoid", "tanh"),
    "no alpha": OAI.replace("gate * self.alpha", "gate"),
    "a cast": CLAMPED.replace("self.act_fn(gate) * up", "(self.act_fn(gate.float()) * up.float()).to(gate.dtype)"),
    "in place": CLAMPED.replace("self.act_fn(gate)", "F.silu(gate, inplace=True)"),
    "every third column": OAI.replace("::2], gate_up[..., 1::2]", "::3], gate_up[..., 1::3]"),
    "rows for columns": CLAMPED.replace("dim=-1", "dim=0"),
    "a branch on the value": CLAMPED.replace("return", "return gate if gate.is_cuda else"),
    "a branch on the shape": CLAMPED.replace("return", "return gate if gate.shape[0] > 9 else"),
    "a branch on an attribute": CLAMPED.replace("return", "return gate if self.limit is None else"),
    "a branch on the mode": CLAMPED.replace("return", "return gate if torch.is_inference_mode_enabled() else"),
    "no gradient": CLAMPED.replace("; return", "; with torch.no_grad(): return"),
    "a helper, which may branch": CLAMPED.replace("self.act_fn(gate)", "helper(gate)"),
    "an import": CLAMPED.replace("; return", "; from torch import nn; return"),
    "a lambda": CLAMPED.replace("self.act_fn(gate)", "(lambda x: self.act_fn(x))(gate)"),
    "both halves to the activation": f"{HALVES}; return self.act_fn(gate, up)",
    "a question": CLAMPED.replace("* up", "* up * (gate == up)"),
    "a class of its own": CLAMPED.replace("self.act_fn(gate)", "Act()(gate)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_formulas_that_are_not(case, monkeypatch):
    assert REFUSED[case] not in (CLAMPED, OAI)
    module = toy(monkeypatch, REFUSED[case])
    assert known_gates.formula_of(type(module)) is None
    experts = resolve(module)
    assert experts.gate == module._apply_gate
    assert (experts.swiglu_limit, experts.swiglu_alpha, experts.is_concatenated) == (None, None, True)


@pytest.mark.parametrize("package", ["transformer", "nottransformers", "transformers.models.x"])
def test_other_packages_keep_theirs(package, monkeypatch):
    module = toy(monkeypatch, CLAMPED, package=package)
    assert resolve(module).gate == module._apply_gate


def test_a_class_that_is_not_the_files_keeps_its_own(monkeypatch):
    module = toy(monkeypatch, CLAMPED)
    impostor = type("ToyExperts", (nn.Module,), {"_apply_gate": type(module)._apply_gate})
    impostor.__module__ = type(module).__module__
    assert known_gates.formula_of(impostor) is None
    assert known_gates.formula_of(type(module)) is not None


def test_no_tensor_is_made(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    module = toy(monkeypatch, OAI)
    with Refuse(), torch.device("meta"):
        assert known_gates.known_gate(module) == known_gates.KnownGate("silu", 0.5, 1.25, False)


def test_weights_of_a_module_can_be_stored(monkeypatch, tmp_path):
    """They are plain data where the module brings no activation of its own."""
    module = toy(monkeypatch, OAI)
    rx.ExpertWeights.from_module(module).save_checkpoint(tmp_path)
    read = rx.ExpertWeights.from_checkpoint(tmp_path)
    assert (read.swiglu_limit, read.swiglu_alpha, read.is_concatenated) == (0.5, 1.25, False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets the kernels on the CPU")
@pytest.mark.parametrize("body", [CLAMPED, OAI, REFUSED["tanh"]], ids=["clamped", "OAI", "own"])
def test_the_fused_kernels_run_it_in_one(body, monkeypatch):
    pytest.importorskip("triton", reason="Triton is not installed")
    from routed_experts.backends import fused
    from routed_experts.kernels import fused as kernels

    module = toy(monkeypatch, body)
    calls = []
    run = kernels.run_fused
    monkeypatch.setattr(kernels, "run_fused", lambda *args: (calls.append(args), run(*args))[1])
    x, index, weights = large(module)
    with torch.no_grad():
        wanted = experts_loop(module, module._apply_gate, x, index, weights)
        assert relative_error(fused.run(resolve(module), x, index, weights), wanted) < 1e-5
    assert len(calls) == (0 if "tanh" in body else 1)
