"""The decode stage inside generate, with the CPU standing for an accelerator."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from test_models_transformers import TOKENS
from transformers import LogitsProcessor, PreTrainedConfig, Qwen3MoeForCausalLM
from transformers.generation import GenerationMixin
from transformers_models import BUILD, build_composite, build_text

import routed_experts as rx
from routed_experts import config_names, parts
from routed_experts.transformers_integration import decoding

pytestmark = pytest.mark.usefixtures("registered")

PROMPT = TOKENS[:1]
HOW = {"max_new_tokens": 16, "min_new_tokens": 16, "pad_token_id": 0}
GREEDY = HOW | {"do_sample": False}
OURS, DECODE = "routed_experts_grouped_mm", "routed_experts_batched_mm"


@pytest.fixture
def accelerator(monkeypatch):
    monkeypatch.setattr(parts, "weight_device", lambda module: torch.device("cuda"))


class Recorded:
    """In place of the configs' attribute: keeps every value that is put there, in order, by whomever."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __get__(self, config, owner=None):
        try:
            return config.__dict__[config_names.ATTRIBUTE]
        except KeyError:
            raise AttributeError(config_names.ATTRIBUTE) from None

    def __set__(self, config, value):
        self.seen.append(value)
        config.__dict__[config_names.ATTRIBUTE] = value


@pytest.fixture
def changes(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr(PreTrainedConfig, config_names.ATTRIBUTE, recorded, raising=False)
    return recorded.seen


class Watch:
    """The names that a model's calls run on, and the tokens of each call; fails in a call if told to."""

    def __init__(self, model: torch.nn.Module, fail_at: int = 0) -> None:
        self.names: list[str] = []
        self.tokens: list[int] = []
        self.fail_at = fail_at
        model.register_forward_pre_hook(self.see, with_kwargs=True)

    def see(self, model, args, kwargs):
        self.names.append(model.config.get_text_config()._experts_implementation)
        ids = args[0] if args else kwargs["input_ids"]
        self.tokens.append(ids.shape[1])
        if len(self.names) == self.fail_at:
            raise MemoryError(f"call {self.fail_at}")


def on(name: str, family: str = "text") -> torch.nn.Module:
    model = BUILD[family]()
    model.set_experts_implementation(name)
    return model


@pytest.mark.parametrize("family", BUILD)
@pytest.mark.parametrize("sampling", [False, True])
def test_one_switch_and_one_restore(family, sampling, accelerator, changes):
    """B70: prefill on the chosen backend, every later token on its stand-in, experts of a sub-model included."""
    model = on(OURS, family)
    watch, parts_with_config = Watch(model), len(model.get_experts_implementation())
    changes.clear()
    model.generate(PROMPT, **HOW, do_sample=sampling)
    assert watch.names == [OURS] + [DECODE] * 15
    assert watch.tokens == [12] + [1] * 15
    assert changes == [DECODE] * parts_with_config + [OURS] * parts_with_config
    assert set(model.get_experts_implementation().values()) == {OURS}


def test_experts_run_on_what_the_config_says(accelerator, asked):
    model = on(OURS)
    wanted = on("eager").generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, **GREEDY), wanted)
    assert asked == ["grouped_mm"] * 2 + ["batched_mm"] * 30


def test_on_a_cpu_nothing_switches(changes):
    model = on(OURS)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY)
    model.generate(PROMPT, **GREEDY, num_beams=2)
    assert set(watch.names) == {OURS}
    assert changes == []


@pytest.mark.parametrize("name", ["routed_experts", "routed_experts_eager", DECODE, "eager", "grouped_mm"])
def test_other_names_are_left_alone(name, accelerator, changes):
    model = on(name)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY)
    model.generate(PROMPT, **GREEDY, num_beams=2)
    assert set(watch.names) == {name}
    assert changes == []


def test_parts_on_other_names_are_left_alone(accelerator, changes):
    model = build_composite()
    before = {"": DECODE, "text_config": OURS, "vision_config": "eager"}
    rx.set_experts_implementation(
        model, {"": "batched_mm", "text_config": "grouped_mm", "vision_config": "transformers:eager"}
    )
    assert model.get_experts_implementation() == before
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY)
    assert changes == [DECODE, OURS]
    assert watch.names == [OURS] + [DECODE] * 15
    assert model.get_experts_implementation() == before


