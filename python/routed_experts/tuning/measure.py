"""Times of one layer: of every row of the table that ``auto`` may choose, gate first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import routed_experts as rx
from routed_experts import _core
from routed_experts.backends.registry import REGISTRY
from routed_experts.bench import gate, inputs, timing
from routed_experts.bench.candidates import Function, Ours, reason
from routed_experts.bench.shapes import Shape
from routed_experts.facts import Facts, facts_for
from routed_experts.selection import Selection, as_problem, pin
from routed_experts.tuning import store
from routed_experts.tuning.keys import canonical, key_of

# What is predicted to take more than this many times the best is not measured.
_HOPELESS = 8
STATES = {"cpu": ("eager",), "cuda": ("eager", "graph")}
Row = tuple[str, str]


@dataclass(frozen=True)
class Point:
    """One thing to measure: T tokens in one state of one layer."""

    layer: Layer
    tokens: int
    state: str

    def __str__(self) -> str:
        return f"{self.layer.name} {self.layer.dtype}, T={self.tokens}, {self.state}"


class Layer:
    """Weights on the device, and times of calls on them."""

    def __init__(self, name: str, shape: Shape, weights: rx.ExpertWeights, dtype: torch.dtype):
        self.name, self.shape, self.weights = name, shape, weights
        self.device, self.dtype = weights.device, str(dtype).removeprefix("torch.")
        self.facts: Facts = facts_for(self.device)

    def select(self, tokens: int, backend: str, training: bool = False) -> str:
        """Name and path of the row that a call would run on."""
        how = {"num_tokens": tokens, "num_top_k": self.shape.top_k, "dtype": getattr(torch, self.dtype)}
        chosen = rx.select_backend(self.weights, backend=backend, training=training, **how)
        return f"{chosen.name} ({chosen.path})" if chosen.path else chosen.name

    def draw(self, tokens: int) -> inputs.Inputs:
        """One input set of T tokens."""
        return inputs.draw(self.shape, getattr(torch, self.dtype), tokens, "skewed", self.device.type)[0]

    def key(self, point: Point) -> dict[str, Any]:
        """What a time of this point is of."""
        key = key_of(self.facts, self.problem(point))
        assert key is not None
        return key

    def problem(self, point: Point) -> dict[str, Any]:
        """The point as selection sees it."""
        dtype, capturing = getattr(torch, self.dtype), point.state == "graph"
        return as_problem(self.weights, point.tokens, self.shape.top_k, dtype, capturing=capturing)

    def rows(self, point: Point) -> dict[Row, Selection]:
        """The rows that ``auto`` may choose for a point; without those that stand no chance."""
        problem, found = self.problem(point), {}
        for spec, run in REGISTRY.table().rows:
            try:
                chosen = _core.Registry([spec.to_dict()]).select(self.facts.to_dict(), problem, "auto")
            except rx.RoutedExpertsError:
                continue
            us = chosen["decisions"][0]["predicted_us"]
            found[spec.name, spec.path] = (us, Selection(spec.name, spec.path, (), 0, str(point), spec, run))
        least = min((us for us, _ in found.values()), default=0)
        return {row: selection for row, (us, selection) in found.items() if us <= _HOPELESS * least}

    def times(self, point: Point, seconds: float) -> tuple[dict[Row, float], dict[Row, str]]:
        """Microseconds a call of each row, and why those that have none have none."""
        sets = inputs.draw(self.shape, getattr(torch, self.dtype), point.tokens, "skewed", self.device.type)
        ours = Ours(self.weights, self.shape)
        wanted = [ours.reference(one.x, one.index, one.weights) for one in sets]
        passes: dict[str, Callable[[], object]] = {}
        failed, rows = {}, self.rows(point)
        for row, selection in rows.items():
            try:
                passes["/".join(row)] = self._pass(point, selection, sets, wanted)
            except Exception as error:  # one row that fails must not end a run of many minutes
                failed[row] = reason(error)
        us = timing.medians(passes, len(sets), self.device.type, seconds) if passes else {}
        return {row: us["/".join(row)] for row in rows if row not in failed}, failed

    def _pass(
        self, point: Point, selection: Selection, sets: list[inputs.Inputs], wanted: list[Tensor]
    ) -> Callable[[], object]:
        function = self._function(selection)
        dtype = getattr(torch, self.dtype)
        tolerance = gate.TOLERANCE[dtype] if self.weights.quantization is None else gate.QUANTIZED
        scratch = max(2 * self.shape.inner, self.shape.hidden) * point.tokens * self.shape.top_k * dtype.itemsize
        gate.largest_error(function, sets, wanted, scratch, dtype, tolerance)
        if point.state == "eager":
            return timing.eager_pass(function, sets)
        replay, outputs = timing.captured_pass(function, sets)
        replay()
        for out, answer in zip(outputs, wanted, strict=True):
            gate.check(out, answer, dtype, tolerance)
        return replay

    def _function(self, selection: Selection) -> Function:
        """Calls on one row, as short as any call whose like has run before."""
        weights = pin(self.weights.with_tensors(dict(self.weights._tensors)), selection)

        def call(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
            return rx.run_experts(x, index, scores, weights, backend=selection.name)

        return call


def tune(points: list[Point], seconds: float, folder: Any) -> Iterator[tuple[Point, dict[Row, float], dict[Row, str]]]:
    """Measure points one by one; each is in the file before it is told."""
    for point in points:
        with torch.inference_mode():
            times, failed = point.layer.times(point, seconds)
        key = point.layer.key(point)
        rows = {row: {point.tokens: us} for row, us in times.items()}
        store.merge(folder, {canonical(key): (key, rows)})
        yield point, times, failed


def is_known(point: Point, entries: store.Entries) -> bool:
    """Whether the file has times of a point; a row that failed then has none."""
    _, times = entries.get(canonical(point.layer.key(point)), ({}, {}))
    return any(point.tokens in us for us in times.values())


def spread(counts: list[int]) -> list[int]:
    """Order counts so that a run cut short covers the range: the ends, then the middles of what is between."""
    ordered = sorted(set(counts))
    found: list[int] = [*ordered[:1], *ordered[1:][-1:]]
    gaps = [ordered]
    while gaps:
        gap = gaps.pop(0)
        if len(gap) > 2:
            middle = len(gap) // 2
            found.append(gap[middle])
            gaps += [gap[: middle + 1], gap[middle:]]
    return found
