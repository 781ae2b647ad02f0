"""RoutedExperts and use_experts_implementation: numbers, layouts, errors, and life as an ordinary module."""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from modules_oracle import draw_parameters, experts_loop, routing
from torch import nn
from torch.nn.utils import parametrize

from routed_experts import calling, decorator
from routed_experts.backends.registry import backends
from routed_experts.decorator import use_experts_implementation
from routed_experts.errors import DtypeError, LayoutError, UnknownBackend
from routed_experts.modules import RoutedExperts

E, H, I = 5, 12, 7  # noqa: E741
BACKENDS = ["auto", "eager", "batched_mm", "grouped_mm"]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).abs().max() / wanted.abs().max()).item()


def gate_of(module: RoutedExperts, act=F.silu):
    if not module.has_gate:
        return act

    def gate(u: torch.Tensor) -> torch.Tensor:
        if module.is_concatenated:
            return act(u[..., :I]) * u[..., I:]
        return act(u[..., 0::2]) * u[..., 1::2]

    return gate


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize(
    ("has_gate", "is_concatenated"),
    [(True, True), (True, False), (False, True)],
    ids=["concatenated", "interleaved", "ungated"],
)
def test_numbers_for_every_layout(backend, bias, is_transposed, has_gate, is_concatenated):
    experts = RoutedExperts(
        E,
        H,
        I,
        bias=bias,
        has_gate=has_gate,
        is_transposed=is_transposed,
        is_concatenated=is_concatenated,
        experts_implementation=backend,
    )
    draw_parameters(experts)
    call = routing(9, 3, E, H)
    wanted = experts_loop(experts, gate_of(experts), *call)
    assert relative_error(experts(*call), wanted) < 1e-5


@pytest.mark.parametrize(
    ("activation", "function"),
    [("relu2", lambda x: F.relu(x) ** 2), ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_activation_by_name(activation, function):
    experts = RoutedExperts(E, H, I, activation=activation)
    call = routing(6, 2, E, H)
    assert relative_error(experts(*call), experts_loop(experts, gate_of(experts, function), *call)) < 1e-5


def test_activation_by_callable_module():
    experts = RoutedExperts(E, H, I, activation=nn.Softsign())
    call = routing(6, 2, E, H)
    assert relative_error(experts(*call), experts_loop(experts, gate_of(experts, F.softsign), *call)) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_keeps_dtype_and_graph(backend):
    experts = RoutedExperts(E, H, I, experts_implementation=backend, dtype=torch.bfloat16)
    x, index, weights = routing(0, 2, E, H, dtype=torch.bfloat16)
    out = experts(x.requires_grad_(), index, weights)
    assert out.shape == (0, H)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert torch.equal(experts.down_proj.grad, torch.zeros_like(experts.down_proj))


def test_parameters_by_flag():
    plain, turned = (
        RoutedExperts(E, H, I, bias=True),
        RoutedExperts(E, H, I, is_transposed=True, has_gate=False),
    )
    assert {n: tuple(p.shape) for n, p in plain.named_parameters()} == {
        "gate_up_proj": (E, 2 * I, H),
        "gate_up_proj_bias": (E, 2 * I),
        "down_proj": (E, H, I),
        "down_proj_bias": (E, H),
    }
    assert {n: tuple(p.shape) for n, p in turned.named_parameters()} == {
        "up_proj": (E, H, I),
        "down_proj": (E, I, H),
    }
    assert turned.up_proj_bias is None
    assert turned.down_proj_bias is None


def test_reset_draws_by_fan_in():
    torch.manual_seed(0)
    experts = RoutedExperts(8, 64, 16, bias=True, is_transposed=True)
    nn.init.ones_(experts.down_proj_bias)
    experts.reset_parameters()
    assert experts.gate_up_proj.std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert experts.down_proj.std().item() == pytest.approx(16**-0.5, rel=0.05)
    assert not experts.down_proj_bias.any()


def test_repr_names_sizes_flags_and_backend():
    text = repr(RoutedExperts(E, H, I, is_transposed=True, bias=True, experts_implementation="eager"))
    assert text == (
        "RoutedExperts(5, 12, 7, activation='silu', bias=True, is_transposed=True, experts_implementation='eager')"
    )


def test_device_and_dtype():
    experts = RoutedExperts(E, H, I, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in experts.parameters()} == {("meta", torch.float16)}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((0, H, I), {}, LayoutError, "num_experts"),
        ((E, -1, I), {}, LayoutError, "hidden_size"),
        ((E, H, 7.0), {}, LayoutError, "intermediate_size"),
        ((True, H, I), {}, LayoutError, "num_experts"),
        ((E, H, I), {"activation": "silou"}, LayoutError, "silou"),
        ((E, H, I), {"activation": 3}, LayoutError, "activation"),
        ((E, H, I), {"dtype": torch.int8}, DtypeError, "floating"),
        ((E, H, I), {"experts_implementation": "group_mm"}, UnknownBackend, "grouped_mm"),
        ((E, H, I), {"experts_implementation": 4}, DtypeError, "by name"),
        ((E, H, I), {"experts_implementation": "transformers:eager"}, UnknownBackend, "transformers:eager"),
    ],
)
def test_bad_construction(arguments, options, error, text):
    with pytest.raises(error, match=text) as raised:
        RoutedExperts(*arguments, **options)
    assert raised.value.found
    assert raised.value.needed