def test_parts_on_the_cpu_stay(monkeypatch, changes):
    """The device is that of the experts, not that of the model's first parameter."""
    model = on(OURS)
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    watch = Watch(model)
    changes.clear()
    with model._optimize_model_for_decode():
        model(PROMPT)
    assert watch.names == [OURS]
    assert changes == []


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("fail_at", [1, 3])
def test_an_exception_restores(fail_at, beams, accelerator, changes):
    model = on(OURS)
    watch = Watch(model, fail_at)
    changes.clear()
    with pytest.raises(MemoryError, match=f"call {fail_at}"):
        model.generate(PROMPT, **GREEDY, num_beams=beams)
    assert watch.names == [OURS] + [DECODE] * (fail_at - 1)
    assert changes == ([] if fail_at == 1 else [DECODE, OURS])
    assert model.get_experts_implementation() == {"": OURS}
    assert decoding._running.generations == []


@pytest.mark.parametrize("sampling", [False, True])
def test_beam_search_switches_from_its_second_call(sampling, accelerator, changes):
    model = on(OURS)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **HOW, do_sample=sampling, num_beams=3)
    assert watch.names == [OURS] + [DECODE] * 15
    assert changes == [DECODE, OURS]


def test_chunked_prefill_is_all_prefill(accelerator, changes):
    model = on(OURS)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY, prefill_chunk_size=5)
    model.generate(PROMPT, **GREEDY, num_beams=2, prefill_chunk_size=5)
    assert watch.names == ([OURS] * 3 + [DECODE] * 15) * 2
    assert changes == [DECODE, OURS] * 2


def test_assisted_decoding(accelerator, changes):
    model, assistant = on(OURS), on(OURS)
    watch = Watch(model)
    changes.clear()
    wanted = on("eager").generate(PROMPT, **GREEDY)
    changes.clear()
    assert torch.equal(model.generate(PROMPT, **GREEDY, assistant_model=assistant), wanted)
    assert len(watch.names) > 1
    assert watch.names == [OURS] + [DECODE] * (len(watch.names) - 1)
    assert model.get_experts_implementation() == assistant.get_experts_implementation() == {"": OURS}


def test_assisted_by_its_own_prompt(accelerator, changes):
    model = on(OURS)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY, prompt_lookup_num_tokens=2)
    assert len(watch.names) > 1
    assert watch.names == [OURS] + [DECODE] * (len(watch.names) - 1)
    assert changes == [DECODE, OURS]


# A model that drafts for itself has ended its first draft, a generation of its own, before its prefill.
@pytest.mark.parametrize(("how", "stages"), [({"prompt_lookup_num_tokens": 2}, 1), ({"assistant_early_exit": 1}, 2)])
def test_assisted_decoding_of_releases_without_a_stage_in_it(how, stages, accelerator, changes, monkeypatch):
    rx.unregister_from_transformers()
    monkeypatch.setattr(GenerationMixin, "_optimize_model_for_decode", lambda self: contextlib.nullcontext())
    rx.register_with_transformers()
    model = on(OURS)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY, **how)
    prefilled = [name for name, tokens in zip(watch.names, watch.tokens, strict=True) if tokens >= PROMPT.shape[1]]
    assert watch.names.count(OURS) == len(prefilled) == stages
    assert set(prefilled) == {OURS}
    assert changes == [DECODE, OURS] * stages
    assert not model._forward_hooks
    rx.unregister_from_transformers()
    monkeypatch.undo()


