"""Registering, listing and removing backends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from routed_experts import errors
from routed_experts.backends import BUILT_IN, registry
from routed_experts.backends.registry import (
    REGISTRY,
    ExpertsInterface,
    backends,
    check_name,
    register_backend,
    unregister_backend,
)
from routed_experts.backends.spec import Spec


def mine(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    return hidden_states


def other(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    return hidden_states * 2


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    for name in set(backends()) - set(BUILT_IN):
        unregister_backend(name)


def test_the_built_in_backends():
    assert tuple(backends()) == BUILT_IN
    assert all(isinstance(spec, Spec) and spec.name == name for name, spec in backends().items())


def test_backends_is_the_callers_own_dict():
    backends().clear()
    assert tuple(backends()) == BUILT_IN


def test_a_function_alone_runs_only_by_name():
    register_backend("mine", mine)
    spec = backends()["mine"]
    assert (spec.takes, spec.gives, spec.auto) == ("routing", "tokens", False)
    assert REGISTRY.table().rows[-1] == (spec, mine)


def test_the_same_again_changes_nothing():
    register_backend("mine", mine)
    generation = REGISTRY.generation
    register_backend("mine", mine)
    assert REGISTRY.generation == generation


def test_every_change_is_a_new_generation():
    generations = [REGISTRY.table().generation]
    register_backend("mine", mine)
    generations.append(REGISTRY.table().generation)
    unregister_backend("mine")
    generations.append(REGISTRY.table().generation)
    assert generations == sorted(set(generations))


@pytest.mark.parametrize("name", ["grouped_mm", "mine"])
def test_a_taken_name_is_refused(name):
    register_backend("mine", mine)
    with pytest.raises(errors.LayoutError, match="registered already") as caught:
        register_backend(name, other)
    assert isinstance(caught.value, ValueError)
    assert ("unregister_backend" in caught.value.hint) == (name == "mine")
    assert REGISTRY.backends()["mine"].rows[0][1] is mine


@pytest.mark.parametrize(
    ("name", "fn", "spec", "message"),
    [
        ("mine", mine, Spec(name="yours"), "another backend"),
        ("", mine, None, "needs a name"),
        ("auto", mine, None, "needs a name"),
        (None, mine, None, "needs a name"),
        ("mine", "mine", None, "cannot be called"),
        ("mine", mine, Spec(name="mine", requires=({"kind": "fast_gpu"},)), "cannot be read"),
        ("mine", mine, Spec(name="mine", requires=({"kind": "torch", "min": "new"},)), "cannot be read"),
    ],
)
def test_what_cannot_be_registered(name, fn, spec, message):
    before = backends()
    with pytest.raises(errors.LayoutError, match=message) as caught:
        register_backend(name, fn, spec=spec)
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint
    assert backends() == before


def test_removing():
    with pytest.raises(errors.UnknownBackend, match="grouped_mm"):
        unregister_backend("mine")
    for name in ("eager", "auto"):
        with pytest.raises(errors.LayoutError, match="cannot be removed") as caught:
            unregister_backend(name)
        assert caught.value.hint
    assert tuple(backends()) == BUILT_IN


def test_names():
    check_name("auto")
    check_name("eager")
    with pytest.raises(errors.UnknownBackend, match='did you mean "batched_mm"'):
        check_name("batch_mm")


def test_the_interface_is_the_registry():
    assert list(ExpertsInterface) == list(backends())
    assert len(ExpertsInterface) == len(BUILT_IN)
    ExpertsInterface["mine"] = mine
    assert ExpertsInterface["mine"] is mine
    assert "mine" in backends()
    with pytest.raises(errors.LayoutError):
        ExpertsInterface["mine"] = other
    del ExpertsInterface["mine"]
    assert "mine" not in ExpertsInterface
    ExpertsInterface.register("mine", mine)
    assert ExpertsInterface.pop("mine") is mine
    assert "mine" not in backends()


@pytest.mark.parametrize("name", ["auto", "mine", None])
def test_the_interface_is_a_mapping(name):
    assert name not in ExpertsInterface
    assert ExpertsInterface.get(name) is None
    with pytest.raises(KeyError):
        ExpertsInterface[name]


def test_a_built_in_value_goes_through_run_experts(monkeypatch):
    calls = []

    class Moe:
        @staticmethod
        def run_experts(*args: Any, **kwargs: Any) -> str:
            calls.append((args, kwargs))
            return "result"

    monkeypatch.setitem(sys.modules, "routed_experts.moe", Moe)
    assert ExpertsInterface["eager"]("experts", "x", "index", "weights") == "result"
    ExpertsInterface.register("slots", mine, spec=Spec(name="slots", takes="slots", gives="slots"))
    assert ExpertsInterface["slots"]("experts", "x", "index", "weights") == "result"
    assert calls == [
        (("x", "index", "weights", "experts"), {"backend": "eager"}),
        (("x", "index", "weights", "experts"), {"backend": "slots"}),
    ]


def test_many_threads_see_whole_tables():
    torn: list[Any] = []

    def work(name: str) -> None:
        for _ in range(20):
            register_backend(name, mine)
            table = REGISTRY.table()
            if name not in [spec.name for spec, _ in table.rows]:
                torn.append(name)
            unregister_backend(name)

    threads = [threading.Thread(target=work, args=(f"mine{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert tuple(backends()) == BUILT_IN


def test_importing_the_registry_imports_no_backend():
    code = (
        "import sys, routed_experts.backends.registry;"
        "print([n for n in sys.modules if n.startswith('routed_experts.backends.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "registry" in done.stdout
    assert not any(f"backends.{name}'" in done.stdout for name in BUILT_IN)
    assert registry.BUILT_IN is BUILT_IN
