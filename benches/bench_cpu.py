"""Experts on a CPU: `fused` and `auto` on floating and quantized weights beside transformers' eager and grouped_mm.

    python benches/bench_cpu.py [--shapes qwen1.5-moe,...] [--tokens 1,8,64,512] [--formats ...] [--json FILE]

All candidates of a shape and a number of tokens take turns, so that formats can be compared with each other; outputs
are compared before they are timed. The floor of a row is what it reads (weights of the experts hit) at the rate at
which the same run reads memory. transformers runs on the floating weights: it reads no quantized ones on a CPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import routed_experts as rx
from routed_experts.bench import floor, gate, inputs, report, shapes, timing

FLOATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
QUANTIZED = ("fp8_block", "mxfp8", "fp8_tensor", "mxfp4")
# Bytes of a weight with its scale.
BYTES = {"bfloat16": 2, "float32": 4, "fp8_block": 1, "fp8_tensor": 1, "mxfp8": 1 + 1 / 32, "mxfp4": 0.5 + 1 / 32}
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def eager(layer: inputs.Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The loop over experts that models of transformers fall back to."""
    out = torch.zeros_like(x)
    mask = F.one_hot(index, num_classes=layer.num_experts + 1).permute(2, 1, 0)
    for (expert,) in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        slot, token = torch.where(mask[expert])
        up = layer._apply_gate(F.linear(x[token], layer.gate_up_proj[expert]))
        down = F.linear(up, layer.down_proj[expert]) * weights[token, slot, None]
        out.index_add_(0, token, down.to(out.dtype))
    return out


class Kind:
    """One format of a layer's weights: who runs on it, and what its answers are compared with."""

    def __init__(self, name: str, shape: shapes.Shape):
        self.name, self.shape = name, shape
        self.dtype = FLOATS.get(name, torch.bfloat16)
        self.module = inputs.Experts(shape, self.dtype, "cpu")
        plain = rx.ExpertWeights(gate_up_proj=self.module.gate_up_proj, down_proj=self.module.down_proj)
        self.weights = rx.quantize_experts(plain, name) if name in QUANTIZED else plain
        if name in QUANTIZED:
            del self.module, plain  # two copies of a layer may not fit

    def functions(self, backends: list[str]) -> dict[str, Function]:
        """Ours by name, and on floating weights transformers' own."""
        found: dict[str, Function] = {}
        if self.name in FLOATS:
            from transformers.integrations import moe

            found["transformers eager"] = lambda *call: eager(self.module, *call)
            found["transformers grouped_mm"] = lambda *call: moe.grouped_mm_experts_forward(self.module, *call)
        for name in backends:
            found[name] = lambda *call, name=name: rx.run_experts(*call, self.weights, backend=name)
        return found

    def reference(self, call: inputs.Inputs) -> Tensor:
        """A float32 loop over the values that the weights stand for."""
        if self.name in FLOATS:
            return inputs.reference(self.module, call)
        # eager is the reference of quantized weights: an expert at a time, in the dtype of its rows.
        return rx.run_experts(call.x.float(), call.index, call.weights, self.weights, backend="eager")

    def bytes_read(self, hit: float) -> float:
        return hit * 3 * self.shape.hidden * self.shape.inner * BYTES[self.name]


