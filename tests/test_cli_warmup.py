"""``routed-experts warmup``: what it runs, fetches and reports."""

from __future__ import annotations

import importlib
import json

import pytest
from click.testing import CliRunner, Result

import routed_experts as rx
from routed_experts.backends.registry import REGISTRY
from routed_experts.cli import main
from routed_experts.errors import BackendUnavailable

warmup = importlib.import_module("routed_experts.cli.warmup")  # the package's attribute is the command
TINY = ("--shape", "4,2,32,16", "--device", "cpu", "--dtypes", "float32", "--tokens", "1,3")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["warmup", *arguments])


@pytest.fixture
def calls():
    """A backend of its own that notes the calls it gets, and what it fetched."""
    seen = []

    def run(experts, x, index, weights):
        seen.append((x.shape[0], x.requires_grad))
        return x * 1

    rx.register_backend("external", run)
    yield seen
    rx.unregister_backend("external")


def with_fetch(monkeypatch, fetch):
    (_, run), *_ = REGISTRY.backends()["external"].rows
    monkeypatch.setattr(run, "load", fetch, raising=False)


def test_every_count_is_run_in_every_mode(calls):
    result = invoke(*TINY, "--backends", "external", "--modes", "eager,training", "--json")
    assert result.exit_code == 0, result.output
    steps = json.loads(result.stdout)["steps"]
    assert [step["what"] for step in steps] == ["4,2,32,16 float32, eager", "4,2,32,16 float32, training"]
    assert all(step["done"] == "2 token counts on external" for step in steps)
    assert calls == [(1, False), (1, False), (3, False), (3, False), (1, True), (1, True), (3, True), (3, True)]


def test_kernels_of_others_are_fetched_for_the_backends_named(calls, monkeypatch):
    fetched = []
    with_fetch(monkeypatch, lambda: fetched.append(1))
    status = [{"kernel": "external", "source": "kernels-community/x, revision 3"}]
    monkeypatch.setattr(warmup, "kernel_status", lambda: status)
    assert json.loads(invoke(*TINY, "--backends", "eager", "--json").stdout)["steps"][0]["what"] != "fetch"
    assert fetched == []
    steps = json.loads(invoke(*TINY, "--backends", "external", "--json").stdout)["steps"]
    assert (steps[0]["what"], steps[0]["done"]) == ("fetch", "loaded from kernels-community/x, revision 3")
    assert fetched == [1]


def test_what_cannot_be_fetched_or_run_ends_with_status_1(calls, monkeypatch):
    def offline():
        raise BackendUnavailable("no network", found="offline", needed="the hub", hint="HF_HUB_OFFLINE=0")

    with_fetch(monkeypatch, offline)
    result = invoke(*TINY, "--backends", "external")
    assert result.exit_code == 1
    for part in ("found: offline", "needed: the hub", "hint: HF_HUB_OFFLINE=0"):
        assert part in result.stdout
    result = invoke(*TINY, "--backends", "auto,deepgemm_megamoe", "--json")
    assert result.exit_code == 1
    fetched, auto, megamoe = json.loads(result.stdout)["steps"]
    assert auto["error"] is None
    assert fetched["error"]["needed"]
    assert megamoe["error"]["needed"]


def test_an_unknown_backend_is_named_at_once():
    result = invoke(*TINY, "--backends", "fuesd")
    assert result.exit_code == 1
    assert "fused" in result.stderr


def test_files_that_caches_gained_are_counted(calls, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with_fetch(monkeypatch, lambda: (tmp_path / "kernel").mkdir())
    found = json.loads(invoke(*TINY, "--backends", "external", "--json").stdout)["new_cache_files"]
    assert found["TRITON_CACHE_DIR"] == {"folder": str(tmp_path), "entries": 1}
