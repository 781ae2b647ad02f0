"""Choosing by either setter and at load; saving, copying and sharing the choice."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from modules_oracle import draw_parameters
from test_models_transformers import SIZES, TOKENS, logits
from transformers import (
    AutoModelForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers_models import BACKENDS, BUILD, build_composite, build_text, composite_config, prefixed

import routed_experts as rx

pytestmark = pytest.mark.usefixtures("registered")


@pytest.mark.parametrize("family", BUILD)
def test_both_setters_speak_of_the_same(family):
    model = BUILD[family]()
    for name in BACKENDS:
        model.set_experts_implementation(prefixed(name))
        assert set(rx.get_experts_implementation(model).values()) == {name}
    for asked in BACKENDS:
        rx.set_experts_implementation(model, asked)
        assert set(model.get_experts_implementation().values()) == {prefixed(asked)}
        model.set_experts_implementation(model.get_experts_implementation())
        assert set(rx.get_experts_implementation(model).values()) == {asked}
    rx.set_experts_implementation(model, "transformers:batched_mm")
    assert set(model.get_experts_implementation().values()) == {"batched_mm"}
    model.set_experts_implementation("eager")
    assert set(rx.get_experts_implementation(model).values()) == {"transformers:eager"}
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_parts_are_set_apart_in_the_config(asked):
    model = build_composite()
    rx.set_experts_implementation(model, {"": "batched_mm", "text_config": "routed_experts_eager"})
    found = {"": "batched_mm", "text_config": "eager", "vision_config": "batched_mm"}
    assert rx.get_experts_implementation(model) == found
    assert model.get_experts_implementation() == {key: prefixed(name) for key, name in found.items()}
    logits(model)
    assert asked == ["eager"] * 2
    model.set_experts_implementation({"text_config": "routed_experts_grouped_mm"})
    assert rx.get_experts_implementation(model) == found | {"text_config": "grouped_mm"}
    rx.set_experts_implementation(model, {"vision_config": "transformers:eager"})
    assert model.get_experts_implementation()["vision_config"] == "eager"


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"": "eager", "bogus": "eager"}, rx.LayoutError),
        ({"": "eager", "text_config": "group_mm"}, rx.UnknownBackend),
        ({"": "eager", "text_config": "transformers:group_mm"}, rx.UnknownBackend),
        ({"": "eager", "vision_config": "transformers:group_mm"}, rx.UnknownBackend),
        ({"": "eager", "text_config": "transformers:routed_experts_eager"}, rx.UnknownBackend),
        ({"": "eager", "text_config": "deepgemm_megamoe"}, rx.SwitchError),
        ({"": "eager", "text_config": "transformers:deepgemm_megamoe"}, rx.SwitchError),
        ({"": "eager", "text_config": 3}, rx.DtypeError),
    ],
)
def test_refusals_change_nothing(wanted, error):
    model = build_composite()
    before = model.get_experts_implementation()
    with pytest.raises(error):
        rx.set_experts_implementation(model, wanted)
    assert model.get_experts_implementation() == before


def test_weights_that_do_not_fit_are_refused_before_anything_changes():
    model = build_text()
    model.model.layers[1].mlp.experts.is_transposed = True
    with pytest.raises(rx.UnsupportedExperts, match=r"layers\.1\.mlp\.experts"):
        rx.set_experts_implementation(model, "eager")
    assert model.get_experts_implementation() == {"": "grouped_mm"}


def test_models_of_one_config_object_share_the_choice():
    model = build_text()
    twin, apart = Qwen3MoeForCausalLM(model.config), Qwen3MoeForCausalLM(copy.deepcopy(model.config))
    rx.set_experts_implementation(model, "eager")
    assert rx.get_experts_implementation(twin) == {"": "eager"}
    assert rx.get_experts_implementation(apart) == {"": "transformers:grouped_mm"}


def test_a_choice_made_before_registering_holds(asked):
    rx.unregister_from_transformers()
    model = build_composite()
    rx.set_experts_implementation(model, {"": "batched_mm", "text_config": "eager"})
    rx.register_with_transformers()
    assert rx.get_experts_implementation(model)["text_config"] == "eager"
    logits(model)
    rx.set_experts_implementation(model, "batched_mm")
    assert set(model.get_experts_implementation().values()) == {"routed_experts_batched_mm"}
    assert not any("forward" in module.__dict__ for module in model.modules())
    logits(model)
    assert asked == ["eager", "eager", "batched_mm", "batched_mm"]


def test_dense_models_and_other_layouts_keep_their_reasons():
    dense = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    with pytest.raises(ValueError, match="no experts"):
        rx.set_experts_implementation(dense, "grouped_mm")
    sizes = {"intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": 1}
    llama4 = Llama4ForCausalLM(Llama4TextConfig(**SIZES, **sizes, experts_implementation="routed_experts"))
    with pytest.raises(rx.UnsupportedExperts, match="not called as routed experts"):
        rx.set_experts_implementation(llama4, "grouped_mm")
    assert rx.get_experts_implementation(llama4) == {"": "transformers:eager"}  # it asks no config


@pytest.mark.parametrize("family", BUILD)
@pytest.mark.parametrize("name", ["routed_experts", "routed_experts_grouped_mm"])
def test_loaded_models_generate_eagers_tokens(family, name, tmp_path, asked):
    own = BUILD[family]()
    own.save_pretrained(tmp_path)
    ours = type(own).from_pretrained(tmp_path, experts_implementation=name)
    assert set(ours.get_experts_implementation().values()) == {name}
    own.set_experts_implementation("eager")
    how = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    wanted = own.generate(TOKENS, **how)
    assert asked == []
    assert torch.equal(ours.generate(TOKENS, **how), wanted)
    assert set(asked) == {rx.get_experts_implementation(ours)[""]}


def test_loading_through_the_auto_class(tmp_path):
    build_text().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation={"": "routed_experts_eager"})
    assert rx.get_experts_implementation(loaded) == {"": "eager"}
    with pytest.raises(ValueError, match="routed_experts_bogus"):
        AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="routed_experts_bogus")


EVERY_PART = dict.fromkeys(["", "text_config", "vision_config"], "batched_mm")


@pytest.mark.parametrize(
    ("asked_for", "wanted"),
    [
        ({"": "routed_experts_batched_mm"}, EVERY_PART),
        ({"": "routed_experts_batched_mm", "text_config": "routed_experts"}, EVERY_PART | {"text_config": "auto"}),
        (
            {"": "routed_experts_batched_mm", "text_config": "eager"},
            EVERY_PART | {"text_config": "transformers:eager"},
        ),
    ],
)
def test_empty_key_reaches_unnamed_parts_at_load(asked_for, wanted, tmp_path):
    build_composite().save_pretrained(tmp_path)
    load = Qwen3VLMoeForConditionalGeneration
    given = dict(asked_for)
    for model in (
        load.from_pretrained(tmp_path, experts_implementation=given),
        load._from_config(composite_config(), experts_implementation=given),
    ):
        assert rx.get_experts_implementation(model) == wanted
        assert rx.get_experts_implementation(model.model.language_model) == {"": wanted["text_config"]}
    assert given == asked_for


def test_dicts_of_other_names_load_as_before(tmp_path):
    build_composite().save_pretrained(tmp_path)
    load = Qwen3VLMoeForConditionalGeneration.from_pretrained
    found = load(tmp_path, experts_implementation={"": "batched_mm"}).get_experts_implementation()
    assert (found[""], found["text_config"]) == ("batched_mm", "grouped_mm")
    named = load(tmp_path, experts_implementation={"text_config": "routed_experts"}).get_experts_implementation()
    assert (named[""], named["text_config"]) == ("grouped_mm", "routed_experts")


def test_unknown_parts_are_refused_at_load(tmp_path):
    build_composite().save_pretrained(tmp_path)
    with pytest.raises(rx.LayoutError, match=r"keys among '', .*'text_config'"):
        Qwen3VLMoeForConditionalGeneration.from_pretrained(tmp_path, experts_implementation={"bogus": "routed_experts"})


@pytest.mark.parametrize("family", BUILD)
def test_saved_models_know_nothing_of_the_choice(family, tmp_path):
    model = BUILD[family]()
    rx.set_experts_implementation(model, "batched_mm")
    model.save_pretrained(tmp_path)
    assert "experts" not in (tmp_path / "generation_config.json").read_text()
    for text in ((tmp_path / "config.json").read_text(), json.dumps(model.config.to_dict(), default=str)):
        assert "routed_experts" not in text
        assert "experts_implementation" not in text
    loaded = type(model).from_pretrained(tmp_path)
    assert rx.get_experts_implementation(loaded)[""] == "transformers:grouped_mm"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_choice_and_are_apart(duplicate):
    model = build_composite()
    rx.set_experts_implementation(model, {"": "eager", "text_config": "batched_mm"})
    wanted = logits(model)
    twin = duplicate(model)
    assert rx.get_experts_implementation(twin) == rx.get_experts_implementation(model)
    assert torch.equal(logits(twin), wanted)
    rx.set_experts_implementation(twin, "grouped_mm")
    assert rx.get_experts_implementation(model)["text_config"] == "batched_mm"
    for number, layer in enumerate(twin.model.language_model.layers):
        draw_parameters(layer.mlp.experts, seed=50 + number)
    assert torch.equal(logits(model), wanted)
