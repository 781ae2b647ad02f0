"""A whole grid: every row is measured, told and written before the next one begins."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from routed_experts.bench import floor, inputs, measure, report, shapes
from routed_experts.bench.candidates import Choice
from routed_experts.weights import ExpertWeights

Row = dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """What is measured: all combinations of these. ``weights`` are a checkpoint's, for one shape of its own."""

    device: str
    shapes: dict[str, shapes.Shape]
    dtypes: list[str]
    quantizations: list[str]
    tokens: list[int]
    routings: list[inputs.Routing]
    modes: list[str]
    seconds: float  # of a row and mode, all candidates together
    choice: Choice
    weights: ExpertWeights | None = None

    def __len__(self) -> int:
        layers = len(self.shapes) * len(self.dtypes) * len(self.quantizations)
        return layers * len(self.tokens) * len(self.routings)


def rows(grid: Grid, ceilings: floor.Ceilings, before: Callable[[str], object] = lambda what: None) -> Iterator[Row]:
    """Measure the grid row by row; ``before`` is told what comes next."""
    layers = itertools.product(grid.shapes.items(), grid.dtypes, grid.quantizations)
    for (name, shape), dtype, quantization in layers:
        before(f"{name} {dtype}: weights")
        layer = measure.Layer(name, shape, dtype, grid.device, ceilings, grid.weights, quantization)
        for tokens, routing in itertools.product(grid.tokens, grid.routings):
            before(f"{name} {dtype}, T={tokens}")
            yield layer.measure(tokens, routing, grid.modes, grid.seconds, grid.choice)
        del layer  # before the next one is drawn: two of the largest may not fit


def run(
    grid: Grid,
    told: Callable[[Row], object],
    file: Path | None = None,
    before: Callable[[str], object] = lambda what: None,
) -> dict[str, Any]:
    """Measure the grid and return the report; ``told`` and ``file`` get every row as it comes.

    Ctrl-C ends it: the report then says ``interrupted`` and holds the rows until there.
    """
    found = report.setting(grid.device) | {"ceilings": {}, "rows": []}
    try:
        with torch.inference_mode():
            before("ceilings of this device")
            is_quantized = any(name != measure.UNQUANTIZED for name in grid.quantizations)
            products = floor.products(grid.device, grid.dtypes, is_quantized=is_quantized)
            ceilings = floor.measure(grid.device, products, min(grid.seconds, 0.5))
            found["ceilings"] = ceilings.to_dict()
            for row in rows(grid, ceilings, before):
                found["rows"].append(row)
                if file is not None:
                    write(file, found)
                told(row)
    except KeyboardInterrupt:
        found["interrupted"] = True
    return found


def write(file: Path, data: object) -> None:
    """Write JSON so that whoever stops in the middle leaves the file as it was."""
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(json.dumps(data, indent=1))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
