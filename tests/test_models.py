"""set_experts_implementation, get_experts_implementation and decode_stage on plain torch models."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from modules_oracle import draw_parameters, experts_loop, routing
from routed_experts import calling
from routed_experts.backends.registry import backends
from routed_experts.decorator import use_experts_implementation
from routed_experts.errors import (
    DtypeError,
    LayoutError,
    RoutedExpertsError,
    SwitchError,
    UnknownBackend,
    UnsupportedExperts,
)
from routed_experts.models import decode_stage, get_experts_implementation, set_experts_implementation
from routed_experts.modules import RoutedExperts
from routed_experts.switching import AttributeSwitch, ForwardSwitch
from torch import nn

E, H, I = 4, 8, 8  # noqa: E741


class Foreign(nn.Module):
    """Experts of another library: no decorator of ours, own argument names, a forward we can recognise."""

    def __init__(self, config: object = None, device: str = "cpu") -> None:
        super().__init__()
        self.num_experts = E
        self.is_transposed = False
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H, device=device))
        self.down_proj = nn.Parameter(torch.empty(E, H, I, device=device))
        self.act_fn = nn.SiLU()
        if config is not None:
            self.config = config

    def forward(self, hidden_states, router_indices=None, routing_weights=None):
        return torch.full_like(hidden_states, 7.0)


@use_experts_implementation
class Own(Foreign):
    """The same, built on this package."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        return torch.full_like(hidden_states, 9.0)


class Batched(nn.Module):
    """Experts in the way of llama4: sorted rows in, no routing arguments, no flag for transposed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, H, 2 * I))
        self.down_proj = nn.Parameter(torch.randn(E, I, H))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states):
        return hidden_states


class Packed(nn.Module):
    """Experts in the way of dbrx: one 2-D matrix for all."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.w1 = nn.Parameter(torch.randn(E * I, H))


class Stack(nn.Module):
    """A plain torch model of the given experts."""

    def __init__(self, *experts: nn.Module) -> None:
        super().__init__()
        self.inlet = nn.Linear(H, H)
        self.layers = nn.ModuleList(nn.ModuleDict({"experts": module}) for module in experts)

    def forward(self, x, index, weights):
        for layer in self.layers:
            x = layer["experts"](x, index, weights)
        return x


class Config:
    """As much of a transformers config as the switch reads."""

    def __init__(self, **sub_configs: Config | None) -> None:
        self.sub_configs = dict.fromkeys(sub_configs, Config)
        self._experts_implementation_internal: str | None = "grouped_mm"
        self.__dict__.update(sub_configs)

    @property
    def _experts_implementation(self) -> str | None:
        return self._experts_implementation_internal


class Composite(nn.Module):
    """Two backbones with experts, and a sub-config without any."""

    def __init__(self, device: str = "cpu", audio_device: str | None = None) -> None:
        super().__init__()
        self.config = Config(
            text_config=Config(), audio_config=Config(), vision_config=Config(), absent_config=None
        )
        self.text = Stack(Foreign(self.config.text_config, device), Foreign(self.config.text_config, device))
        self.audio = nn.ModuleDict({"experts": Foreign(None, audio_device or device)})
        self.audio.config = self.config.audio_config


KEYS = ["", "text_config", "audio_config", "vision_config"]

# The audio experts hold no config, as undecorated classes do: whatever it says, they run their own forward.
FRESH = dict.fromkeys(KEYS, "transformers:grouped_mm") | {"audio_config": "transformers:eager"}


def gate(u: torch.Tensor) -> torch.Tensor:
    return F.silu(u[..., :I]) * u[..., I:]


def state(model: nn.Module) -> list[object]:
    """Everything a switch may touch, module by module."""
    return [{k: v for k, v in m.__dict__.items() if not k.startswith("_p")} for m in model.modules()]


@pytest.fixture
def asked(monkeypatch):
    names: list[str] = []
    run = calling.run_experts

    def record(*args, backend, **kwargs):
        names.append(backend)
        return run(*args, backend=backend, **kwargs)

    monkeypatch.setattr(calling, "run_experts", record)
    return names


