"""The part of ``routed-experts tune`` that looks for better tiles of kernels, and what it prints."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from routed_experts.cli.output import duration, make_table, print_section

if TYPE_CHECKING:
    from routed_experts.tuning.measure import Layer
    from routed_experts.tuning.store import Contents
    from routed_experts.tuning.trials import Search

# Of the budget, where times are measured as well.
SHARE = 0.6


def search_tiles(
    layers: list[Layer],
    counts: list[int],
    folder: Path,
    known: Contents | None,
    seconds: float,
    report: dict[str, Any],
    console: Console,
) -> None:
    """Search every layer at every count, each for its share of the seconds.

    What is in ``report["tiles"]`` is in the file. ``report["untuned"]`` says of layers that they were left out, for no
    kernel that can run them has tiles to choose.
    """
    from routed_experts.cli.progress import make_progress
    from routed_experts.tuning import trials

    tunable = [layer for layer in layers if trials.has_tiles(layer)]
    if len(tunable) < len(layers):
        report["untuned"] = _nothing_to_tune(layers)
    pairs = list(itertools.product(counts, tunable))
    if not pairs:
        return
    end = time.monotonic() + seconds
    with make_progress(console) as progress:
        task = progress.add_task("tiles", total=len(pairs))
        for place, (tokens, layer) in enumerate(pairs):
            now = time.monotonic()
            if now > end and place:
                report["tiles_left"] = [f"{one.name} {one.dtype}, T={count}" for count, one in pairs[place:]]
                return
            share = now + (end - now) / (len(pairs) - place)
            try:
                search = trials.Search(layer, tokens, known)
                _search(search, folder, share, report["tiles"], lambda text: progress.update(task, description=text))
            except Exception as error:  # one layer that cannot be run must not end a run of many minutes
                report["notes"].append(f"tiles of {layer.name}, T={tokens}: {trials.reason(error)}")
            progress.advance(task)


def _nothing_to_tune(layers: list[Layer]) -> str:
    kind = layers[0].device.type
    why = "block sizes of the Rust kernels are fixed when they are compiled" if kind == "cpu" else "none of them runs"
    return f"tiles are not tuned on {kind}: {why}"


def _search(search: Search, folder: Path, end: float, done: list[dict[str, Any]], tell: Any) -> None:
    """Go on until nothing is left to try, or the time is up; the report is right after every batch."""
    done.append({**search.to_dict(), "changed": False})
    before = search.record.best()
    tell(f"{search}")
    while search.step(folder):
        done[-1] = {**search.to_dict(), "changed": search.record.best() != before}
        tell(f"{search}: {done[-1]['tried']} tried, best {done[-1]['ratio']:.2f}")
        if time.monotonic() > end:
            return


def changed(report: dict[str, Any]) -> set[tuple[str, str, int]]:
    """Layers and counts whose calls have other tiles now: times of before are not theirs."""
    return {(one["layer"], one["dtype"], one["tokens"]) for one in report["tiles"] if one["changed"]}


def print_tiles(console: Console, report: dict[str, Any]) -> None:
    """Print what was found, a line for each layer and count, and how many candidates were skipped for what reason."""
    if "untuned" in report:
        console.print(report["untuned"], soft_wrap=True)
    if report["tiles"]:
        table = make_table(console, "Layer", "Regime", "Best tiles", "Time", "Tried")
        for one in sorted(report["tiles"], key=lambda one: (one["layer"], one["dtype"], one["tokens"])):
            layer = f"{one['layer']} {one['dtype']}, T={one['tokens']}"
            table.add_row(layer, one["regime"], _best(one), _gain(one), f"{one['tried']}{_more(one)}")
        print_section(console, "Tiles of kernels (rows x columns x depth, warps, stages)", table)
        skipped = sum((Counter(one["skipped"]) for one in report["tiles"]), Counter())
        if skipped:
            whys = "; ".join(f"{count} for {why}" for why, count in skipped.most_common())
            console.print(f"skipped: {whys}", soft_wrap=True)
    left = len(report.get("tiles_left", ())) + sum(not one["complete"] for one in report["tiles"])
    if left:
        console.print(f"{left} searches for tiles have more to try, and the same command goes on with them")


def _best(one: dict[str, Any]) -> str:
    return "built-in" if one["best"] == one["default"] else "\n".join(map(_tile, one["best"]))


def _tile(config: list[Any]) -> str:
    rows, columns, depth, warps, stages, swap = config
    return f"{rows}x{columns}x{depth} w{warps} s{stages}{' swapped' if swap else ''}"


def _gain(one: dict[str, Any]) -> str:
    """Time with the best tiles, beside that with the built-in ones where these are others."""
    if one["default_us"] is None:
        return "-"
    if one["best"] == one["default"]:
        return duration(one["default_us"])
    return f"{duration(one['ratio'] * one['default_us'])}\n{one['ratio']:.2f} of built-in"


def _more(one: dict[str, Any]) -> str:
    return "" if one["complete"] else ", more left"
