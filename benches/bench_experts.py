"""Time of a whole experts call: every backend that runs here beside transformers' own functions, in one run.

    python benches/bench_experts.py [--device cuda] [--dtypes bfloat16,float32] [--tokens 1,8,64,512] [--json FILE]

The gate comes first: on every input set, on memory that holds NaN, an output whose distance from a float32 loop is over
the dtype's tolerance has no time. Calls take turns, and medians are printed beside the floor: the time that the
device's own rates, measured in the same run, allow for the operations and bytes of the call.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
import torch
from experts_bench import candidates, floor, gate, inputs, report, shapes, timing
from experts_bench.candidates import PEER, Choice, Ours, reason
from torch import Tensor

MODES = {"cpu": "eager", "cuda": "eager,graph"}
DTYPES = {"cpu": "bfloat16,float32", "cuda": "bfloat16"}
ROUTINGS = {"cpu": "skewed", "cuda": "skewed,balanced"}


class Layer:
    """The weights of one shape and dtype on the device, and everything that is measured on them."""

    def __init__(self, name: str, shape: shapes.Shape, dtype: str, device: str, ceilings: floor.Ceilings):
        self.name, self.shape, self.dtype, self.device, self.ceilings = name, shape, dtype, device, ceilings
        self.module = inputs.Experts(shape, getattr(torch, dtype), device)
        self.ours = Ours(self.module, shape)

    def measure(self, tokens: int, routing: str, modes: list[str], seconds: float, choice: Choice) -> dict[str, Any]:
        """Return one row: the candidates' errors and times or why there are none, and the ratios."""
        dtype = getattr(torch, self.dtype)
        sets = inputs.draw(self.shape, dtype, tokens, routing, self.device)
        hit, busiest = inputs.load(sets, self.shape.experts)
        row = {"shape": self.name, "sizes": list(self.shape), "dtype": self.dtype, "tokens": tokens}
        row |= {"routing": routing, "sets": len(sets), "experts_hit": hit, "busiest_to_mean": busiest}
        row["floor"] = floor.floor(self.shape, tokens, self.dtype, hit, self.ceilings).to_dict()
        wanted = [inputs.reference(self.module, one) for one in sets]
        functions, declined = candidates.ours(self.ours, tokens, choice)
        functions = candidates.peers(self.module, tokens * self.shape.top_k, choice) | functions
        passed, row["error"], row["failed"] = self.gate(functions, sets, wanted)
        row["failed"] |= declined
        row["us"], row["graph_us"], row["no_graph"] = {}, {}, {}
        if "eager" in modes and passed:
            passes = {name: timing.eager_pass(function, sets) for name, function in passed.items()}
            row["us"] = timing.medians(passes, len(sets), self.device, seconds)
        if "graph" in modes:
            passes, row["no_graph"] = self.capture(passed, sets, wanted)
            row["graph_us"] = timing.medians(passes, len(sets), self.device, seconds) if passes else {}
        chosen = self.ours.select(tokens)
        published = shapes.published(self.name, self.device, self.dtype, tokens, routing)
        return row | {"auto_is": f"{chosen.name} {chosen.path}".strip()} | ratios(row, published)

    def gate(
        self, functions: dict[str, candidates.Function], sets: list[inputs.Inputs], wanted: list[Tensor]
    ) -> tuple[dict[str, candidates.Function], dict[str, float], dict[str, str]]:
        """Split the candidates into those that are right, with their errors, and those that are not, with why."""
        passed, errors, failed = {}, {}, {}
        tokens, dtype = sets[0].x.shape[0], getattr(torch, self.dtype)
        scratch = max(2 * self.shape.inner, self.shape.hidden) * tokens * self.shape.top_k * dtype.itemsize
        for name, function in functions.items():
            try:
                errors[name] = gate.largest_error(function, sets, wanted, scratch, dtype)
                passed[name] = function
            except Exception as error:  # a peer may fail in any way, and the others are measured all the same
                failed[name] = reason(error)
        return passed, errors, failed

    def capture(
        self, functions: dict[str, candidates.Function], sets: list[inputs.Inputs], wanted: list[Tensor]
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
                for out, answer in zip(outputs, wanted, strict=True):
                    gate.check(out, answer, getattr(torch, self.dtype))
                replays[name] = replay
            except Exception as error:  # as above
                reasons[name] = reason(error)
        return replays, reasons


def ratios(row: dict[str, Any], published: float | None) -> dict[str, Any]:
    """Best times as multiples of the floor, of the best published multiple, and of transformers' best."""
    names = {**row["us"], **row["graph_us"]}
    best = {name: min(row[mode][name] for mode in ("us", "graph_us") if name in row[mode]) for name in names}
    multiples = {name: us / row["floor"]["us"] for name, us in best.items()}
    compared = {name: x / published for name, x in multiples.items()} if published else {}
    peers = [us for name, us in best.items() if name.startswith(PEER)]
    to_peer = best["auto"] / min(peers) if peers and "auto" in best else None
    found = {"x_floor": multiples, "published_x_floor": published, "x_published": compared}
    return found | {"auto_to_best_peer": to_peer}


def split(text: str, known: Collection[str]) -> list[str]:
    """Split a comma-separated option, refusing what is not ``known``."""
    parts = [part for part in text.split(",") if part]
    strange = [part for part in parts if part not in known]
    if strange or not parts:
        raise click.UsageError(f"cannot take {', '.join(strange) or 'an empty list'} of {', '.join(sorted(known))}")
    return parts


@click.command()
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--shapes", "names", default=None, help="Comma-separated names; each device has its own default.")
@click.option("--shape", "sizes", multiple=True, help="E,K,H,I of a shape of one's own; may be repeated.")
@click.option("--dtypes", default=None, help="Default: bfloat16, on a CPU float32 too.")
@click.option("--tokens", default="1,8,64,512")
@click.option("--routing", default=None, help="skewed, balanced; default skewed, on CUDA both.")
@click.option("--modes", default=None, help="eager, and on CUDA graph; default all that the device has.")
@click.option("--backends", default="", help="Leave out all backends but these; auto is a name here.")
@click.option("--skip-peers", is_flag=True, help="Leave transformers' functions out.")
@click.option("--seconds", default=2.0, help="Time for each row and mode, all candidates together.")
@click.option("--most-copies", default=64, help="Leave batched_mm out above this many (token, slot) pairs.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None, help="Written after every row.")
def main(device, names, sizes, dtypes, tokens, routing, modes, backends, skip_peers, seconds, most_copies, json_file):
    """Run the benchmark."""
    console, rows = report.terminal(), []
    choice = Choice(tuple(filter(None, backends.split(","))), skip_peers, most_copies)
    all_shapes = shapes.chosen(names, sizes, device)
    dtypes = split(dtypes or DTYPES[device], ("bfloat16", "float16", "float32"))
    counts = [int(count) for count in split(tokens, [one for one in tokens.split(",") if one.isdecimal() and int(one)])]
    routings = split(routing or ROUTINGS[device], inputs.ROUTINGS)
    modes = split(modes or MODES[device], MODES[device].split(","))
    with torch.inference_mode():
        found = report.setting(device)
        ceilings = floor.measure(device, dtypes, min(seconds, 0.5))
        console.print(f"ceilings: {ceilings.to_dict()}")
        for (name, shape), dtype in itertools.product(all_shapes.items(), dtypes):
            layer = Layer(name, shape, dtype, device, ceilings)
            for count, kind in itertools.product(counts, routings):
                rows.append(layer.measure(count, kind, modes, seconds, choice))
                report.print_row(console, rows[-1])
                if json_file:
                    json_file.write_text(json.dumps({**found, "ceilings": ceilings.to_dict(), "rows": rows}, indent=1))
            del layer  # before the next one is drawn: two of the largest may not fit
    for name in ("fused", "auto"):
        report.print_summary(console, rows, name)


if __name__ == "__main__":
    main()
