"""register_with_transformers: names, every hook, and putting everything back."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from test_models_transformers import TOKENS, logits
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.integrations import finegrained_fp8, moe
from transformers_models import build_composite, build_text, prefixed

import routed_experts as rx
from routed_experts.config_names import STATE
from routed_experts.transformers_integration import forward_for, plugin
from routed_experts.transformers_integration.validation import ValidationAdapter


def hooks() -> list[object]:
    """Everything of transformers that registering may touch."""
    owners = (PreTrainedModel, PreTrainedConfig, GenerationMixin)
    registries = (moe.ExpertsInterface, finegrained_fp8.FP8ExpertsInterface)
    return [*(dict(vars(owner)) for owner in owners), *(dict(r._global_mapping) for r in registries)]


@pytest.fixture(autouse=True)
def _as_it_was():
    before = hooks()
    rx.register_with_transformers()
    yield
    rx.unregister_from_transformers()
    assert hooks() == before


def test_importing_does_not_import_transformers():
    code = (
        "import sys, routed_experts.transformers_integration as t; assert 'transformers' not in sys.modules;"
        "t.unregister_from_transformers(); assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(rx.BackendUnavailable, match="pip install"):
        rx.register_with_transformers()


def test_names_stand_in_both_registries():
    wanted = {prefixed(name) for name in ["auto", *rx.backends()]}
    for registry in (moe.ALL_EXPERTS_FUNCTIONS, finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS):
        assert {name for name in registry if name.startswith("routed_experts")} == wanted
        assert registry["routed_experts_eager"] is forward_for("eager") is forward_for("routed_experts_eager")
    with pytest.raises(rx.UnknownBackend):
        forward_for("bogus")


def test_registering_again_changes_nothing():
    once = hooks()
    rx.register_with_transformers()
    assert hooks() == once


def test_threads_register_and_unregister():
    errors = []

    def work(number):
        try:
            for _ in range(5):
                rx.register_with_transformers(replace=bool(number % 2))
                rx.register_backend(f"mine{number}", lambda e, x, i, w: x)
                rx.unregister_backend(f"mine{number}")
                rx.unregister_from_transformers()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    assert not any(name.startswith("routed_experts") for name in moe.ALL_EXPERTS_FUNCTIONS)
    assert moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is moe.grouped_mm_experts_forward


def test_backends_registered_later_have_names_too():
    rx.register_backend("mine", lambda experts, x, index, weights: 0 * x)
    try:
        model = build_text()
        model.set_experts_implementation("routed_experts_mine")
        assert rx.get_experts_implementation(model) == {"": "mine"}
        assert logits(model).isfinite().all()
    finally:
        rx.unregister_backend("mine")
    assert "routed_experts_mine" not in moe.ALL_EXPERTS_FUNCTIONS
    assert "routed_experts_mine" not in finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    with pytest.raises(ValueError, match="routed_experts_mine"):
        build_text().set_experts_implementation("routed_experts_mine")


def test_entries_of_others_come_back(monkeypatch):
    rx.unregister_from_transformers()
    monkeypatch.setitem(moe.ExpertsInterface._global_mapping, "routed_experts_eager", len)
    rx.register_with_transformers()
    assert moe.ALL_EXPERTS_FUNCTIONS["routed_experts_eager"] is forward_for("eager")
    moe.ExpertsInterface.register("routed_experts_batched_mm", max)
    rx.unregister_from_transformers()
    assert moe.ALL_EXPERTS_FUNCTIONS["routed_experts_eager"] is len
    assert moe.ExpertsInterface._global_mapping.pop("routed_experts_batched_mm") is max


def test_wrappers_put_on_top_of_ours_survive(monkeypatch):
    ours = GenerationMixin.generate
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *a, **k: ours(self, *a, **k))
    theirs = GenerationMixin.generate
    rx.unregister_from_transformers()
    assert GenerationMixin.generate is theirs
    assert build_text().generate(TOKENS[:1], max_new_tokens=2, pad_token_id=0).shape == (1, 14)
    monkeypatch.undo()
    GenerationMixin.generate = ours.__wrapped__


def test_a_hook_that_does_not_fit_is_left_out_alone(monkeypatch):
    rx.unregister_from_transformers()
    monkeypatch.delattr(GenerationMixin, "_assisted_decoding")
    with pytest.warns(RuntimeWarning, match="decode stage of assisted decoding") as caught:
        rx.register_with_transformers()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    rx.register_with_transformers()  # not tried again: a second warning would be an error here
    model = build_text()
    model.set_experts_implementation("routed_experts")
    assert model.generate(TOKENS[:1], max_new_tokens=2, pad_token_id=0).shape == (1, 14)
    rx.unregister_from_transformers()
    monkeypatch.undo()


@pytest.mark.parametrize("adapter", plugin.ADAPTERS, ids=lambda adapter: adapter.__name__)
def test_every_hook_may_fail(adapter, monkeypatch):
    rx.unregister_from_transformers()
    before = hooks()

    def fail(self, plan):
        raise RuntimeError("not in this release")

    monkeypatch.setattr(adapter, "install", fail)
    with pytest.warns(RuntimeWarning, match="not in this release") as caught:
        rx.register_with_transformers()
    assert [adapter.name in str(one.message) for one in caught] == [True]
    assert hooks() != before
    rx.unregister_from_transformers()
    assert hooks() == before


def test_fixed_lists_of_names_let_ours_through(monkeypatch):
    """As releases up to 5.6 check: three names, whatever is registered."""
    rx.unregister_from_transformers()
    theirs = PreTrainedModel.get_correct_experts_implementation

    def fixed(self, requested_experts):
        if requested_experts not in (None, "eager", "grouped_mm", "batched_mm"):
            raise ValueError(requested_experts)
        return theirs(self, requested_experts)

    monkeypatch.setattr(PreTrainedModel, "get_correct_experts_implementation", fixed)
    rx.register_with_transformers()
    model = build_text()
    for name in ("routed_experts", "routed_experts_eager", "batched_mm"):
        model.set_experts_implementation(name)
        assert model.get_experts_implementation() == {"": name}
    for name in ("routed_experts_bogus", "bogus", "routed"):
        with pytest.raises(ValueError, match=name):
            model.set_experts_implementation(name)
    rx.unregister_from_transformers()
    assert PreTrainedModel.get_correct_experts_implementation is fixed
    monkeypatch.undo()


def test_the_check_of_names_is_left_alone_where_it_knows_ours():
    adapter = ValidationAdapter()
    adapter.make_patches()
    assert adapter.patches == []


def test_get_method_where_there_is_none(monkeypatch):
    rx.unregister_from_transformers()
    model = build_composite()
    wanted = model.get_experts_implementation()
    monkeypatch.delattr(PreTrainedModel, "get_experts_implementation")
    rx.register_with_transformers()
    assert model.get_experts_implementation() == wanted
    rx.unregister_from_transformers()
    assert not hasattr(model, "get_experts_implementation")
    monkeypatch.undo()


def test_replacing_puts_ours_behind_their_names(asked):
    rx.register_with_transformers(replace=True)
    assert STATE.replaced == {"batched_mm", "grouped_mm"}
    model = build_text()
    own = {"eager": logits(model)}
    assert asked == ["grouped_mm"] * 2  # what transformers runs unless told otherwise
    for name in ("batched_mm", "grouped_mm", "eager"):
        asked.clear()
        model.set_experts_implementation(name)
        own[name] = logits(model)
        assert asked == ([] if name == "eager" else [name] * 2)
    assert max((found - own["eager"]).abs().max().item() for found in own.values()) < 1e-4
    fp8 = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    assert fp8["grouped_mm"] is finegrained_fp8.fp8_grouped_mm_experts_forward
    rx.register_with_transformers()
    assert moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] is moe.grouped_mm_experts_forward
    assert moe.ALL_EXPERTS_FUNCTIONS["batched_mm"] is moe.batched_mm_experts_forward


def test_replaced_names_read_as_ours():
    rx.register_with_transformers(replace=True)
    model = build_text()
    assert rx.get_experts_implementation(model) == {"": "grouped_mm"}
    rx.set_experts_implementation(model, rx.get_experts_implementation(model))
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    with pytest.raises(rx.SwitchError, match="replace=True"):
        rx.set_experts_implementation(model, "transformers:batched_mm")
    rx.set_experts_implementation(model, "transformers:eager")
    assert model.get_experts_implementation() == {"": "eager"}


def test_after_unregistering_a_name_of_ours_is_unknown():
    model = build_text()
    model.set_experts_implementation("routed_experts_eager")
    rx.unregister_from_transformers()
    with pytest.raises(KeyError, match="routed_experts_eager"):
        logits(model)
    assert rx.get_experts_implementation(model) == {"": "transformers:routed_experts_eager"}
    rx.set_experts_implementation(model, "eager")
    assert logits(model).isfinite().all()