@pytest.fixture
def writes(monkeypatch):
    """Every (module class, name) that a switch writes, in order."""
    seen: list[str] = []
    for switch in (AttributeSwitch, ForwardSwitch):
        write = switch.write

        def record(self, module, name, write=write):
            seen.append(name)
            write(self, module, name)

        monkeypatch.setattr(switch, "write", record)
    return seen


@pytest.mark.parametrize("backend", ["auto", "eager", "batched_mm", "grouped_mm"])
def test_switch_reaches_every_kind_of_module(backend, asked):
    model = Stack(RoutedExperts(E, H, I), Own(), Foreign())
    draw_parameters(model)
    x, index, weights = routing(6, 2, E, H)
    set_experts_implementation(model, backend)
    assert get_experts_implementation(model) == {"": backend}
    wanted = x
    for layer in model.layers:
        wanted = experts_loop(layer["experts"], gate, wanted, index, weights)
    found = model(x, index, weights)
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-5
    assert asked == [backend] * 3


def test_foreign_forward_takes_its_own_keywords():
    experts = Foreign()
    draw_parameters(experts)
    x, index, weights = routing(6, 2, E, H)
    set_experts_implementation(experts, "eager")
    wanted = experts_loop(experts, gate, x, index, weights)
    found = experts(x, routing_weights=weights, router_indices=index)
    assert ((found - wanted).abs().max() / wanted.abs().max()).item() < 1e-5


def test_library_name_restores_the_modules_own_forward():
    model = Stack(Foreign())
    assert get_experts_implementation(model) == {"": "transformers:eager"}
    before = state(model)
    set_experts_implementation(model, "eager")
    set_experts_implementation(model, "transformers:eager")
    assert state(model) == before
    assert (model(*routing(3, 2, E, H)) == 7).all()
    assert get_experts_implementation(model) == {"": "transformers:eager"}


def test_own_modules_have_no_library_function():
    with pytest.raises(UnsupportedExperts, match=r"layers\.0\.experts"):
        set_experts_implementation(Stack(Own()), "transformers:eager")


def test_library_function_that_nobody_has():
    model = Stack(Foreign())
    with pytest.raises(UnknownBackend, match="grouped_mm"):
        set_experts_implementation(model, "transformers:grouped_mm")


def test_prefixed_names_are_accepted_and_read_back_bare():
    model = Stack(Foreign())
    set_experts_implementation(model, "routed_experts_grouped_mm")
    assert get_experts_implementation(model) == {"": "grouped_mm"}
    set_experts_implementation(model, "routed_experts")
    assert get_experts_implementation(model) == {"": "auto"}


def test_none_is_the_default():
    model = Composite()
    set_experts_implementation(model, "batched_mm")
    set_experts_implementation(model, {"text_config": None})
    assert get_experts_implementation(model) == dict.fromkeys(KEYS, "batched_mm") | {"text_config": "auto"}
    set_experts_implementation(model, None)
    assert get_experts_implementation(model) == dict.fromkeys(KEYS, "auto")


def test_composite_reads_top_level_first_and_leaves_absent_parts_out():
    model = Composite()
    model.config.vision_config._experts_implementation_internal = None
    found = get_experts_implementation(model)
    assert list(found) == KEYS
    assert found == FRESH | {"vision_config": "transformers:eager"}
    before = state(model)
    set_experts_implementation(model, found)
    assert state(model)[1:] == before[1:]
    assert get_experts_implementation(model) == found


@pytest.mark.parametrize(
    ("wanted", "changed"),
    [
        ("batched_mm", dict.fromkeys(KEYS, "batched_mm")),
        ({"": "batched_mm"}, dict.fromkeys(KEYS, "batched_mm")),
        (
            {"": "batched_mm", "text_config": "eager"},
            dict.fromkeys(KEYS, "batched_mm") | {"text_config": "eager"},
        ),
        ({"audio_config": "eager"}, {"audio_config": "eager"}),
        ({"vision_config": "eager"}, {"vision_config": "eager"}),
        ({}, {}),
    ],
)
def test_dict_names_parts(wanted, changed):
    model = Composite()
    set_experts_implementation(model, "grouped_mm")
    set_experts_implementation(model, wanted)
    found = get_experts_implementation(model)
    assert found == dict.fromkeys(KEYS, "grouped_mm") | changed
    twin = Composite()
    set_experts_implementation(twin, found)
    assert get_experts_implementation(twin) == found