class Nested(LogitsProcessor):
    """Generates with the same model, or another one, in the middle of a generation."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.step = model, 0

    def __call__(self, input_ids, scores):
        self.step += 1
        if self.step in (1, 3):
            self.model.generate(PROMPT, **(GREEDY | {"max_new_tokens": 2, "min_new_tokens": 2}))
        return scores


@pytest.mark.parametrize("beams", [1, 2])
def test_nested_generation_of_the_same_model(beams, accelerator, changes):
    model = on(OURS)
    changes.clear()
    model.generate(PROMPT, **GREEDY, num_beams=beams, logits_processor=[Nested(model)])
    assert changes == [DECODE, OURS]


def test_nested_generation_of_another_model(accelerator, changes):
    model, other = on(OURS), on(OURS)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY, logits_processor=[Nested(other)])
    assert watch.names == [OURS] + [DECODE] * 15
    assert changes == [DECODE] + [DECODE, OURS] * 2 + [OURS]


def test_a_stage_around_the_generation_is_the_outer_one(accelerator, changes):
    model = on(OURS)
    changes.clear()
    with rx.decode_stage(model):
        model.generate(PROMPT, **GREEDY)
        assert model.get_experts_implementation() == {"": DECODE}
    assert changes == [DECODE, OURS]


def per_token(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    """A loop as releases up to 5.12 have it: their decode stage is opened for every token."""
    prompt = input_ids.shape[1]
    input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], -1)
    while input_ids.shape[1] < prompt + 16:
        with model._optimize_model_for_decode():
            input_ids = torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], -1)
    return input_ids


def test_a_stage_that_opens_for_every_token_switches_once(accelerator, changes):
    model = on(OURS)
    watch = Watch(model)
    changes.clear()
    model.generate(PROMPT, **GREEDY, custom_generate=per_token)
    assert watch.names == [OURS] + [DECODE] * 15
    assert changes == [DECODE, OURS]


def test_a_loop_outside_generate_is_switched_as_long_as_it_asks(accelerator, changes):
    model = on(OURS)
    changes.clear()
    seen = []

    def step():
        with model._optimize_model_for_decode():
            seen.append(model.get_experts_implementation())
            raise MemoryError

    with pytest.raises(MemoryError):
        step()
    assert seen == [{"": DECODE}]
    assert changes == [DECODE, OURS]


def test_backends_of_ones_own_name_their_stand_in(accelerator):
    run = {"mine": "eager", "mine_at_decode": "eager"}
    for name, decode_as in (("mine", "mine_at_decode"), ("mine_at_decode", "")):

        def fn(experts, x, index, weights, backend=run[name]):
            return rx.run_experts(x, index, weights, experts, backend=backend)

        rx.register_backend(name, fn, spec=rx.Spec(name=name, auto=False, decode_as=decode_as))
    try:
        model = on("routed_experts_mine")
        watch = Watch(model)
        model.generate(PROMPT, **GREEDY)
        assert watch.names == ["routed_experts_mine"] + ["routed_experts_mine_at_decode"] * 15
    finally:
        for name in run:
            rx.unregister_backend(name)


def test_choices_held_by_a_forward_are_switched_too(accelerator, changes, asked):
    rx.unregister_from_transformers()
    model = build_text()
    rx.set_experts_implementation(model, "grouped_mm")
    rx.register_with_transformers()
    model.generate(PROMPT, **GREEDY)
    assert asked == ["grouped_mm"] * 2 + ["batched_mm"] * 30
    assert rx.get_experts_implementation(model) == {"": "grouped_mm"}


def test_replaced_names_are_switched_by_the_library(accelerator, changes, monkeypatch, asked):
    rx.register_with_transformers(replace=True)
    model = on("grouped_mm")
    changes.clear()
    model.generate(PROMPT, **GREEDY)
    assert changes == []  # it asks for the device of the model, which is a CPU
    with rx.decode_stage(model):
        assert rx.get_experts_implementation(model) == {"": "batched_mm"}
    assert model.get_experts_implementation() == {"": "grouped_mm"}
    changes.clear()
    # Their condition for the switch, met for the decode stage alone: no tensor can be made on this device.
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda")))
    with model._optimize_model_for_decode():
        asked.clear()
        model(PROMPT)
    assert asked == ["batched_mm"] * 2
    assert changes == ["batched_mm", "grouped_mm"]


def test_models_of_one_config_generating_at_once_end_where_they_began(accelerator):
    model = on(OURS)
    twins = [model, Qwen3MoeForCausalLM(model.config).eval(), copy.deepcopy(model)]
    errors = []

    def work(twin):
        try:
            for _ in range(3):
                twin.generate(PROMPT, **GREEDY)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(twin,)) for twin in twins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    assert {twin.config._experts_implementation for twin in twins} == {OURS}


def test_unregistered_generation_is_the_librarys_own(accelerator, changes):
    model = on("eager")
    rx.unregister_from_transformers()
    changes.clear()
    model.generate(PROMPT, **GREEDY)
    assert changes == []
    assert "routed_experts" not in type(model).generate.__code__.co_filename
