"""The face of a run: a bar and a table that grows on a terminal, whole tables in a log."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live as RichLive
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from routed_experts.bench import crossings, report
from routed_experts.bench.measure import best_times

_MOST_LINES = 14  # of the growing table: a terminal's height is short, and the whole is printed at the end


def make_progress(console: Console) -> Progress:
    """Return a bar with the count, the time that is left and what is being done."""
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console)


class Live:
    """Shows rows as they come."""

    def __init__(self, total: int, quiet: bool = False):
        self.console = Console(stderr=True) if quiet else report.terminal()
        self.quiet = quiet
        self.progress = make_progress(self.console)
        self.task = self.progress.add_task("", total=total)
        self.rows: list[dict[str, Any]] = []
        self.live = RichLive(self._view(), console=self.console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Live:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if self.console.is_terminal:
            self.live.stop()

    def describe(self, what: str) -> None:
        """Say what is being done."""
        self.progress.update(self.task, description=what)

    def told(self, row: dict[str, Any]) -> None:
        """Take a row that was measured."""
        self.rows.append(row)
        self.progress.advance(self.task)
        self.live.update(self._view())
        if not self.console.is_terminal and not self.quiet:
            report.print_row(self.console, row)

    def _view(self) -> Group:
        table = Table("row", "T", "fastest", "us", "x floor", "auto, x fastest")
        for row in self.rows[-_MOST_LINES:]:
            best = best_times(row)
            others = {name: us for name, us in best.items() if name != "auto"} or best
            if not others:
                table.add_row(report.name_of(row), str(row["tokens"]), "none is right", "-", "-", "-")
                continue
            name = min(others, key=others.__getitem__)
            regret = best["auto"] / others[name] if "auto" in best else None
            times = (f"{others[name]:.1f}", report.ratio(row["x_floor"][name]), report.ratio(regret))
            table.add_row(report.name_of(row), str(row["tokens"]), name, *times)
        return Group(table, self.progress)

    def summary(self, found: dict[str, Any], old: dict[str, Any] | None) -> None:
        """Print what the run says as a whole: every row on a terminal, crossings, ratios to an older run."""
        if self.console.is_terminal:
            for row in found["rows"]:
                report.print_row(self.console, row)
        for group in crossings.groups(found["rows"]):
            for tokens, before, after in group.crossings():
                where = f"{group.title}, {group.mode}"
                self.console.print(f"{where}: {before} is fastest below T={tokens:.0f}, {after} above", markup=False)
        if old is not None:
            _print_ratios(self.console, old, found)


def _print_ratios(console: Console, old: dict[str, Any], new: dict[str, Any]) -> None:
    table = Table("row", "T", "mode", "candidate", "old us", "new us", "new / old", "of the floors", title="old run")
    for line in crossings.compare(old, new):
        times = (f"{line['old_us']:.1f}", f"{line['new_us']:.1f}", f"{line['ratio']:.2f}", f"{line['floor_ratio']:.2f}")
        table.add_row(line["row"], str(line["tokens"]), line["mode"], line["name"], *times)
    console.print(table if table.row_count else "the older run has no row of this one")