def test_every_registered_name_and_the_prefixed_form_are_accepted():
    for name in backends():
        assert RoutedExperts(1, 1, 1, experts_implementation=name).experts_implementation == name
        prefixed = RoutedExperts(1, 1, 1, experts_implementation=f"routed_experts_{name}")
        assert prefixed.experts_implementation == name
    assert RoutedExperts(1, 1, 1, experts_implementation="routed_experts").experts_implementation == "auto"
    assert RoutedExperts(1, 1, 1, experts_implementation=None).experts_implementation == "auto"


def test_copy_pickle_and_state_dict():
    experts = RoutedExperts(E, H, I, bias=True, activation="relu2", experts_implementation="batched_mm")
    draw_parameters(experts)
    call = routing(4, 2, E, H)
    wanted = experts(*call)
    for twin in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert twin.experts_implementation == "batched_mm"
        assert twin.down_proj is not experts.down_proj
        assert torch.equal(twin(*call), wanted)
    fresh = RoutedExperts(E, H, I, bias=True, activation="relu2", experts_implementation="batched_mm")
    fresh.load_state_dict(experts.state_dict(), strict=True)
    assert torch.equal(fresh(*call), wanted)


class LowRank(nn.Module):
    """W + A @ B on each expert, with rank 2."""

    def __init__(self, experts: int, rows: int, columns: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(experts, rows, 2, generator=generator))
        self.b = nn.Parameter(torch.randn(experts, 2, columns, generator=generator))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.a @ self.b


@pytest.mark.parametrize("backend", BACKENDS)
def test_adapters_on_parametrized_weights_get_gradients(backend):
    """B74: the live attribute is read, so A and B learn, and alike on every backend."""
    experts = RoutedExperts(2, H, I, experts_implementation=backend)
    draw_parameters(experts)
    adapter = LowRank(2, 2 * I, H)
    parametrize.register_parametrization(experts, "gate_up_proj", adapter)
    experts.parametrizations.gate_up_proj.original.requires_grad_(False)
    call = routing(6, 2, 3, H)
    out = experts(*call)
    probe = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    found = torch.autograd.grad((out * probe).sum(), [adapter.a, adapter.b])
    wanted_out = experts_loop(experts, gate_of(experts), *call)
    assert relative_error(out, wanted_out) < 1e-5
    wanted = torch.autograd.grad((wanted_out * probe).sum(), [adapter.a, adapter.b])
    for grad, reference in zip(found, wanted, strict=True):
        assert reference.abs().max() > 0.1
        assert relative_error(grad, reference.double()) < 1e-5


class ToyExperts(nn.Module):
    """Experts with a gate of their own and argument names of their own."""

    def __init__(self, experts: int = E, hidden: int = H, inner: int = I, **extra: bool) -> None:
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(torch.empty(experts, hidden, 2 * inner))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * inner))
        self.down_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, hidden))
        self.is_transposed = False
        self.__dict__.update(extra)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        return (up + 1) * gate.clamp(max=0.5) * torch.sigmoid(1.702 * gate)

    def forward(self, rows: torch.Tensor, router_indices: torch.Tensor = None, routing_weights=None):
        """The toy's own forward."""
        return experts_loop(self, self._apply_gate, rows, router_indices, routing_weights).to(rows.dtype)


Decorated = use_experts_implementation(is_transposed=True, is_concatenated=False, has_bias=True)(
    type(
        "Decorated",
        (ToyExperts,),
        {"__module__": __name__, "__doc__": "A toy.", "forward": ToyExperts.forward},
    )
)


@use_experts_implementation
class Plain(nn.Module):
    """Default layout, experts of an act_fn."""

    def __init__(self, config: object = None) -> None:
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * I, H) / H**0.5)
        self.down_proj = nn.Parameter(torch.randn(E, H, I) / I**0.5)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return torch.full_like(hidden_states, 7.0)