def test_parts_run_what_they_name(asked):
    model = Composite()
    draw_parameters(model)
    set_experts_implementation(model, {"": "eager", "text_config": "grouped_mm"})
    call = routing(3, 2, E, H)
    model.text(*call)
    model.audio["experts"](*call)
    assert asked == ["grouped_mm", "grouped_mm", "eager"]


def test_nested_sub_config_belongs_to_the_outer_key():
    model = Composite()
    inner = Config()
    model.config.text_config.sub_configs = {"deep_config": Config}
    model.config.text_config.deep_config = inner
    model.extra = nn.ModuleDict({"experts": Foreign(inner)})
    set_experts_implementation(model, {"text_config": "eager"})
    assert get_experts_implementation(model.extra) == {"": "eager"}
    assert list(get_experts_implementation(model)) == KEYS


def test_wrapped_model_is_looked_through():
    model = Composite()
    wrapper = nn.Module()
    wrapper.module = model
    set_experts_implementation(wrapper, {"text_config": "eager"})
    assert get_experts_implementation(model)["text_config"] == "eager"
    assert get_experts_implementation(wrapper) == get_experts_implementation(model)


def test_adapter_wrapper_that_passes_attributes_through_is_no_expert(asked):
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("base"), name)

        def forward(self, *args):
            return self.base(*args) + 100

    model = Stack(Adapter(Foreign()))
    draw_parameters(model)
    set_experts_implementation(model, "eager")
    assert (model(*routing(3, 2, E, H)) > 50).all()
    assert asked == ["eager"]


@pytest.mark.parametrize(
    ("wanted", "error", "text"),
    [
        ("group_mm", UnknownBackend, "grouped_mm"),
        ({"": "eager", "text_config": "group_mm"}, UnknownBackend, "group_mm"),
        ({"": "eager", "bogus": "eager"}, LayoutError, "'text_config', 'audio_config', 'vision_config'"),
        ({"absent_config": "eager"}, LayoutError, "absent_config"),
        ({3: "eager"}, LayoutError, "3"),
        ({"": "eager", "text_config": 3}, DtypeError, "int"),
        (["eager"], DtypeError, "list"),
        ({"": "eager", "text_config": "transformers:flash"}, UnknownBackend, "flash"),
        ({"": "eager", "text_config": "deepgemm_megamoe"}, SwitchError, "deepgemm_megamoe"),
        (
            {"": "deepgemm_megamoe", "text_config": "eager", "audio_config": "eager"},
            SwitchError,
            "after loading",
        ),
        ({"text_config": "transformers:deepgemm_megamoe"}, SwitchError, "after loading"),
    ],
)
@pytest.mark.parametrize("start", [None, "batched_mm"], ids=["fresh", "switched"])
def test_refusals_change_nothing(wanted, error, text, start):
    model = Composite()
    if start is not None:
        set_experts_implementation(model, start)
    before, names = state(model), get_experts_implementation(model)
    with pytest.raises(error, match=text) as raised:
        set_experts_implementation(model, wanted)
    assert isinstance(raised.value, RoutedExpertsError)
    assert raised.value.found
    assert raised.value.needed
    assert state(model) == before
    assert get_experts_implementation(model) == names


def test_unknown_name_is_a_key_error_and_a_value_error_that_lists_names():
    for error in (KeyError, ValueError):
        with pytest.raises(error) as raised:
            set_experts_implementation(Stack(Own()), "group_mm")
        assert all(name in str(raised.value) for name in ["auto", *backends()])


