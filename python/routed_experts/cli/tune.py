"""``routed-experts tune``: measure this machine, so that ``auto`` chooses by its own times."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console

from routed_experts.cli.options import DTYPES, FORMATS, finite, layer_of, layer_options, split, token_counts
from routed_experts.cli.output import Command, duration, json_option, make_table, print_json, print_section
from routed_experts.cli.tune_tiles import SHARE, changed, print_tiles, search_tiles

if TYPE_CHECKING:
    from routed_experts.tuning.measure import Layer, Point
    from routed_experts.tuning.store import Contents

TOKENS = {"cpu": "1,4,16,64,256,1024", "cuda": "1,4,16,64,256,1024,4096,16384"}
_FILE = click.Path(dir_okay=False, path_type=Path)
_SHORTEST, _LONGEST = 0.05, 1.0  # seconds of timing for a point


@click.command(cls=Command)
@layer_options("Tune for", "Comma-separated names of models' layers. [default: one of them]")
@click.option("--tokens", help="Token counts to measure at. [default: a range for the device]")
@click.option(
    "--budget",
    type=click.FloatRange(min=0, min_open=True),
    callback=finite,
    default=60.0,
    show_default=True,
    help="Seconds.",
)
@click.option("--again", is_flag=True, help="Measure also what the file has.")
@click.option("--only", type=click.Choice(["times", "tiles"]), help="Of backends, or of kernels. [default: both]")
@click.option("--export", "export_file", type=_FILE, help="Copy the file of what was measured, and measure nothing.")
@click.option(
    "--import",
    "import_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Add what another file has, and measure nothing.",
)
@json_option
@click.pass_context
def tune(ctx: click.Context, as_json: bool, **options: Any) -> None:
    """Measure every backend that auto may choose, and the tiles of kernels, for auto and these kernels to choose by.

    What was measured stands in one file (ROUTED_EXPERTS_CACHE, else the user's cache folder), under the device, the
    versions, the sizes of the layer and the state of the call. Each is in the file as soon as it is measured: a run
    that is interrupted, or whose budget ends, goes on where it was when it is started again.
    """
    from routed_experts.tuning import store

    folder, note = store.writable_folder()
    notes = [note] if note else []
    if options["export_file"] or options["import_file"]:
        report = _move(folder, options, notes)
    else:
        report = _measure(folder, options, notes, Console(stderr=as_json))
    if as_json:
        print_json(report)
    else:
        _print(report)
    if report.get("interrupted"):
        ctx.exit(130)


def _move(folder: Path, options: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    from routed_experts.errors import CheckpointError
    from routed_experts.tuning import store
    from routed_experts.tuning.profile import forget_profile

    source = options["import_file"] or store.find()
    try:
        contents = store.Contents({}, {}) if source is None else store.read_all(source)
    except store.Unreadable as error:
        raise CheckpointError(
            "no measured times can be read", found=str(error), needed="a file that tune wrote", hint="export it again"
        ) from error
    if options["import_file"]:
        notes += filter(None, [store.merge(folder, *contents)])
        forget_profile()
    if options["export_file"]:
        store.write(options["export_file"].absolute(), *contents)
    place = options["export_file"] or folder / store.FILE
    found: dict[str, Any] = {"file": str(place), "notes": notes, "entries": len(contents.times), "points": []}
    return found | {"layers_with_tiles": len(contents.tiles)}


def _measure(folder: Path, options: dict[str, Any], notes: list[str], console: Console) -> dict[str, Any]:
    from routed_experts.tuning import store
    from routed_experts.tuning.measure import spread
    from routed_experts.tuning.profile import forget_profile

    end = time.monotonic() + options["budget"]
    device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    counts = spread(token_counts(options["tokens"] or TOKENS[device]))
    layers = make_layers(options, device)
    notes += filter(None, [store.merge(folder, {})])  # a damaged file is set aside before it is read
    known = store.Contents({}, {}) if options["again"] else store.read_all(folder / store.FILE)
    report: dict[str, Any] = {"file": str(folder / store.FILE), "notes": notes, "tiles": [], "points": []}
    report |= {"planned": 0, "known": 0, "left": 0, "interrupted": False}
    try:
        if options["only"] != "times":
            seconds = (end - time.monotonic()) * (1.0 if options["only"] else SHARE)
            search_tiles(layers, counts, folder, known, seconds, report, console)
            forget_profile()  # times are those of calls with the tiles that were found
        if options["only"] != "tiles":
            _points(_plan(layers, counts, device), folder, known, end, report, console)
    except KeyboardInterrupt:
        report["interrupted"] = True
    forget_profile()
    return report


def _points(
    planned: list[Point], folder: Path, known: Contents, end: float, report: dict[str, Any], console: Console
) -> None:
    from routed_experts.tuning import measure

    stale = changed(report)
    points = [
        point
        for point in planned
        if not measure.is_known(point, known.times) or (point.layer.name, point.layer.dtype, point.tokens) in stale
    ]
    report |= {"planned": len(planned), "known": len(planned) - len(points)}
    try:
        _run(points, folder, end - time.monotonic(), report["points"], console)
    finally:
        report["left"] = len(points) - len(report["points"])


def _plan(layers: list[Layer], counts: list[int], device: str) -> list[Point]:
    """Every layer's ends of the range first, so that a budget that ends leaves something for each."""
    from routed_experts.tuning.measure import STATES, Point

    return [Point(layer, tokens, state) for tokens, state, layer in itertools.product(counts, STATES[device], layers)]


def make_layers(options: dict[str, Any], device: str) -> list[Layer]:
    """Return the layers of ``--shapes``, ``--shape`` or ``--checkpoint``, in every dtype and format asked for."""
    from routed_experts.bench import inputs, shapes
    from routed_experts.tuning.measure import Layer
    from routed_experts.weights import ExpertWeights

    dtypes = [getattr(torch, name) for name in split(options["dtypes"], DTYPES)]
    formats = split(options["quantizations"], FORMATS)
    if options["checkpoint"] is not None:
        name, shape, weights = layer_of(options, device)
        plain = weights.dtype if weights.dtype in (torch.bfloat16, torch.float16, torch.float32) else dtypes[0]
        return [Layer(name, shape, inputs.quantized(weights, fmt), plain) for fmt in formats]
    found = []
    for (name, shape), dtype in itertools.product(
        shapes.chosen(options["names"], options["sizes"], device, most=1).items(), dtypes
    ):
        module = inputs.Experts(shape, dtype, device)
        weights = ExpertWeights(gate_up_proj=module.gate_up_proj, down_proj=module.down_proj, activation="silu")
        found += [Layer(name, shape, inputs.quantized(weights, fmt), dtype) for fmt in formats]
    return found


def _run(points: list[Point], folder: Path, budget: float, done: list[dict[str, Any]], console: Console) -> None:
    """Measure until the points or the seconds are spent; ``done`` has all that is in the file by then."""
    from routed_experts.cli.progress import make_progress
    from routed_experts.tuning.measure import tune as measured

    end = time.monotonic() + budget
    seconds = min(_LONGEST, max(_SHORTEST, budget / 2 / max(1, len(points))))
    with make_progress(console) as progress:
        task = progress.add_task("", total=len(points))
        steps = measured(points, seconds, folder)
        for point in points:
            progress.update(task, description=str(point))
            _, times, failed = next(steps)
            done.append(_point(point, times, failed))
            progress.advance(task)
            if time.monotonic() > end:
                return


def _point(point: Point, times: dict[Any, float], failed: dict[Any, str]) -> dict[str, Any]:
    found = {"layer": point.layer.name, "dtype": point.layer.dtype, "tokens": point.tokens, "state": point.state}
    found["us"] = {_label(row): us for row, us in times.items()}
    return found | {"failed": {_label(row): why for row, why in failed.items()}}


def _label(row: tuple[str, str]) -> str:
    name, path = row
    return f"{name} ({path})" if path else name


def _print(report: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, emoji=False)
    for note in report["notes"]:
        console.print(f"note: {note}", soft_wrap=True)
    if "entries" in report:
        tiles = f", and {report['layers_with_tiles']} layers' tiles" if report["layers_with_tiles"] else ""
        console.print(f"{report['entries']} layers' times{tiles} are in {report['file']}", soft_wrap=True)
        return
    print_tiles(console, report)
    if report["points"]:
        _print_points(console, report["points"])
    done, known, planned = len(report["points"]), report["known"], report["planned"]
    if planned:
        console.print(
            f"{done} points measured, {known} known before, of {planned}; in {report['file']}", soft_wrap=True
        )
    else:
        console.print(f"trials of tiles are in {report['file']}", soft_wrap=True)
    if report["interrupted"] and not report["left"]:
        console.print("interrupted: what was measured is kept, and the same command goes on")
    if report["left"]:
        why = "interrupted" if report["interrupted"] else "the budget is spent"
        console.print(f"{why}: {report['left']} points are left, and the same command goes on with them")


def _print_points(console: Console, points: list[dict[str, Any]]) -> None:
    table = make_table(console, "Layer", "State", "T", "Fastest", "Time", "Next, or failed")
    for one in sorted(points, key=lambda one: (one["layer"], one["dtype"], one["state"], one["tokens"])):
        ranked = sorted(one["us"].items(), key=lambda item: item[1])
        best, us = ranked[0] if ranked else ("none", None)
        others = [f"{name} {duration(other)}" for name, other in ranked[1:2]]
        others += [f"{name}: {why}" for name, why in one["failed"].items()]
        layer = f"{one['layer']} {one['dtype']}"
        table.add_row(layer, one["state"], str(one["tokens"]), best, duration(us), "\n".join(others))
    print_section(console, "Measured", table)
