"""set_experts_implementation and get_experts_implementation on plain torch models."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from modules_oracle import draw_parameters, experts_loop, routing
from torch import nn
from toy_models import FRESH, KEYS, Batched, Composite, Config, E, Foreign, H, I, Own, Packed, Stack, gate, state

from routed_experts.backends.registry import backends
from routed_experts.errors import (
    DtypeError,
    LayoutError,
    RoutedExpertsError,
    SwitchError,
    UnknownBackend,
    UnsupportedExperts,
)
from routed_experts.models import get_experts_implementation, set_experts_implementation
from routed_experts.modules import RoutedExperts


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
