"""Time of a whole experts call: every backend that runs here beside transformers' own functions, in one run.

    python benches/bench_experts.py [--device cuda] [--dtypes bfloat16,float32] [--tokens 1,8,64,512] [--json FILE]

This is ``routed-experts bench`` with the defaults of the published tables: all shapes of the device, on a CPU float32
too, on CUDA graphs and balanced routing too.
"""

from __future__ import annotations

import click

from routed_experts.bench.shapes import DEFAULTS
from routed_experts.cli.bench import bench as command

GRIDS = {
    "cpu": {"dtypes": "bfloat16,float32", "modes": "eager", "routing": "skewed"},
    "cuda": {"dtypes": "bfloat16", "modes": "eager,graph", "routing": "skewed,balanced"},
}


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.option("--device", type=click.Choice(list(GRIDS)), default="cpu")
@click.option("--shapes")
@click.option("--shape", multiple=True)
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def main(device: str, shapes: str | None, shape: tuple[str, ...], rest: tuple[str, ...]) -> None:
    """Run the benchmark."""
    names = shapes if shapes is not None else "" if shape else ",".join(DEFAULTS[device])
    options = ["--device", device, "--shapes", names, *(part for one in shape for part in ("--shape", one)), *rest]
    command.main(options, default_map={"seconds": 2.0, **GRIDS[device]})


if __name__ == "__main__":
    main()
