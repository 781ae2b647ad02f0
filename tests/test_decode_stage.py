"""decode_stage on plain torch models; the meta device stands for an accelerator."""

from __future__ import annotations

import pytest
from toy_models import FRESH, KEYS, Composite, E, Foreign, H, I, Own, Stack

from routed_experts.models import decode_stage, get_experts_implementation, set_experts_implementation
from routed_experts.modules import RoutedExperts
from routed_experts.switching import AttributeSwitch, ForwardSwitch


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
    model = Stack(RoutedExperts(E, H, I, experts_implementation="grouped_mm", device="meta"), Own(device="meta"))
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
