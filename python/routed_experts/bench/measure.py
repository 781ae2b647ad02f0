"""One layer on the device, and everything that is measured on it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from routed_experts.bench import candidates, floor, gate, inputs, shapes, timing
from routed_experts.bench.candidates import PEER, Choice, Function, Ours, reason
from routed_experts.weights import ExpertWeights

# What a row calls the times of each mode, and the reasons for having none.
MODES = {"eager": ("us", "no_eager"), "compiled": ("compiled_us", "no_compile"), "graph": ("graph_us", "no_graph")}
UNQUANTIZED = "none"


class Layer:
    """The weights of one shape and dtype on the device, drawn or a checkpoint's, as they are or quantized."""

    def __init__(
        self,
        name: str,
        shape: shapes.Shape,
        dtype: str,
        device: str,
        ceilings: floor.Ceilings,
        weights: ExpertWeights | None = None,
        quantization: str = UNQUANTIZED,
    ):
        self.name, self.shape, self.dtype, self.device, self.ceilings = name, shape, dtype, device, ceilings
        self.quantization = quantization
        self.module = inputs.Experts(shape, getattr(torch, dtype), device) if weights is None else None
        if self.module is not None:
            # Not from the module: its gate is one of its own there, which no backend can fuse, and is bound every call.
            up, down = self.module.gate_up_proj, self.module.down_proj
            weights = ExpertWeights(gate_up_proj=up, down_proj=down, activation="silu")
        assert weights is not None
        self.ours = Ours(inputs.quantized(weights, quantization), shape)

    def measure(
        self, tokens: int, routing: inputs.Routing, modes: list[str], seconds: float, choice: Choice
    ) -> dict[str, Any]:
        """Return one row: the candidates' errors and times or why there are none, and the ratios."""
        sets = inputs.draw(self.shape, getattr(torch, self.dtype), tokens, routing, self.device)
        hit, busiest = inputs.load(sets, self.shape.experts)
        row: dict[str, Any] = {"shape": self.name, "sizes": list(self.shape), "dtype": self.dtype}
        row |= {
            "quantization": self.quantization,
            "tokens": tokens,
            "routing": str(routing),
            "sets": len(sets),
            "experts_hit": hit,
        }
        row |= {"busiest_to_mean": busiest}
        item = self.ours.bytes_per_weight if self.quantization != UNQUANTIZED else None
        row["floor"] = floor.floor(self.shape, tokens, self.dtype, hit, self.ceilings, item).to_dict()
        wanted = [self.reference(one) for one in sets]
        functions, declined = candidates.ours(self.ours, tokens, choice)
        functions = self.peers(tokens, choice) | functions
        passed, row["error"], row["failed"] = self.gate(functions, sets, wanted)
        row["failed"] |= declined
        for mode, (times, why) in MODES.items():
            row[times], row[why] = self.times(mode, passed, sets, wanted, seconds) if mode in modes else ({}, {})
        chosen = self.ours.select(tokens)
        published = shapes.published(self.name, self.device, self.dtype, tokens, str(routing), self.quantization)
        return row | {"auto_is": f"{chosen.name} {chosen.path}".strip()} | ratios(row, published)

    def peers(self, tokens: int, choice: Choice) -> dict[str, Function]:
        """transformers' functions, where they take these weights as they are."""
        if self.module is None or self.quantization != UNQUANTIZED:
            return {}
        return candidates.peers(self.module, tokens * self.shape.top_k, choice)

    def reference(self, one: inputs.Inputs) -> Tensor:
        """(T, H) in float32: a plain loop over drawn weights; a checkpoint's and quantized ones in eager's way."""
        if self.module is not None and self.quantization == UNQUANTIZED:
            return inputs.reference(self.module, one)
        return self.ours.reference(one.x, one.index, one.weights)

    def gate(
        self, functions: dict[str, Function], sets: list[inputs.Inputs], wanted: list[Tensor]
    ) -> tuple[dict[str, Function], dict[str, float], dict[str, str]]:
        """Split the candidates into those that are right, with their errors, and those that are not, with why."""
        passed, errors, failed = {}, {}, {}
        tokens, dtype = sets[0].x.shape[0], getattr(torch, self.dtype)
        scratch = max(2 * self.shape.inner, self.shape.hidden) * tokens * self.shape.top_k * dtype.itemsize
        for name, function in functions.items():
            try:
                errors[name] = gate.largest_error(function, sets, wanted, scratch, dtype, self.tolerance)
                passed[name] = function
            except Exception as error:  # a peer may fail in any way, and the others are measured all the same
                failed[name] = reason(error)
        return passed, errors, failed

    @property
    def tolerance(self) -> float:
        """Largest distance that is let pass."""
        exact = self.quantization == UNQUANTIZED
        return gate.TOLERANCE[getattr(torch, self.dtype)] if exact else gate.QUANTIZED

    def times(
        self, mode: str, functions: dict[str, Function], sets: list[inputs.Inputs], wanted: list[Tensor], seconds: float
    ) -> tuple[dict[str, float], dict[str, str]]:
        """Microseconds a call of each candidate in ``mode``, and why those that have none cannot run in it."""
        ways = {"eager": self.plain, "graph": self.capture, "compiled": self.compile}
        passes, reasons = ways[mode](functions, sets, wanted)
        return (timing.medians(passes, len(sets), self.device, seconds) if passes else {}), reasons

    def plain(
        self, functions: dict[str, Function], sets: list[inputs.Inputs], _wanted: list[Tensor]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a pass of plain calls of each candidate: the gate has seen them."""
        return {name: timing.eager_pass(function, sets) for name, function in functions.items()}, {}

    def capture(
        self, functions: dict[str, Function], sets: list[inputs.Inputs], wanted: list[Tensor]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return each candidate's replay, checked, and why those that have none cannot be captured."""
        replays, reasons = {}, {}
        for name, function in functions.items():
            refused = None if name.startswith(PEER) else self.ours.refuses_capture(sets[0].x.shape[0], name)
            if refused is not None:
                reasons[name] = refused
                continue
            try:
                replay, outputs = timing.captured_pass(function, sets)
                replay()
                self.check(outputs, wanted)
                replays[name] = replay
            except Exception as error:  # as above
                reasons[name] = reason(error)
        return replays, reasons

    def compile(
        self, functions: dict[str, Function], sets: list[inputs.Inputs], wanted: list[Tensor]
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return a pass of each candidate under torch.compile, checked, and why those that have none do not compile."""
        passes, reasons = {}, {}
        for name, function in functions.items():
            torch.compiler.reset()
            traced = torch.compile(_plain(function), dynamic=False)
            try:
                self.check([traced(*one) for one in sets], wanted)
                passes[name] = timing.eager_pass(traced, sets)
            except Exception as error:  # as above
                reasons[name] = reason(error)
        return passes, reasons

    def check(self, outputs: list[Tensor], wanted: list[Tensor]) -> None:
        """Raise WrongAnswer where one is too far from its reference."""
        for out, answer in zip(outputs, wanted, strict=True):
            gate.check(out, answer, getattr(torch, self.dtype), self.tolerance)


def _plain(function: Function) -> Function:
    """A function with a code object: torch.compile does not take a partial."""

    @functools.wraps(function, assigned=())
    def call(x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return function(x, index, weights)

    return call


def best_times(row: dict[str, Any]) -> dict[str, float]:
    """Best microseconds of each candidate over the modes that were measured."""
    found: dict[str, float] = {}
    for times, _ in MODES.values():
        for name, us in row.get(times, {}).items():
            found[name] = min(us, found.get(name, us))
    return found


def ratios(row: dict[str, Any], published: float | None) -> dict[str, Any]:
    """Best times as multiples of the floor, of the best published multiple, and of transformers' best."""
    best = best_times(row)
    multiples = {name: us / row["floor"]["us"] for name, us in best.items()}
    compared = {name: x / published for name, x in multiples.items()} if published else {}
    peers = [us for name, us in best.items() if name.startswith(PEER)]
    to_peer = best["auto"] / min(peers) if peers and "auto" in best else None
    found = {"x_floor": multiples, "published_x_floor": published, "x_published": compared}
    return found | {"auto_to_best_peer": to_peer}
