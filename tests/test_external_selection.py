"""Backends over external kernels through the front door: what is chosen, what is refused, what a failed load leaves."""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch
from external_experts import error_of, plain, routed
from external_fakes import FakeDeepGemm, FakeSonicMoe

import routed_experts as rx
from routed_experts import facts as facts_module
from routed_experts.backends import registry
from routed_experts.backends.spec import Backend, Cost, Spec
from routed_experts.loaders import load_kernel

CHEAP = Cost(call_us=0.1, bytes_per_us=1e12, flops_per_us=1e12)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    rx.reset_kernels()
    yield
    rx.reset_kernels()


@pytest.fixture
def cheap(monkeypatch):
    """A backend over the kernel sonicmoe that runs on this machine and that auto finds cheapest."""
    from routed_experts.backends import sonicmoe

    kernel = [need for need in sonicmoe._MACHINE if need["kind"] in ("kernel", "kernel_loads")]
    spec = Spec(name="cheap", devices=("cpu",), requires=tuple(kernel), cost={"cpu": CHEAP})
    table = {**registry.REGISTRY.backends(), "cheap": Backend(rows=((spec, sonicmoe.run),))}
    monkeypatch.setattr(registry.REGISTRY, "_backends", table)
    # On a machine without a GPU nobody looks for kernels, for their backends all want one.
    gathered = facts_module._gathered.__wrapped__
    everywhere = functools.cache(lambda device, key, whole: gathered(device, key, True))
    monkeypatch.setattr(facts_module, "_gathered", everywhere)
    registry.REGISTRY.renew()
    yield
    monkeypatch.undo()
    registry.REGISTRY.renew()


def test_auto_runs_a_kernel_that_is_here(cheap):
    fake, call = FakeSonicMoe(), routed(4)
    rx.register_kernel("sonicmoe", fake)
    got = rx.run_experts(*call, plain())
    assert len(fake.calls) == 1
    assert error_of(got, rx.run_experts(*call, plain(), backend="eager")) < 1e-2


def test_auto_goes_on_where_a_load_fails_and_by_name_it_is_an_error(cheap):  # B60
    rx.register_kernel("sonicmoe", types.SimpleNamespace())
    experts, call = plain(), routed(4)
    assert rx.select_backend(experts, num_tokens=4).name == "cheap"
    got = rx.run_experts(*call, experts)
    assert torch.equal(got, rx.run_experts(*call, experts, backend=rx.select_backend(experts, num_tokens=4).name))
    selection = rx.select_backend(experts, num_tokens=4)
    assert selection.name != "cheap"
    refused = next(one for one in selection.decisions if one.backend == "cheap")
    assert "enums.ActivationType" in refused.found
    with pytest.raises(rx.BackendUnavailable, match=r"enums\.ActivationType"):
        rx.run_experts(*call, experts, backend="cheap")
    rx.register_kernel("sonicmoe", FakeSonicMoe())
    assert rx.select_backend(experts, num_tokens=4).name == "cheap"


def test_auto_fetches_nothing(cheap):
    assert rx.select_backend(plain(), num_tokens=4).name != "cheap"


def test_setting_a_backend_loads_nothing():
    model = rx.RoutedExperts(4, 32, 16, dtype=torch.bfloat16)
    fake = FakeDeepGemm()
    type(fake).__getattr__ = lambda self, name: pytest.fail(f"{name} was asked for")
    try:
        rx.register_kernel("deepgemm", fake)
        rx.set_experts_implementation(model, "deepgemm")
        assert rx.get_experts_implementation(model) == {"": "deepgemm"}
        assert fake.calls == []
    finally:
        del type(fake).__getattr__


@pytest.mark.parametrize("name", ["deepgemm", "sonicmoe"])
def test_a_name_is_never_replaced(name):  # B62
    model = rx.RoutedExperts(4, 32, 16, dtype=torch.bfloat16, experts_implementation=name)
    with torch.no_grad(), pytest.raises(rx.BackendUnavailable) as caught:
        model(torch.randn(2, 32).bfloat16(), torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1))
    assert "eager" in str(caught.value)


def test_registering_is_seen_by_the_facts(monkeypatch):
    facts = dataclasses.replace(rx.current_facts(), device="cuda", capability=(9, 0), python="3.12.1")
    packages = {"nvidia-cutlass-dsl": "4.6.0", "apache-tvm-ffi": "0.1.10"}
    before = facts.replace(packages=packages)
    with pytest.raises(rx.BackendUnavailable, match="another source of the kernel sonicmoe"):
        rx.select_backend(plain(), num_tokens=4, backend="sonicmoe", facts=before)
    rx.register_kernel("sonicmoe", FakeSonicMoe())
    after = rx.current_facts().replace(capability=(9, 0), python="3.12.1", packages=packages)
    assert rx.select_backend(plain(), num_tokens=4, backend="sonicmoe", facts=after).name == "sonicmoe"
    assert load_kernel("sonicmoe").source in after.kernels["sonicmoe"]["source"]
