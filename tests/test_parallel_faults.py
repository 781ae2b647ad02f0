"""Ranks that die, hang or make another call: a clear error on every rank, within the timeout."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_inputs import inputs, make
from parallel_ranks import RankFailure, all_good, run_ranks

import routed_experts as rx
from routed_experts.parallel.header import Header, _check

TIMEOUT = 2.0


def attempt(call: Any, *arguments: Any) -> tuple[str, str, float]:
    """Class and text of the error that a call raises, and after how long."""
    start = time.monotonic()
    error = None
    try:
        call(*arguments)
    except rx.RoutedExpertsError as raised:
        error = raised
    seconds = time.monotonic() - start
    if error is None:
        return "no error", "", seconds
    assert all((error.found, error.needed, error.hint))
    return type(error).__name__, str(error), seconds


def one_is_missing(rank: int, how: str, dispatch: str) -> Any:
    experts, _ = make(6)
    layer = rx.parallel.ExpertParallel(experts, None, dispatch, timeout=TIMEOUT)
    batch = inputs(experts=6)
    layer(*batch)
    dist.barrier()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(2.5 * TIMEOUT)
    first, second = attempt(layer, *batch), attempt(layer, *batch)
    if rank != 1 and how == "slow":
        time.sleep(2.5 * TIMEOUT)  # the late one must find out although the others are still there
    return first, second


@pytest.mark.parametrize("dispatch", ["all_reduce", "all_to_all"])
@pytest.mark.parametrize("how", ["killed", "slow"])
def test_a_missing_rank_is_reported_in_time(how, dispatch, tmp_path):
    results = run_ranks(one_is_missing, 3, tmp_path, how, dispatch, wait=40)
    assert (results[1] is None) == (how == "killed")
    for rank, result in enumerate(results):
        if result is None:
            continue
        assert not isinstance(result, RankFailure), result
        (kind, text, seconds), (again, text_again, at_once) = result
        assert kind == "RankError", text
        assert seconds < TIMEOUT + 4  # the machine is busy; the grace of link.py is 2 s
        if rank != 1:
            assert "rank 1: " in text
            assert ("no answer in time" in text) == (how == "slow")
            assert "within 2 s" in text
        assert (again, at_once < 0.5) == ("RankError", True)
        assert "an earlier call on this group failed" in text_again


def dies_in_the_backward(rank: int) -> Any:
    experts, _ = make(8, grad=True)
    layer = rx.parallel.ExpertParallel(experts, None, "all_to_all", timeout=TIMEOUT)
    x, index, weights = inputs(experts=8)
    out = layer(x.requires_grad_(), index, weights)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attempt(out.sum().backward)


def test_a_rank_that_dies_before_the_backward(tmp_path):
    kind, text, seconds = run_ranks(dies_in_the_backward, 2, tmp_path, wait=40)[0]
    assert (kind, seconds < TIMEOUT + 4) == ("RankError", True), text


def fails_while_computing(rank: int) -> Any:
    """A backend that fails on one rank, after rows were sent."""

    def broken(experts: Any, x: torch.Tensor, *_: Any) -> torch.Tensor:
        if rank == 1:
            raise rx.DeviceError("out of order", found="smoke", needed="none", hint="replace it")
        return x

    rx.register_backend("broken", broken)
    experts, _ = make(8)
    layer = rx.parallel.ExpertParallel(experts, None, "all_to_all", backend="broken", timeout=TIMEOUT)
    return attempt(layer, *inputs(experts=8))


def test_a_backend_that_fails_on_one_rank(tmp_path):
    (kind, _, seconds), (own, text, _) = run_ranks(fails_while_computing, 2, tmp_path, wait=40)
    assert (kind, own) == ("RankError", "DeviceError")
    assert "smoke" in text
    assert seconds < TIMEOUT + 4


def other_calls(rank: int) -> dict[str, tuple[str, str]]:
    """Calls in which rank 1 differs; each ends in an error on both ranks, and the next one is made all the same."""
    experts, _ = make(8)
    x, index, weights = inputs(experts=8)
    second = rank == 1
    found: dict[str, tuple[str, str]] = {}

    def make_layer(dispatch: str = "all_to_all", **settings: Any) -> rx.parallel.ExpertParallel:
        return rx.parallel.ExpertParallel(experts, None, dispatch, timeout=20, **settings)

    def note(name: str, layer: Any, *batch: torch.Tensor) -> None:
        kind, text, seconds = attempt(layer, *batch)
        assert seconds < 10, f"{name} waited"
        found[name] = kind, text

    layer, shared = make_layer(), make_layer("all_reduce")
    note("K", layer, x, index[:, :1] if second else index, weights[:, :1] if second else weights)
    note("weights dtype", layer, x, index, weights.double() if second else weights)
    note("chunks", make_layer(chunks=2) if second else make_layer(), x, index, weights)
    note("dispatch", make_layer("all_reduce") if second else make_layer(), x, index, weights)
    other, _ = make(16 if second else 8)
    note("experts", rx.parallel.ExpertParallel(other, None, "all_to_all", timeout=20), x, index, weights)
    note("T", shared, x[:3] if second else x, index[:3] if second else index, weights[:3] if second else weights)
    note("ids", shared, x, index.flip(0) if second else index, weights)
    note("shape", layer, x[:, :5] if second else x, index, weights)
    note("scores", layer, x, index, torch.rand(5, 8) if second else weights)  # (T, E) weights belong to no id
    note("id dtype", shared, x, index.bool() if second else index, weights)
    note("backend", make_layer(backend="deepgemm" if second else "eager"), x, index, weights)
    note("ids out of range", make_layer(checked=True), x, index + 8 * second, weights)
    with torch.set_grad_enabled(not second):
        note("gradients", layer, x.clone().requires_grad_(), index, weights)
    if second:
        layer.engine._calls += 1
    note("calls", layer, x, index, weights)
    note("megamoe", make_layer("megamoe"), x, index, weights)
    wanted = rx.run_experts(x, index, weights, experts)
    assert torch.allclose(shared(x, index, weights), wanted, atol=1e-5)  # the group still works
    return found


def test_ranks_that_make_another_call(tmp_path):
    first, second = all_good(run_ranks(other_calls, 2, tmp_path, wait=60))
    both = {
        "K": "K of top_k_index",
        "weights dtype": "rank 0: torch.float32, rank 1: torch.float64",
        "chunks": "rank 0: 1, rank 1: 2",
        "dispatch": "rank 0: all_to_all, rank 1: all_reduce",
        "experts": "rank 0: 8, rank 1: 16",
        "T": "rank 0: 5, rank 1: 3",
        "ids": "top_k_index",
        "gradients": "rank 0: True, rank 1: False",
        "calls": "the number of calls made before",
    }
    for name, text in both.items():
        assert first[name] == second[name], name
        assert first[name][0] == "LayoutError"
        assert text in first[name][1], name
    own = {
        "shape": "LayoutError",
        "scores": "LayoutError",
        "id dtype": "DtypeError",
        "backend": "UnsupportedExperts",
        "ids out of range": "ExpertIndexError",
    }
    for name, kind in own.items():
        assert second[name][0] == kind, second[name]
        assert first[name][0] == "RankError"
        assert "ranks [1]" in first[name][1]
    assert first["megamoe"][0] == second["megamoe"][0]
    assert first["megamoe"][0] in ("BackendUnavailable", "UnsupportedScheme", "UnsupportedExperts", "DtypeError")
    assert set(first) == {*both, *own, "megamoe"}


@pytest.mark.parametrize(("counts", "widest"), [((-1, 2), 1), ((3, 3), 1), ((5, 1), 1), ((1, 1), 3), ((1, 1), -1)])
def test_counts_that_cannot_be_are_refused_before_rows_are_sent(counts, widest):
    good = Header(tokens=5, slots=2, widest=2)
    _check([good, good], [(5, 0), (2, 3)])
    with pytest.raises(rx.LayoutError, match=r"rank 1 announces rows that it cannot have"):
        _check([good, good._replace(widest=widest)], [(5, 0), counts])


def test_a_header_of_something_else():
    good = Header(tokens=5, slots=2)
    with pytest.raises(rx.LayoutError, match=r"from ranks \[1\]"):
        _check([good, good._replace(mark=7)], [(0,), (0,)])


def test_settings_that_are_none():
    weights, _ = make(8)
    with pytest.raises(rx.parallel.RankError, match="init_process_group"):
        rx.parallel.ExpertParallel(weights, None)
    with pytest.raises(rx.LayoutError, match="all_to_all"):
        rx.parallel.ExpertParallel(weights, None, "broadcast")
    with pytest.raises(rx.LayoutError, match="megamoe computes by itself"):
        rx.parallel.ExpertParallel(weights, None, "megamoe", backend="eager")
    for chunks in (0, 9, "2"):
        with pytest.raises(rx.LayoutError, match="chunks"):
            rx.parallel.ExpertParallel(weights, None, chunks=chunks)


def wrong_settings(rank: int) -> list[tuple[str, str, float]]:
    weights, _ = make(6)
    outside = dist.new_group([0])
    make_layer = rx.parallel.ExpertParallel
    return [
        attempt(make_layer, weights, None),
        attempt(make_layer, weights.shard(1 - rank % 2, 2), None),
        attempt(lambda: make_layer(weights, None, timeout=0)),
        attempt(make_layer, make(8)[0], outside),
        attempt(make_layer, torch.nn.Linear(2, 2), None),
    ]


def test_settings_that_do_not_fit_the_group(tmp_path):
    for rank, (odd, other, timeout, outside, module) in enumerate(all_good(run_ranks(wrong_settings, 4, tmp_path))):
        assert odd[0] == "LayoutError"
        assert "6 experts, 4 ranks" in odd[1]
        assert "ranks that would divide them: 1, 2, 3, 6" in odd[1]
        assert (other[0], f"that of rank {rank} of 4" in other[1]) == ("LayoutError", True)
        assert (timeout[0], module[0]) == ("LayoutError", "LayoutError")
        assert outside[0] == ("no error" if rank == 0 else "LayoutError")
