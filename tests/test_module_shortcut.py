"""The short way from a module to its weights gives what the long way gives, whatever was changed in between."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from moe_inputs import inputs
from torch import nn
from torch.nn.utils import parametrize

import routed_experts as rx
from routed_experts import module_weights
from routed_experts.errors import RoutedExpertsError

E, SIZE = 4, 8


def weight(*shape):
    return nn.Parameter(torch.randn(*shape) * 0.3)


def build(kind="stock"):
    """A module of a class of its own, so that the class may be changed too. H = I = 8: every layout fits."""

    class Base(nn.Module):
        pass

    class Experts(Base):
        def __init__(self, act_fn):
            super().__init__()
            self.num_experts = E
            self.gate_up_proj, self.down_proj = weight(E, 2 * SIZE, SIZE), weight(E, SIZE, SIZE)
            self.register_parameter("down_proj_bias", None)
            self.act_fn = act_fn
            self.has_gate = self.is_concatenated = True
            self.is_transposed = False

    if kind == "own gate":
        Experts._apply_gate = lambda self, up: up[:, ::2] * up[:, 1::2].tanh()
    if kind == "flags of the class":
        Experts.has_post_expert_norm = False
    module = Experts({"function": F.relu, "unnamed": nn.Softsign(), "own gate": nn.Tanh()}.get(kind, nn.SiLU()))
    if kind == "buffers and more":
        module.register_buffer("counts", torch.zeros(3))
        module.router = nn.Linear(2, 2)
    return module


KINDS = ("stock", "own gate", "flags of the class", "function", "unnamed", "buffers and more")


def outcome(module):
    """What a call gives, or what it says."""
    try:
        out = rx.run_experts(*inputs(hidden=SIZE), module)
    except RoutedExpertsError as error:
        return type(error), str(error)
    return out


def same(one, other):
    if isinstance(one, tuple) or isinstance(other, tuple):
        return one == other
    return torch.equal(one, other) and one.requires_grad == other.requires_grad


def long_way(module):
    """The outcome for a module that was never seen."""
    kept = module_weights._known.pop(module, None)
    try:
        return outcome(module)
    finally:
        module_weights._known.pop(module, None)
        if kept is not None:
            module_weights._known[module] = kept


@pytest.fixture
def long_ways(monkeypatch):
    """The modules that were read attribute by attribute."""
    modules = []

    def bind_anew(module, known):
        modules.append(module)
        return original(module, known)

    original = module_weights._bind_anew
    monkeypatch.setattr(module_weights, "_bind_anew", bind_anew)
    return modules


@pytest.mark.parametrize("kind", KINDS)
def test_the_short_way_is_taken(kind, long_ways):
    module = build(kind)
    wanted = outcome(module)
    assert same(outcome(module), wanted)
    assert same(outcome(module), wanted)
    assert len(long_ways) == 1


def test_ready_made_modules_take_it(long_ways):
    for module in (rx.RoutedExperts(E, SIZE, SIZE), rx.RoutedExperts(E, SIZE, SIZE, bias=True, has_gate=False)):
        for _ in range(3):
            module(*inputs(hidden=SIZE))
    assert len(long_ways) == 2


def parametrized(module):
    class Half(nn.Module):
        def forward(self, weight):
            return weight * 0.5

    parametrize.register_parametrization(module, "down_proj", Half())


def retyped(module):
    class Other(type(module)):
        def _apply_gate(self, up):
            return up[:, :SIZE].sin()

    module.__class__ = Other


def misaligned(module):
    data = torch.empty(E * SIZE * SIZE + 1)[1:].view(E, SIZE, SIZE)
    module.down_proj.data = data.copy_(module.down_proj.data)


def moved(module, name, group):
    value = module._parameters.pop(name)
    (module.__dict__ if group is None else getattr(module, group))[name] = value


def renamed(module):
    """As many names as before."""
    module.up_proj = module._parameters.pop("gate_up_proj")


class Tagged(torch.Tensor):
    pass


def own_gate(self, up):
    return up[:, SIZE:].cos()


def compute_down(self):
    return self._parameters["down_proj"] * 3


def tripled(self, name):
    value = nn.Module.__getattr__(self, name)
    return value * 3 if name == "down_proj" else value


CHANGES = {
    "another parameter": lambda m: setattr(m, "down_proj", weight(E, SIZE, SIZE)),
    "a parameter of another shape": lambda m: setattr(m, "down_proj", weight(E, SIZE, 3)),
    "other data": lambda m: setattr(m.down_proj, "data", torch.randn(E, SIZE, SIZE)),
    "data of another shape": lambda m: setattr(m.down_proj, "data", torch.randn(E, SIZE, 3)),
    "data of other strides": lambda m: setattr(m.down_proj, "data", m.down_proj.data.mT),
    "data of another dtype": lambda m: setattr(m.down_proj, "data", m.down_proj.data.half()),
    "data at another address": misaligned,
    "in place": lambda m: m.down_proj.data.mul_(2),
    "both weights narrower": lambda m: (
        setattr(m.gate_up_proj, "data", m.gate_up_proj.data[:, :8]),
        setattr(m.down_proj, "data", m.down_proj.data[:, :, :4]),
    ),
    "fewer experts than it says": lambda m: setattr(m.down_proj, "data", m.down_proj.data[: E - 1]),
    "cast": lambda m: m.to(torch.bfloat16),
    "moved to meta": lambda m: m.to("meta"),
    "frozen": lambda m: m.requires_grad_(False),
    "a subclass": lambda m: m._parameters.update(down_proj=m.down_proj.data.mul(2).as_subclass(Tagged)),
    "a bias where None was": lambda m: setattr(m, "down_proj_bias", weight(E, SIZE)),
    "a bias of the wrong shape": lambda m: setattr(m, "down_proj_bias", weight(E, 3)),
    "a new bias": lambda m: setattr(m, "gate_up_proj_bias", weight(E, 2 * SIZE)),
    "a parameter deleted": lambda m: delattr(m, "down_proj"),
    "a parameter set to None": lambda m: setattr(m, "down_proj", None),
    "a parameter that is a buffer now": lambda m: moved(m, "down_proj", "_buffers"),
    "a parameter that is an attribute now": lambda m: moved(m, "down_proj", None),
    "a parameter under another name": renamed,
    "a parametrization": parametrized,
    "a parametrization taken off": lambda m: (
        parametrized(m),
        outcome(m),
        parametrize.remove_parametrizations(m, "down_proj", leave_parametrized=True),
    ),
    "another activation": lambda m: setattr(m, "act_fn", nn.ReLU()),
    "an activation of the same kind": lambda m: setattr(m, "act_fn", nn.SiLU()),
    "a function for an activation": lambda m: (m._modules.pop("act_fn", None), setattr(m, "act_fn", torch.sin)),
    "an attribute over a submodule": lambda m: m.__dict__.update(act_fn=torch.cos),
    "no activation": lambda m: delattr(m, "act_fn"),
    "activation None": lambda m: setattr(m, "act_fn", None),
    "an approximate GELU": lambda m: (
        setattr(m, "act_fn", nn.GELU()),
        outcome(m),
        outcome(m),
        setattr(m.act_fn, "approximate", "tanh"),
    ),
    "other columns": lambda m: setattr(m, "is_concatenated", False),
    "other rows": lambda m: (
        setattr(m, "is_transposed", True),
        setattr(m.gate_up_proj, "data", m.gate_up_proj.data.mT.contiguous()),
    ),
    "a flag deleted": lambda m: (setattr(m, "is_concatenated", False), outcome(m), delattr(m, "is_concatenated")),
    "a flag that contradicts": lambda m: setattr(m, "has_gate", False),
    "another count": lambda m: setattr(m, "num_experts", E + 1),
    "scales": lambda m: setattr(m, "down_proj_scale_inv", torch.ones(E)),
    "scales as parameters": lambda m: setattr(m, "gate_up_proj_scale_inv", weight(E)),
    "a norm": lambda m: (setattr(m, "post_expert_norm", nn.RMSNorm(SIZE)), setattr(m, "has_post_expert_norm", True)),
    "a norm that is missing": lambda m: setattr(m, "has_post_expert_norm", True),
    "a norm that the class declares": lambda m: setattr(type(m), "has_post_expert_norm", True),
    "scales where a weight is computed": lambda m: (
        parametrized(m),
        outcome(m),
        setattr(m, "down_proj_scale_inv", torch.ones(E)),
    ),
    "another class": retyped,
    "a gate for the class": lambda m: setattr(type(m), "_apply_gate", own_gate),
    "a gate for a base": lambda m: setattr(type(m).__mro__[1], "_apply_gate", own_gate),
    "no gate in the class": lambda m: setattr(type(m), "_apply_gate", None),
    "a gate for the instance": lambda m: setattr(m, "_apply_gate", lambda up: up[:, :SIZE].exp()),
    "a property over a parameter": lambda m: setattr(type(m), "down_proj", property(compute_down)),
    "a property over a flag": lambda m: setattr(type(m), "is_concatenated", property(lambda self: False)),
    "a flag of the class": lambda m: (delattr(m, "is_concatenated"), setattr(type(m), "is_concatenated", False)),
    "a look-up of its own": lambda m: setattr(type(m), "__getattr__", tripled),
    "nothing": lambda m: setattr(m, "something_else", 1),
}


# What changes no number.
UNSEEN = (
    "nothing",
    "no gate in the class",
    "an activation of the same kind",
    "data at another address",
    "a parameter that is a buffer now",
    "a parameter that is an attribute now",
    "a flag deleted",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change, kind):
    torch.manual_seed(0)
    module = build(kind)
    before = outcome(module)
    assert same(outcome(module), before)
    CHANGES[change](module)
    after = outcome(module)
    wanted = long_way(module)
    assert same(after, wanted)
    assert same(outcome(module), wanted)
    if kind == "stock" and change not in UNSEEN:
        assert not same(after, before)


@pytest.mark.parametrize(
    "change",
    ["data at another address", "data of other strides", "both weights narrower", "cast", "a bias where None was"],
)
def test_what_was_found_out_goes_with_the_layout(change):
    module = build()
    outcome(module)
    first, again = module_weights.resolve(module), module_weights.resolve(module)
    CHANGES[change](module)
    other = module_weights.resolve(module)
    for name in ("_choices", "_prepared", "_plans"):
        assert getattr(again, name) is getattr(first, name)
        assert getattr(other, name) is not getattr(first, name)


def test_what_was_found_out_stays_while_the_layout_does(long_ways):
    module = build()
    first = module_weights.resolve(module)
    module.down_proj = weight(E, SIZE, SIZE)
    module.act_fn = nn.SiLU()
    module.something_else = 1
    for _ in range(2):
        assert module_weights.resolve(module)._plans is first._plans
    assert len(long_ways) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_keeps_what_was_replaced(kind):
    module = build(kind)
    for _ in range(2):
        outcome(module)
    things = [module.down_proj, module.act_fn]
    references = [weakref.ref(thing) for thing in things]
    gc.disable()
    try:
        module.down_proj = weight(E, SIZE, SIZE)
        module.act_fn = nn.Tanh()
        del things
        assert references[0]() is None
        assert kind == "function" or references[1]() is None
    finally:
        gc.enable()


def test_a_class_that_knows_its_module_can_be_freed():
    def make():
        module = build()
        type(module)._apply_gate = lambda self, up: (module, up[:, :SIZE])[1]
        for _ in range(2):
            outcome(module)
        return weakref.ref(module)

    reference = make()
    gc.collect()
    assert reference() is None