def rows_of(
    name: str,
    shape: shapes.Shape,
    tokens: int,
    kinds: list[Kind],
    backends: list[str],
    read_gb_s: float,
    seconds: float,
) -> list[dict[str, Any]]:
    """Measure all formats of one shape in turns; one row a format."""
    passes, rows = {}, []
    for kind in kinds:
        sets = inputs.draw(shape, kind.dtype, tokens, "skewed", "cpu")
        hit, _ = inputs.load(sets, shape.experts)
        wanted = [kind.reference(one) for one in sets]
        row: dict[str, Any] = {"shape": name, "sizes": list(shape), "tokens": tokens, "format": kind.name}
        row |= {"experts_hit": hit, "floor_us": kind.bytes_read(hit) / read_gb_s / 1e3, "error": {}}
        row["auto_is"] = rx.select_backend(kind.weights, num_tokens=tokens, num_top_k=shape.top_k).name
        for candidate, function in kind.functions(backends).items():
            scratch = 2 * shape.inner * tokens * shape.top_k * kind.dtype.itemsize
            row["error"][candidate] = gate.largest_error(function, sets, wanted, scratch, kind.dtype)
            passes[kind.name, candidate] = timing.eager_pass(function, sets)
        rows.append(row)
    times = timing.medians({str(key): run for key, run in passes.items()}, len(sets), "cpu", seconds)
    for row in rows:
        row["us"] = {name: times[str((kind, name))] for kind, name in passes if kind == row["format"]}
        row["x_floor"] = row["us"]["fused"] / row["floor_us"]
        peers = [us for candidate, us in row["us"].items() if candidate.startswith("transformers")]
        row["times_faster_than_peers"] = min(peers) / row["us"]["auto"] if peers else None
        plain = times.get(str(("bfloat16", "fused")))
        row["times_faster_than_bfloat16"] = plain / row["us"]["fused"] if plain else None
    return rows


def overhead(seconds: float) -> dict[str, float]:
    """Microseconds of a call with next to nothing to compute: checks, choice, binding, sort."""
    found = {}
    x, ids, weights = torch.ones(1, 32), torch.tensor([[0, 1]]), torch.ones(1, 2)
    plain = rx.ExpertWeights(gate_up_proj=torch.ones(2, 64, 32), down_proj=torch.ones(2, 32, 32))
    for name, experts in (("float32", plain), ("mxfp4", rx.quantize_experts(plain, "mxfp4"))):
        times, end = [], time.perf_counter() + seconds
        while time.perf_counter() < end:
            start = time.perf_counter()
            for _ in range(100):
                rx.run_experts(x, ids, weights, experts, backend="fused")
            times.append((time.perf_counter() - start) * 1e4)
        found[name] = sorted(times)[len(times) // 2]
    return found


def show(row: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {us / 1e3:.2f}" for name, us in row["us"].items())
    compared = [(row["times_faster_than_peers"], "peers"), (row["times_faster_than_bfloat16"], "bfloat16")]
    ratios = "".join(f"  x{ratio:.2f} to {name}" for ratio, name in compared if ratio)
    return f"{row['shape']} T={row['tokens']} {row['format']}: ms {times}{ratios}  {row['x_floor']:.2f} floors"


@click.command()
@click.option("--shapes", "names", default=None, help="Comma-separated names; default those of bench_experts.py.")
@click.option("--shape", "sizes", multiple=True, help="E,K,H,I of a shape of one's own; may be repeated.")
@click.option("--tokens", default="1,8,64,512")
@click.option("--formats", default="bfloat16,float32,fp8_block,mxfp4")
@click.option("--backends", default="fused,auto", help="Ours; grouped_mm on quantized weights takes seconds a call.")
@click.option("--seconds", default=4.0, help="Time for each shape and number of tokens, all candidates together.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None, help="Written after every row.")
def main(names, sizes, tokens, formats, backends, seconds, json_file):
    """Run the benchmark."""
    with torch.inference_mode():
        found: dict[str, Any] = report.setting("cpu") | {"overhead_us": overhead(min(seconds, 0.5))}
        ceilings = floor.measure("cpu", ["bfloat16", "float32"], min(seconds, 0.5))
        found |= {"ceilings": ceilings.to_dict(), "rows": []}
        click.echo(f"overhead {found['overhead_us']} us, ceilings {ceilings.to_dict()}")
        for name, shape in shapes.chosen(names, sizes, "cpu").items():
            kinds = [Kind(kind, shape) for kind in formats.split(",")]
            for count in map(int, tokens.split(",")):
                ours = backends.split(",")
                for row in rows_of(name, shape, count, kinds, ours, ceilings.read_gb_s, seconds):
                    found["rows"].append(row)
                    click.echo(show(row))
                if json_file:
                    json_file.write_text(json.dumps(found, indent=1))
            del kinds  # before the next shape's are drawn


if __name__ == "__main__":
    main()
