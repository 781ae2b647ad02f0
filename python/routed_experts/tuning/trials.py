"""Trials of kernels' tiles on one layer and token count: compiled first, gate second, times third, file last.

A batch of candidates takes turns with the built-in tiles over rotating inputs, on CUDA as graphs, so that the host
does not count. What does not compile, does not fit or is wrong has a reason in place of a ratio.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from routed_experts import _core
from routed_experts.backends.registry import REGISTRY
from routed_experts.bench import gate, inputs, timing
from routed_experts.bench.candidates import reason
from routed_experts.errors import RoutedExpertsError
from routed_experts.tuning import store
from routed_experts.tuning.keys import Key, canonical, tiles_key_of
from routed_experts.tuning.measure import Layer, Point
from routed_experts.tuning.tiles import WORTHWHILE, Record, Tiles, Trial

_BATCH = 8  # candidates that are compiled together
_SECONDS = 0.04  # of timing for a candidate
_NO_ROOM = "more shared memory than a block may have"
Pass = Callable[[], object]


def has_tiles(layer: Layer) -> bool:
    """Whether a row that can run the layer here has tiles to choose; Triton's rows on a GPU have, Rust's have not."""
    problem = layer.problem(Point(layer, 1, "eager"))
    for spec, run in REGISTRY.table().rows:
        if getattr(run, "has_tiles", False):
            try:
                _core.Registry([spec.to_dict()]).select(layer.facts.to_dict(), problem, spec.name)
            except RoutedExpertsError:
                continue
            return tiles_key_of(layer.facts, problem) is not None
    return False


class Search:
    """The search at one token count, with what the file has of it."""

    def __init__(self, layer: Layer, tokens: int, entries: store.Contents | None) -> None:
        """Draw inputs and run the built-in tiles, whose result is what the gate compares with."""
        from routed_experts.kernels import alternatives, fused

        dtype = getattr(torch, layer.dtype)
        self.layer, self.tokens, self.dtype = layer, tokens, dtype
        sizes = fused.Sizes(tokens, layer.shape.top_k, *_sizes(layer))
        self.call = alternatives.Call(layer.weights, sizes, dtype, fused.limits(layer.device))
        self.key: Key = key_of_tiles(layer)
        self.record = Record(0.0, self.call.tiles, {})
        known = {} if entries is None else entries.tiles.get(canonical(self.key), ({}, {}))[1]
        if tokens in known and known[tokens].default == self.call.tiles:
            self.record = known[tokens]

    def __str__(self) -> str:
        return f"{self.layer.name} {self.layer.dtype}, T={self.tokens}, tiles"

    def regime(self) -> str:
        """Few pairs, or sorted by how many rows an expert."""
        sizes = self.call.sizes
        return f"{sizes.pairs / sizes.experts:.3g} rows an expert" if self.call.default.is_sorted else "unsorted"

    def left(self) -> list[Tiles]:
        """What there is to try next; empty where the best has no untried neighbour."""
        from routed_experts.kernels import alternatives

        ratios = {tiles: trial.ratio for tiles, trial in self.record.trials.items()}
        return list(itertools.islice(alternatives.in_order(self.call, ratios), _BATCH))

    def step(self, folder: Path) -> bool:
        """Try one batch; it is in the file before this returns. False where nothing was left to try."""
        batch = self.left()
        if not batch:
            return False
        with torch.inference_mode():
            default_us, trials = self._tried([tiles for tiles in batch if tiles != self.call.tiles])
        trials[self.call.tiles] = Trial(1.0, *self.call.reach(self.call.tiles))
        self.record = Record(default_us, self.call.tiles, {**self.record.trials, **trials})
        fresh = self.record._replace(trials=trials)
        store.merge(folder, {}, {canonical(self.key): (self.key, {self.tokens: fresh})})
        return True

    def to_dict(self) -> dict[str, Any]:
        """What was found, as a report has it."""
        best, trials = self.record.best(), self.record.trials
        failed = Counter(trial.why for trial in trials.values() if trial.ratio is None)
        found = {"layer": self.layer.name, "dtype": self.layer.dtype, "tokens": self.tokens, "regime": self.regime()}
        found |= {"default": _plain(self.call.tiles), "default_us": self.record.default_us or None}
        found |= {"best": _plain(best), "ratio": trials[best].ratio if best in trials else None}
        return found | {"tried": len(trials) - failed.total(), "skipped": dict(failed), "complete": not self.left()}

    def _tried(self, batch: list[Tiles]) -> tuple[float, dict[Tiles, Trial]]:
        sets = inputs.draw(self.layer.shape, self.dtype, self.tokens, "skewed", self.layer.device.type)
        wanted = [self._function(self.call.tiles)(*one).float() for one in sets]
        failed = {tiles: _NO_ROOM for tiles in batch if not self.call.has_room(tiles)}
        failed |= self._compiled([tiles for tiles in batch if tiles not in failed], sets[0])
        passes = {self.call.tiles: self._pass(self.call.tiles, sets, wanted)}
        for tiles in batch:
            if tiles not in failed:
                try:
                    passes[tiles] = self._pass(tiles, sets, wanted)
                except Exception as error:  # whatever a compiler or a device says of one candidate, others go on
                    failed[tiles] = _why(error)
        us, ratios = self._times(passes, len(sets))
        trials = {tiles: Trial(ratio, *self.call.reach(tiles)) for tiles, ratio in ratios.items()}
        return us, trials | {tiles: Trial(None, why=why) for tiles, why in failed.items()}

    def _times(self, passes: dict[Tiles, Pass], calls: int) -> tuple[float, dict[Tiles, float]]:
        """Microseconds of the built-in tiles, and ratios to them; that of what seems best is taken twice."""
        us = self._medians(passes, calls)
        default = self.call.tiles
        ratios = {tiles: one / us[default] for tiles, one in us.items() if tiles != default}
        best = min(ratios, key=ratios.__getitem__, default=default)
        if ratios.get(best, 1.0) <= WORTHWHILE:
            # The least of many measured ratios is less than what it measures: the second one has no such choice.
            again = self._medians({default: passes[default], best: passes[best]}, calls)
            ratios[best] = max(ratios[best], again[best] / again[default])
        return us[default], ratios

    def _medians(self, passes: dict[Tiles, Pass], calls: int) -> dict[Tiles, float]:
        named = {_label(tiles): run for tiles, run in passes.items()}
        us = timing.medians(named, calls, self.layer.device.type, _SECONDS * len(named))
        return {tiles: us[_label(tiles)] for tiles in passes}

    def _function(self, tiles: Tiles) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        from routed_experts.kernels.fused import run_choice

        choice, weights = self.call.choice(tiles), self.layer.weights
        return lambda x, ids, scores: run_choice(weights, choice, x, ids, scores)

    def _compiled(self, batch: list[Tiles], one: inputs.Inputs) -> dict[Tiles, str]:
        """Compile what a batch launches, several kernels at a time; return why some could not be."""
        if not batch:
            return {}
        workers = min(len(batch), len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(workers) as pool:
            try:
                whys = list(pool.map(lambda tiles: self._compile(tiles, one), batch))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return {tiles: why for tiles, why in zip(batch, whys, strict=True) if why is not None}

    def _compile(self, tiles: Tiles, one: inputs.Inputs) -> str | None:
        from routed_experts.kernels import fused, launch

        try:
            with torch.inference_mode(), launch.device_of(one.x):
                out = torch.empty_like(one.x)
                for launched in fused.launches_as(self.layer.weights, self.call.choice(tiles), *one, out):
                    launch.compile_only(launched)
        except Exception as error:  # as in _tried
            return _why(error)
        return None

    def _pass(self, tiles: Tiles, sets: list[inputs.Inputs], wanted: list[Tensor]) -> Pass:
        function, shape = self._function(tiles), self.layer.shape
        tolerance = gate.TOLERANCE[self.dtype] if self.layer.weights.quantization is None else gate.QUANTIZED
        scratch = max(2 * shape.inner, shape.hidden) * self.tokens * shape.top_k * self.dtype.itemsize
        gate.largest_error(function, sets, wanted, scratch, self.dtype, tolerance)
        if self.layer.device.type != "cuda":
            return timing.eager_pass(function, sets)
        replay, outputs = timing.captured_pass(function, sets)
        replay()
        for out, answer in zip(outputs, wanted, strict=True):
            gate.check(out, answer, self.dtype, tolerance)
        return replay


def key_of_tiles(layer: Layer) -> Key:
    """What trials on this layer are of."""
    key = tiles_key_of(layer.facts, layer.problem(Point(layer, 1, "eager")))
    assert key is not None
    return key


def _sizes(layer: Layer) -> tuple[int, int, int]:
    weights = layer.weights
    return weights.num_experts, weights.hidden_size, weights.intermediate_size


def _label(tiles: Tiles) -> str:
    return " ".join(map(str, _plain(tiles)))


def _plain(tiles: Tiles) -> list[list[Any]]:
    return [list(config) for config in tiles]


def _why(error: Exception) -> str:
    """A kind of failure, by which they are counted."""
    name = type(error).__name__
    return reason(error) if isinstance(error, RoutedExpertsError) else name
