"""Times of calls: candidates take turns, so that what else the machine does meets all of them alike.

A pass is one call for every input set. ``eager`` passes are enqueued one after the other between CUDA events, and
take the larger of the device's and the host's time; ``graph`` passes are captured once and replayed, and take the
device's.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from routed_experts.bench.candidates import Function
from routed_experts.bench.inputs import Inputs

_ROUNDS = 3
_MOST_PASSES = 50


def medians(passes: dict[str, Callable[[], object]], calls: int, device: str, seconds: float) -> dict[str, float]:
    """Return median microseconds a call by name; a pass makes ``calls`` of them.

    All of it takes about ``seconds``, more where three rounds of a few passes already do.
    """
    turn = {"cpu": _turn_on_cpu, "cuda": _turn_on_cuda}[device]
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(_ROUNDS):
        for name, run in passes.items():
            times[name] += turn(run, seconds / _ROUNDS / len(passes))
    return {name: statistics.median(values) / calls for name, values in times.items()}


def _turn_on_cpu(run: Callable[[], object], seconds: float) -> list[float]:
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 2 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def _turn_on_cuda(run: Callable[[], object], seconds: float) -> list[float]:
    # The wait keeps the last candidate's queue from hiding this one's launches.
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    passes = int(seconds / (time.perf_counter() - start))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(1 + min(max(passes, 2), _MOST_PASSES))]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in itertools.pairwise(events)]


def eager_pass(function: Function, sets: list[Inputs]) -> Callable[[], None]:
    """Return a pass of plain calls."""

    def run() -> None:
        for inputs in sets:
            function(*inputs)

    return run


def captured_pass(function: Function, sets: list[Inputs]) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a pass as one CUDA graph, and the outputs that each replay writes.

    Raises what the candidate raises under capture; the device is usable again afterwards.
    """
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):  # what a first call on another stream sets up is no part of a graph
        eager_pass(function, sets)()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            outputs = [function(*inputs) for inputs in sets]
    finally:
        torch.cuda.set_stream(current)  # a capture that fails leaves its own stream behind as the current one
        torch.cuda.synchronize()
    return graph.replay, outputs
