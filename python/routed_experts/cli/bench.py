"""``routed-experts bench``: backends and peers on this machine, correctness first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch

from routed_experts.backends.registry import check_name
from routed_experts.bench.shapes import SHAPES
from routed_experts.cli.options import DTYPES, FORMATS, finite, layer_of, layer_options, split, token_counts
from routed_experts.cli.output import Command, print_json
from routed_experts.cli.progress import Live

if TYPE_CHECKING:
    from routed_experts.bench.run import Grid

MODES = {"cpu": ("eager", "compiled"), "cuda": ("eager", "compiled", "graph")}
STDOUT = Path("-")
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command(cls=Command)
@layer_options("Measure", f"Of {', '.join(SHAPES)}; or --shape. [default: one]")
@click.option("--tokens", default="1,8,64,512", show_default=True, help="Token counts of a call.")
@click.option("--routing", default="skewed", show_default=True, help="skewed, balanced, or files that hold a routing.")
@click.option("--modes", default="eager", show_default=True, help="eager, compiled and, on CUDA, graph.")
@click.option("--backends", default="", help="Leave out all backends but these; auto is a name here.")
@click.option("--skip-peers", is_flag=True, help="Leave other libraries' functions out.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    default=1.0,
    show_default=True,
    help="For each row and mode, all candidates together.",
)
@click.option(
    "--most-copies",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Most (token, slot) pairs for batched_mm.",
)
@click.option("--json", "json_file", type=_FILE, is_flag=False, flag_value=STDOUT, help="Write JSON; - for stdout.")
@click.option("--csv", "csv_file", type=_FILE, help="Write a line for every time.")
@click.option("--png", "png_file", type=_FILE, help="Draw times and multiples of the floor against T.")
@click.option("--html", "html_file", type=_FILE, help="The same as a page that needs no other file.")
@click.option("--compare", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON of an older run.")
@click.pass_context
def bench(ctx: click.Context, **options: Any) -> None:
    """Measure backends and transformers' functions; what gives wrong answers gets no time.

    Times are medians of candidates that take turns. The floor of a call is what this device's own rates, measured in
    the same run, allow for its operations and bytes.
    """
    from routed_experts.bench.run import run

    ctx.params["as_json"] = options["json_file"] == STDOUT
    old = None if options["compare"] is None else _older(options["compare"])
    grid = _grid(options)
    _check_files(options)
    file = None if options["json_file"] in (None, STDOUT) else options["json_file"]
    with Live(len(grid), quiet=options["json_file"] == STDOUT) as live:
        report = run(grid, live.told, file, live.describe)
    _write(options, report)
    if options["json_file"] == STDOUT:
        print_json(report)
    else:
        live.summary(report, old)
    if "interrupted" in report:
        click.echo(f"interrupted: {len(report['rows'])} of {len(grid)} rows were measured and are kept", err=True)
        ctx.exit(130)


def _grid(options: dict[str, Any]) -> Grid:
    from routed_experts.bench import shapes
    from routed_experts.bench.candidates import Choice
    from routed_experts.bench.run import Grid

    device = options["device"] or _device()
    tokens = options["tokens"]
    backends = tuple(filter(None, options["backends"].split(",")))
    for name in backends:
        check_name(name)
    all_shapes, weights, dtypes = shapes.chosen(options["names"], options["sizes"], device, most=1), None, None
    if options["checkpoint"] is not None:
        name, shape, weights = layer_of(options, device)
        all_shapes, dtypes = {name: shape}, [str(weights.dtype).removeprefix("torch.")]
    return Grid(
        device=device,
        shapes=all_shapes,
        dtypes=split(options["dtypes"], DTYPES) if dtypes is None or dtypes[0] not in DTYPES else dtypes,
        quantizations=split(options["quantizations"], FORMATS),
        tokens=token_counts(tokens),
        routings=[_routing(one) for one in options["routing"].split(",")],
        modes=split(options["modes"], MODES[device]),
        seconds=options["seconds"],
        choice=Choice(backends, options["skip_peers"], options["most_copies"]),
        weights=weights,
    )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _routing(text: str) -> Any:
    from routed_experts.bench.inputs import ROUTINGS
    from routed_experts.bench.recorded import Recorded

    if text in ROUTINGS:
        return text
    if not Path(text).is_file():
        raise click.UsageError(f"--routing {text!r} is neither one of {', '.join(ROUTINGS)} nor a file")
    return Recorded(Path(text))


def _older(file: Path) -> dict[str, Any]:
    import json

    from routed_experts.bench.crossings import compare

    try:
        report = json.loads(file.read_bytes())
        compare(report, report)
        return dict(report)
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError):
        pass
    raise click.UsageError(f"--compare {file} is no JSON that bench wrote")


def _pictures(options: dict[str, Any]) -> list[tuple[str, Path, Callable[..., None]]]:
    from routed_experts.bench import page, picture

    ways = {"png_file": ("matplotlib", picture.write_png), "html_file": ("plotly", page.write_html)}
    return [(package, options[name], way) for name, (package, way) in ways.items() if options[name] is not None]


def _check_files(options: dict[str, Any]) -> None:
    """Refuse before anything is measured what could not be written after it."""
    from routed_experts.bench.picture import require

    for package, _, _ in _pictures(options):
        require(package)
    for name in ("json_file", "csv_file", "png_file", "html_file"):
        file = options[name]
        if file is not None and file != STDOUT and not file.absolute().parent.is_dir():
            raise click.UsageError(f"no folder {file.absolute().parent} to write {file.name} in")


def _write(options: dict[str, Any], report: dict[str, Any]) -> None:
    from routed_experts.bench.report import write_csv

    if options["csv_file"] is not None:
        write_csv(options["csv_file"], report["rows"])
    for _, file, way in _pictures(options):
        way(file, report)
