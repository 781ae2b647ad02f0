"""Gates of a module that are ours, while the module changes and while it is compiled."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from modules_oracle import experts_loop
from oracle import relative_error
from torch import nn
from toy_families import CLAMPED, INNER, OAI, TANH, assert_right, large, toy

import routed_experts as rx
from routed_experts import known_gates, module_weights
from routed_experts.module_weights import resolve


def doubled(self, gate_up):
    return 2 * gate_up.chunk(2, dim=-1)[0]


def elsewhere(self, gate_up):
    """A formula that is ours, in a file that is no family's."""
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


def posing(module):
    cls = type(module)
    elsewhere.__module__, elsewhere.__qualname__ = cls.__module__, cls._apply_gate.__qualname__
    cls._apply_gate = elsewhere


def retyped(module):
    module.__class__ = type("Other", (type(module),), {"_apply_gate": doubled})


def retyped_under_the_same_name(module):
    cls = type(module)
    module.__class__ = type(cls.__name__, (cls,), {"_apply_gate": functools.wraps(cls._apply_gate)(doubled)})
    module.__class__.__module__ = cls.__module__


STAYS = {
    "a method of the instance": lambda m: setattr(m, "_apply_gate", types.MethodType(doubled, m)),
    "a wrapped method of the instance": lambda m: setattr(
        m, "_apply_gate", functools.wraps(m._apply_gate)(lambda up: doubled(m, up))
    ),
    "a method of the class": lambda m: setattr(type(m), "_apply_gate", doubled),
    "a wrapped method of the class": lambda m: setattr(
        type(m), "_apply_gate", functools.wraps(type(m)._apply_gate)(doubled)
    ),
    "a method from elsewhere": lambda m: setattr(type(m), "_apply_gate", elsewhere),
    "a method from elsewhere under the same name": posing,
    "a subclass with a method from elsewhere": lambda m: setattr(
        m, "__class__", type("Other", (type(m),), {"_apply_gate": elsewhere})
    ),
    "a subclass": retyped,
    "a subclass under the same name": retyped_under_the_same_name,
    "a limit per column": lambda m: setattr(m, "limit", torch.linspace(0.1, 0.6, INNER, dtype=torch.float64)),
    "a limit that is a parameter": lambda m: (delattr(m, "limit"), setattr(m, "limit", nn.Parameter(torch.ones(())))),
    "an infinite limit": lambda m: setattr(m, "limit", float("inf")),
    "a negative limit": lambda m: setattr(m, "limit", -0.25),
    "a limit that is True": lambda m: setattr(m, "limit", True),
    "an unknown activation": lambda m: setattr(m, "act_fn", nn.Softsign()),
}


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("change", STAYS)
def test_what_is_no_longer_ours_is_left_alone(change, seen, monkeypatch):
    module = toy(monkeypatch, CLAMPED)
    if seen:
        assert_right(module)
        assert resolve(module).gate is None
    STAYS[change](module)
    if change == "a limit per column":
        module.double()
        assert resolve(module).gate == module._apply_gate
        return
    assert_right(module)
    assert resolve(module).gate == module._apply_gate


CHANGES = {
    "limit": lambda m: setattr(m, "limit", 0.125),
    "a whole limit": lambda m: setattr(m, "limit", 1),
    "limit 0": lambda m: setattr(m, "limit", 0.0),
    "alpha": lambda m: setattr(m, "alpha", -2.0),
    "another activation": lambda m: setattr(m, "act_fn", nn.ReLU()),
    "an activation that changes": lambda m: (
        setattr(m, "act_fn", nn.GELU()),
        assert_right(m),
        setattr(m.act_fn, "approximate", "tanh"),
    ),
    "and back": lambda m: (setattr(m, "act_fn", nn.Softsign()), assert_right(m), setattr(m, "act_fn", nn.ReLU())),
    "a limit of the class": lambda m: (delattr(m, "limit"), setattr(type(m), "limit", 0.25)),
    "a limit that is computed": lambda m: setattr(type(m), "limit", property(lambda self: self.num_experts / 16)),
    "a flag that the gate does not heed": lambda m: setattr(m, "is_concatenated", not m.is_concatenated),
    "a subclass that inherits": lambda m: setattr(m, "__class__", type("Other", (type(m),), {})),
}


@pytest.mark.parametrize("body", [CLAMPED, OAI], ids=["clamped", "OAI"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_the_first_call_are_seen(change, body, monkeypatch):
    module = toy(monkeypatch, body)
    assert_right(module)
    before = resolve(module)
    CHANGES[change](module)
    assert_right(module)
    after = resolve(module)
    assert after.gate is None
    assert after.is_concatenated is before.is_concatenated
    if change in ("limit", "a whole limit", "limit 0"):
        assert after.swiglu_limit == module.limit
        assert after._plans is not before._plans


def test_a_number_that_becomes_an_array_is_asked_nothing(monkeypatch):
    module = toy(monkeypatch, CLAMPED)
    assert_right(module)
    module.limit = torch.full((INNER,), 0.25)
    assert resolve(module).gate == module._apply_gate
    module.limit = torch.full((INNER,), 0.25).numpy()
    assert resolve(module).gate == module._apply_gate


@pytest.mark.parametrize("body", [CLAMPED, OAI, TANH], ids=["clamped", "OAI", "own"])
def test_a_method_is_looked_into_once(body, monkeypatch):
    counts = {"_formula": 0, "_bind_anew": 0}

    def count(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (counts.update({name: counts[name] + 1}), original(*args))[1])

    count(known_gates, "_formula")
    count(module_weights, "_bind_anew")
    module = toy(monkeypatch, body)
    for _ in range(5):
        rx.run_experts(*large(module), module)
    assert counts == {"_formula": 1, "_bind_anew": 1}
    module.limit = 0.75
    for _ in range(5):
        rx.run_experts(*large(module), module)
    assert counts == {"_formula": 1, "_bind_anew": 1 if "tanh" in body else 2}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("body", [CLAMPED, OAI], ids=["clamped", "OAI"])
def test_compiled_auto_is_one_operator(body, dynamic, monkeypatch):
    """A module that nobody has seen before; its numbers and its own gate are watched."""
    torch.compiler.reset()
    graphs = []

    def look(graph, _examples):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    module = toy(monkeypatch, body)
    compiled = torch.compile(lambda *args: rx.run_experts(*args, module), backend=look, fullgraph=True, dynamic=dynamic)
    x, index, weights = large(module)
    with torch.no_grad():
        for limit in (0.5, 0.125, 0.25, 1):
            module.limit = limit
            wanted = experts_loop(module, module._apply_gate, x, index, weights)
            assert relative_error(compiled(x, index, weights), wanted) < 1e-5
        assert all(any("routed_experts.run" in target for target in graph) for graph in graphs)
        module._apply_gate = types.MethodType(doubled, module)
        wanted = experts_loop(module, module._apply_gate, x, index, weights)
        assert relative_error(compiled(x, index, weights), wanted) < 1e-5
    assert not any("routed_experts.run" in target for target in graphs[-1])


@pytest.mark.parametrize("body", [CLAMPED, OAI], ids=["clamped", "OAI"])
def test_compiled_gradients(body, monkeypatch):
    torch.compiler.reset()
    module = toy(monkeypatch, body)
    compiled = torch.compile(lambda *args: rx.run_experts(*args, module), backend="aot_eager", fullgraph=True)
    found, wanted = (
        torch.autograd.grad(run(*large(module)).square().sum(), list(module.parameters()))
        for run in (compiled, lambda *args: experts_loop(module, module._apply_gate, *args))
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative_error(ours, theirs) < 2e-5