def test_one_module_that_cannot_run_leaves_the_whole_model_alone():
    model = Stack(Foreign(), Batched())
    before = state(model)
    with pytest.raises(UnsupportedExperts, match=r"layers\.1\.experts"):
        set_experts_implementation(model, "eager")
    assert state(model) == before


def test_weights_that_do_not_fit_give_the_reason():
    class Turned(Batched):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    with pytest.raises(UnsupportedExperts, match=r"layers\.0\.experts.* do not fit") as raised:
        set_experts_implementation(Stack(Turned()), "eager")
    assert isinstance(raised.value.__cause__, LayoutError)


def test_forward_that_somebody_replaced_is_not_overridden():
    model = Stack(Foreign())
    model.layers[0]["experts"].forward = hooked = lambda *args: args[0]
    with pytest.raises(SwitchError, match="already replaced"):
        set_experts_implementation(model, "eager")
    assert model.layers[0]["experts"].forward is hooked


def test_hook_laid_over_a_switched_forward_stays_and_is_obeyed(asked):
    experts = Foreign()
    draw_parameters(experts)
    set_experts_implementation(experts, "eager")
    inner = experts.forward
    experts.forward = lambda *args: inner(*args) + 100
    call = routing(3, 2, E, H)
    set_experts_implementation(experts, "batched_mm")
    assert (experts(*call) > 50).all()
    set_experts_implementation(experts, "transformers:eager")
    assert (experts(*call) == 107).all()
    assert get_experts_implementation(experts) == {"": "transformers:eager"}
    set_experts_implementation(experts, "grouped_mm")
    assert (experts(*call) > 50).all()
    assert asked == ["batched_mm", "grouped_mm"]


def test_modules_set_apart_one_by_one_cannot_be_told_in_one_name():
    model = Stack(RoutedExperts(E, H, I), RoutedExperts(E, H, I, experts_implementation="eager"))
    with pytest.raises(SwitchError, match=r"layers\.0\.experts: auto, layers\.1\.experts: eager"):
        get_experts_implementation(model)
    set_experts_implementation(model.layers[0], "eager")
    assert get_experts_implementation(model) == {"": "eager"}


@pytest.mark.parametrize("experts", [(), (Packed(),)], ids=["dense", "packed"])
def test_model_without_experts_takes_only_eager(experts):
    model = Stack(*experts)
    for name in ["auto", "grouped_mm", {"": "batched_mm"}, "deepgemm_megamoe", "transformers:grouped_mm"]:
        with pytest.raises(ValueError, match="no experts"):
            set_experts_implementation(model, name)
    for name in [None, "eager", {"": None}, {"": "eager"}, {}]:
        set_experts_implementation(model, name)
    found = get_experts_implementation(model)
    assert found == {"": "eager"}
    set_experts_implementation(model, found)


def test_packed_experts_are_named_in_the_refusal():
    with pytest.raises(UnsupportedExperts, match=r"layers\.0\.experts \(Packed\)"):
        set_experts_implementation(Stack(Packed()), "grouped_mm")


def test_load_time_backend_is_neither_entered_nor_left():
    loaded = Stack(RoutedExperts(E, H, I, experts_implementation="deepgemm_megamoe"))
    set_experts_implementation(loaded, "deepgemm_megamoe")
    with pytest.raises(RuntimeError, match="deepgemm_megamoe"):
        set_experts_implementation(loaded, "eager")
    with pytest.raises(RuntimeError, match="deepgemm_megamoe"):
        set_experts_implementation(Stack(RoutedExperts(E, H, I)), "deepgemm_megamoe")
    config = SimpleNamespace(_experts_implementation="deepgemm_megamoe")
    with pytest.raises(RuntimeError, match="transformers:deepgemm_megamoe"):
        set_experts_implementation(Stack(Foreign(config)), "eager")


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_switched_model_run_on_their_own_weights(duplicate):
    model = Composite()
    draw_parameters(model)
    set_experts_implementation(model, {"": "batched_mm", "text_config": "eager"})
    twin = duplicate(model)
    assert get_experts_implementation(twin) == get_experts_implementation(model)
    call = routing(5, 2, E, H)
    wanted = model.text(*call)
    assert torch.equal(twin.text(*call), wanted)
    draw_parameters(twin, seed=1)
    assert not torch.allclose(twin.text(*call), wanted)
    assert torch.equal(model.text(*call), wanted)
    set_experts_implementation(twin, FRESH)
    assert get_experts_implementation(twin) == FRESH
    assert get_experts_implementation(model)["text_config"] == "eager"


