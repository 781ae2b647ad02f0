"""Neither setter, and no way of saving, gets around a backend that reshapes weights."""

from __future__ import annotations

import pytest
import torch
from transformers_models import build_composite, build_text, composite_config, text_config

import routed_experts as rx
from routed_experts.reshaped import mark_reshaped

pytestmark = pytest.mark.usefixtures("registered")

MEGAMOE = "routed_experts_deepgemm_megamoe"
FREE = "routed_experts_grouped_mm"


def on_megamoe(part: str | None = None):
    """A model that was loaded on it."""
    model = build_composite() if part else build_text()
    config = getattr(model.config, part) if part else model.config
    config._experts_implementation_internal = MEGAMOE
    return model


@pytest.mark.parametrize("asked", [FREE, "grouped_mm", "eager", "routed_experts"])
def test_its_own_setter_does_not_leave(asked):
    model = on_megamoe()
    with pytest.raises(rx.SwitchError) as caught:
        model.set_experts_implementation(asked)
    assert isinstance(caught.value, RuntimeError)
    assert "deepgemm_megamoe" in str(caught.value)
    assert model.config._experts_implementation == MEGAMOE
    with pytest.raises(rx.SwitchError):
        rx.set_experts_implementation(model, "grouped_mm")


def test_its_own_setter_does_not_enter():
    model = build_text()
    before = model.get_experts_implementation()
    with pytest.raises(rx.SwitchError):
        model.set_experts_implementation(MEGAMOE)
    assert model.get_experts_implementation() == before
    model.set_experts_implementation(FREE)
    assert model.get_experts_implementation() == {"": FREE}


@pytest.mark.parametrize("asked", [{"text_config": MEGAMOE}, {"": FREE, "text_config": MEGAMOE}])
def test_parts_do_not_enter_and_nothing_is_changed(asked):
    model = build_composite()
    before = model.get_experts_implementation()
    with pytest.raises(rx.SwitchError):
        model.set_experts_implementation(asked)
    assert model.get_experts_implementation() == before


@pytest.mark.parametrize("asked", [FREE, {"text_config": FREE}])
def test_parts_do_not_leave(asked):
    model = on_megamoe("text_config")
    before = model.get_experts_implementation()
    with pytest.raises(rx.SwitchError):
        model.set_experts_implementation(asked)
    assert model.get_experts_implementation() == before


def test_to_stay_is_no_switch():
    model = on_megamoe()
    model.set_experts_implementation(MEGAMOE)
    assert rx.get_experts_implementation(model) == {"": "deepgemm_megamoe"}


def test_it_can_be_chosen_at_load():
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM._from_config(text_config(), experts_implementation=MEGAMOE)
    assert model.config._experts_implementation == MEGAMOE
    assert composite_config(experts_implementation={"text_config": MEGAMOE}) is not None


def test_reshaped_weights_are_not_saved(tmp_path):
    model = build_text()
    model.save_pretrained(tmp_path / "before")
    mark_reshaped(model.model.layers[0].mlp.experts.down_proj, "deepgemm_megamoe")
    with pytest.raises(rx.SwitchError, match="deepgemm_megamoe has reshaped"):
        model.save_pretrained(tmp_path / "after")
    assert not (tmp_path / "after").exists()
    experts = model.model.layers[0].mlp.experts
    x = torch.zeros(1, experts.down_proj.shape[1])
    with pytest.raises(rx.SwitchError):
        rx.run_experts(x, torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), experts, backend="eager")


def test_the_methods_are_put_back():
    from transformers import PreTrainedModel

    rx.unregister_from_transformers()
    for method in ("set_experts_implementation", "save_pretrained"):
        assert "transformers_integration" not in getattr(PreTrainedModel, method).__code__.co_filename
    rx.register_with_transformers()