class Child(Plain):
    """A subclass that adds to the decorated class and says nothing of layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 3.0

    def forward(self, *args, **kwargs):
        return self.scale * super().forward(*args, **kwargs)


@use_experts_implementation(has_post_expert_norm=True)
class Normed(Plain):
    """A subclass that only declares another flag."""

    def __init__(self) -> None:
        super().__init__()
        self.post_expert_norm = nn.RMSNorm(H, eps=1e-6).double()


@pytest.mark.parametrize("backend", BACKENDS)
def test_decorated_class_with_own_gate(backend, asked):
    experts = Decorated()
    draw_parameters(experts)
    experts.experts_implementation = backend
    x, index, weights = routing(8, 3, E, H)
    wanted = experts_loop(experts, experts._apply_gate, x, index, weights)
    assert relative_error(experts(x, index, weights), wanted) < 1e-5
    named = experts(x, routing_weights=weights, router_indices=index)
    assert relative_error(named, wanted) < 1e-5
    assert relative_error(experts.forward_reference(x, index, weights), wanted) < 1e-6
    assert asked == [backend, backend]


def test_decorator_without_parentheses_dispatches_and_keeps_the_reference(asked):
    experts, call = Plain(), routing(5, 2, E, H)
    gate = lambda u: F.silu(u[..., :I]) * u[..., I:]  # noqa: E731
    assert relative_error(experts(*call), experts_loop(experts, gate, *call)) < 1e-5
    assert asked == ["auto"]
    assert (experts.forward_reference(*call) == 7).all()


def test_decorated_class_keeps_its_identity():
    assert (Plain.__name__, Plain.__module__) == ("Plain", __name__)
    assert Plain.__doc__ == "Default layout, experts of an act_fn."
    assert list(inspect.signature(Decorated.forward).parameters)[1:] == [
        "rows",
        "router_indices",
        "routing_weights",
    ]
    assert Decorated.forward.__doc__ == "The toy's own forward."
    twin = pickle.loads(pickle.dumps(Decorated()))
    assert type(twin) is Decorated
    assert twin.is_transposed is True


def test_declared_flags_win_over_those_of_init():
    experts = Decorated(is_concatenated=True)
    assert (experts.is_transposed, experts.is_concatenated, experts.has_bias) == (True, False, True)
    assert (experts.has_gate, experts.has_post_expert_norm) == (True, False)


def test_subclass_goes_through_the_decorated_parent(asked):
    child, call = Child(), routing(5, 2, E, H)
    assert child.has_gate is True
    gate = lambda u: F.silu(u[..., :I]) * u[..., I:]  # noqa: E731
    assert relative_error(child(*call), 3 * experts_loop(child, gate, *call)) < 1e-5
    assert asked == ["auto"]


def test_subclass_decorated_again_changes_flags_and_not_the_dispatch(asked):
    experts, (x, index, weights) = Normed().double(), routing(5, 2, E, H, dtype=torch.float64)
    assert Plain().has_post_expert_norm is False
    gate = lambda u: F.silu(u[..., :I]) * u[..., I:]  # noqa: E731
    assert relative_error(experts(x, index, weights), experts_loop(experts, gate, x, index, weights)) < 1e-10
    assert asked == ["auto"]
    assert Normed.forward_reference is Plain.forward_reference


@pytest.mark.parametrize(
    ("value", "backend"),
    [("routed_experts_batched_mm", "batched_mm"), ("routed_experts", "auto"), ("grouped_mm", "grouped_mm")],
)
def test_config_names_the_backend(value, backend, asked):
    config = SimpleNamespace(_experts_implementation=value)
    experts = Plain(config)
    assert experts.config is config
    experts(*routing(3, 2, E, H))
    config._experts_implementation = "eager"
    experts(*routing(3, 2, E, H))
    experts.experts_implementation = "batched_mm"
    experts(*routing(3, 2, E, H))
    assert asked == [backend, "eager", "batched_mm"]


def test_unset_config_is_the_default_with_one_warning(asked, caplog):
    """B63: a module used on its own, nobody named a backend."""
    decorator._warn_unset.cache_clear()
    experts = Plain(config=SimpleNamespace(_experts_implementation=None))
    with caplog.at_level(logging.WARNING, "routed_experts"):
        experts(*routing(3, 2, E, H))
        experts(*routing(3, 2, E, H))
    assert asked == ["auto", "auto"]
    assert [record.name for record in caplog.records if "None" in record.getMessage()] == ["routed_experts"]


def test_unknown_name_found_at_forward():
    experts = Plain(SimpleNamespace(_experts_implementation="group_mm"))
    with pytest.raises(KeyError, match="group_mm"):
        experts(*routing(3, 2, E, H))


def test_expert_parallel_mark_and_extra_keywords_are_passed_on(monkeypatch):
    seen = {}
    monkeypatch.setattr(calling, "run_experts", lambda *args, **kwargs: seen.update(kwargs) or args[0])
    experts = Plain()
    experts(*routing(3, 2, E, H), process_group="world")
    assert seen == {
        "experts": experts,
        "backend": "auto",
        "expert_parallel": False,
        "process_group": "world",
    }
    experts._is_expert_parallel = True
    experts(*routing(3, 2, E, H))
    assert seen["expert_parallel"] is True


@pytest.mark.parametrize("target", [lambda: None, dict, 3])
def test_only_module_classes_can_be_decorated(target):
    with pytest.raises(DtypeError, match=r"nn\.Module class"):
        use_experts_implementation(target)