def test_decode_stage_switches_on_an_accelerator_and_restores(writes):
    model = Composite("meta")
    set_experts_implementation(model, {"": "grouped_mm", "audio_config": "eager"})
    before = get_experts_implementation(model)
    writes.clear()
    with decode_stage(model):
        inside = get_experts_implementation(model)
    assert inside == {k: "batched_mm" if v == "grouped_mm" else v for k, v in before.items()}
    assert get_experts_implementation(model) == before
    assert writes == ["batched_mm", "batched_mm", "grouped_mm", "grouped_mm"]


def test_decode_stage_on_own_modules(writes):
    model = Stack(RoutedExperts(E, H, I, experts_implementation="grouped_mm", device="meta"))
    with decode_stage(model):
        assert get_experts_implementation(model) == {"": "batched_mm"}
    assert writes == ["batched_mm", "grouped_mm"]


def test_decode_stage_leaves_the_cpu_alone(writes):
    model = Composite()
    set_experts_implementation(model, "grouped_mm")
    writes.clear()
    with decode_stage(model):
        assert get_experts_implementation(model) == dict.fromkeys(KEYS, "grouped_mm")
    assert writes == []


def test_decode_stage_asks_for_the_device_of_the_experts():
    """B70: the first parameter of the model is on the CPU, the experts of one sub-model are not."""
    model = Composite("meta", audio_device="cpu")
    assert next(model.parameters()).device.type == "cpu"
    set_experts_implementation(model, "grouped_mm")
    with decode_stage(model):
        found = get_experts_implementation(model)
    assert (found["text_config"], found["audio_config"]) == ("batched_mm", "grouped_mm")


def test_decode_stage_leaves_library_functions_alone(writes):
    model = Composite("meta")
    with decode_stage(model):
        assert get_experts_implementation(model) == FRESH
    assert writes == []


def test_nested_decode_stage_switches_once_and_restores_once(writes):
    model = Stack(Foreign(device="meta"))
    set_experts_implementation(model, "grouped_mm")
    writes.clear()
    with decode_stage(model):
        with decode_stage(model), decode_stage(model.layers):
            assert get_experts_implementation(model) == {"": "batched_mm"}
        assert get_experts_implementation(model) == {"": "batched_mm"}
    assert writes == ["batched_mm", "grouped_mm"]


def test_decode_stage_restores_after_an_exception(writes):
    model = Composite("meta")
    set_experts_implementation(model, "grouped_mm")

    def generate():
        with decode_stage(model):
            for step in range(16):
                if step == 3:
                    raise InterruptedError

    with pytest.raises(InterruptedError):
        generate()
    assert get_experts_implementation(model) == dict.fromkeys(KEYS, "grouped_mm")


def test_decode_stage_undoes_a_switch_that_failed_half_way(monkeypatch):
    model = Stack(
        RoutedExperts(E, H, I, experts_implementation="grouped_mm", device="meta"), Own(device="meta")
    )
    set_experts_implementation(model, "grouped_mm")
    write = AttributeSwitch.write

    def fail(self, module, name):
        if isinstance(module, Own):
            raise MemoryError
        write(self, module, name)

    monkeypatch.setattr(AttributeSwitch, "write", fail)
    with pytest.raises(MemoryError), decode_stage(model):
        pass
    assert get_experts_implementation(model) == {"": "grouped_mm"}


def test_interleaved_decode_stages_end_where_they_began():
    model = Stack(Foreign(device="meta"))
    set_experts_implementation(model, "grouped_mm")
    first, second = decode_stage(model), decode_stage(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert get_experts_implementation(model) == {"": "grouped_mm"}
