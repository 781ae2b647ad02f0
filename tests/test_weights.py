"""ExpertWeights: what it holds, what it refuses, and what it reads from a module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from oracle import experts_oracle, relative_error
from torch import nn

import routed_experts as rx
from routed_experts import gates


def tensors(experts=3, hidden=4, inner=5, **extra):
    return {
        "gate_up_proj": torch.randn(experts, 2 * inner, hidden),
        "down_proj": torch.randn(experts, hidden, inner),
    } | extra


def test_holds_the_very_tensors():
    given = tensors()
    weights = rx.ExpertWeights(**given)
    assert weights.gate_up_proj is given["gate_up_proj"]
    assert weights.down_proj is given["down_proj"]
    assert (weights.num_experts, weights.hidden_size, weights.intermediate_size) == (3, 4, 5)
    assert weights.has_gate
    assert not weights.has_bias


def test_is_frozen():
    weights = rx.ExpertWeights(**tensors())
    with pytest.raises(AttributeError, match="frozen"):
        weights.activation = "relu"
    with pytest.raises(AttributeError):
        weights.down_proj = None
    with pytest.raises(AttributeError):
        del weights.activation


def test_copies_and_pickles():
    weights = rx.ExpertWeights(**tensors(), activation="gelu", swiglu_limit=2.0)
    for other in (copy.deepcopy(weights), pickle.loads(pickle.dumps(weights))):
        assert torch.equal(other.down_proj, weights.down_proj)
        assert other.activation == "gelu"
        assert other.swiglu_limit == 2.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"up_proj": torch.randn(3, 5, 4)},
        {"gate_up_proj": None},
        {"down_proj": None},
        {"gate_up_proj": torch.randn(3, 9, 4)},
        {"gate_up_proj": torch.randn(3, 10, 5)},
        {"gate_up_proj": torch.randn(2, 10, 4)},
        {"gate_up_proj": torch.randn(30, 4)},
        {"is_transposed": True},
        {"has_gate": False},
        {"num_experts": 4},
        {"gate_up_proj_bias": torch.randn(3, 5)},
        {"down_proj_bias": torch.randn(3, 5)},
        {"up_proj_bias": torch.randn(3, 10)},
        {"activation": "sillu"},
        {"activation": "relu", "swiglu_alpha": 1.7},
        {"gate": torch.relu, "swiglu_limit": 1.0},
        {"swiglu_limit": -1.0},
        {"swiglu_limit": float("nan")},
        {"gate_up_proj": torch.randn(3, 0, 4), "down_proj": torch.randn(3, 4, 0)},
    ],
    ids=lambda wrong: "-".join(wrong),
)
def test_refuses_contradictions(wrong):
    with pytest.raises(rx.LayoutError) as caught:
        rx.ExpertWeights(**(tensors() | wrong))
    assert caught.value.found
    assert caught.value.needed


def test_unknown_activation_suggests():
    with pytest.raises(ValueError, match="did you mean 'silu'"):
        rx.ExpertWeights(**tensors(), activation="sillu")


def test_gate_arguments_need_a_gate():
    for extra in ({"gate": torch.relu}, {"swiglu_limit": 1.0}, {"swiglu_alpha": 1.0}):
        with pytest.raises(rx.LayoutError):
            rx.ExpertWeights(up_proj=torch.randn(3, 5, 4), down_proj=torch.randn(3, 4, 5), **extra)


@pytest.mark.parametrize(
    "wrong",
    [{"down_proj": torch.randn(3, 4, 5).bfloat16()}, {"down_proj": [1]}, {"activation": None}, {"gate": 3}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_refuses_wrong_types(wrong):
    with pytest.raises(TypeError):
        rx.ExpertWeights(**(tensors() | wrong))


def test_refuses_devices_that_differ():
    with pytest.raises(RuntimeError, match="gate_up_proj on cpu, down_proj on meta"):
        rx.ExpertWeights(**tensors(down_proj=torch.empty(3, 4, 5, device="meta")))


@pytest.mark.parametrize(
    ("quantized", "error"),
    [
        ({"gate_up_proj": torch.zeros(3, 10, 4, dtype=torch.int8)}, NotImplementedError),
        ({"down_proj": torch.zeros(3, 4, 5).to(torch.float8_e4m3fn)}, NotImplementedError),
        ({"gate_up_proj_scale_inv": torch.ones(3, 1, 1)}, ValueError),
        ({"down_proj_activation_scale": torch.ones(3)}, ValueError),
        ({"quantization": "fp8_block"}, TypeError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_what_looks_quantized_needs_its_scheme(quantized, error):
    with pytest.raises(error) as caught:
        rx.ExpertWeights(**(tensors() | quantized))
    assert caught.value.hint


def test_two_i_equal_h_is_not_guessed():
    """Both orientations have the same shapes here; the flag decides."""
    x, index, w = torch.randn(3, 4), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    given = {"gate_up_proj": torch.randn(2, 4, 4), "down_proj": torch.randn(2, 4, 2)}
    flipped = {
        "gate_up_proj": given["gate_up_proj"],
        "down_proj": given["down_proj"].transpose(1, 2).contiguous(),
    }
    straight = rx.run_experts(x, index, w, rx.ExpertWeights(**given))
    turned = rx.run_experts(x, index, w, rx.ExpertWeights(**flipped, is_transposed=True))
    assert relative_error(straight, experts_oracle(x, index, w, given, {})) < 1e-5
    assert relative_error(turned, experts_oracle(x, index, w, flipped, {"is_transposed": True})) < 1e-5
    assert relative_error(straight, turned.double()) > 1e-2


class Toy(nn.Module):
    """An experts module by protocol, of no known class."""

    def __init__(self, experts=3, hidden=4, inner=5):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, inner))
        self.act_fn = nn.GELU(approximate="tanh")


def test_module_is_read_live():
    module = Toy()
    weights = rx.ExpertWeights.from_module(module)
    assert weights.gate_up_proj is module.gate_up_proj
    assert weights.activation_name == "gelu_tanh"
    with torch.no_grad():
        module.down_proj.zero_()
    module.gate_up_proj = nn.Parameter(torch.randn(3, 10, 4))
    assert weights.gate_up_proj is module.gate_up_proj
    out = rx.run_experts(torch.randn(2, 4), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1), weights)
    assert torch.equal(out, torch.zeros(2, 4))


def test_module_that_changes_is_read_again():
    module = Toy(experts=4)
    x, index, w = torch.randn(2, 4), torch.tensor([[0], [3]]), torch.ones(2, 1)
    assert rx.run_experts(x, index, w, module)[1].abs().sum() > 0
    module.num_experts = 2
    module.gate_up_proj = nn.Parameter(module.gate_up_proj[:2].detach())
    module.down_proj = nn.Parameter(module.down_proj[:2].detach())
    assert rx.run_experts(x, index, w, module)[1].abs().sum() == 0
    module.bfloat16()
    assert rx.run_experts(x.bfloat16(), index, w, module).dtype == torch.bfloat16


def test_own_gate_of_a_module_is_called():
    class Own(Toy):
        def _apply_gate(self, up):
            gate, linear = up.chunk(2, -1)
            return torch.tanh(gate) * linear

    module = Own()
    x, index, w = torch.randn(3, 4), torch.tensor([[0, 1], [1, 2], [0, 0]]), torch.rand(3, 2)
    given = {"gate_up_proj": module.gate_up_proj, "down_proj": module.down_proj}
    wanted = experts_oracle(x, index, w, given, {"gate": module._apply_gate}).detach()
    for name in ("eager", "batched_mm", "grouped_mm", "auto"):
        assert relative_error(rx.run_experts(x, index, w, module, backend=name).detach(), wanted) < 1e-5


@pytest.mark.parametrize("missing", ["num_experts", "down_proj", "gate_up_proj", "act_fn"])
def test_module_without_the_protocol(missing):
    module = Toy()
    delattr(module, missing)
    with pytest.raises(rx.LayoutError) as caught:
        rx.ExpertWeights.from_module(module)
    assert caught.value.found
    assert caught.value.needed


def test_module_flags_that_do_not_fit():
    module = Toy()
    module.is_transposed = True
    with pytest.raises(rx.LayoutError, match="is_transposed"):
        rx.ExpertWeights.from_module(module)


@pytest.mark.parametrize("name", sorted(gates.ACTIVATIONS))
def test_activation_names_are_known_by_function(name):
    assert gates.activation_name(gates.ACTIVATIONS[name]) == name


def test_activations_of_transformers_are_recognised_right():
    """B15: exact gelu and its tanh form stay apart; what is recognised computes the same values."""
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    recognised = {}
    for key in ACT2FN:
        module = ACT2FN[key]
        name = gates.activation_name(module)
        if name is not None:
            recognised[key] = name
            assert (gates.ACTIVATIONS[name](x) - module(x)).abs().max() < 1e-12, key
    assert {"silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2"} <= set(recognised)
    assert recognised["gelu"] == "gelu"
    assert recognised["gelu_pytorch_tanh"] == "gelu_tanh"
    assert 1e-4 < (gates.ACTIVATIONS["gelu"](x) - gates.ACTIVATIONS["gelu_tanh"](x)).abs().max() < 5e-4
