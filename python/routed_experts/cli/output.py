"""What all commands share: how errors, JSON and tables are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from routed_experts.errors import DeviceError, RoutedExpertsError

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")


class Command(click.Command):
    """A command that ends with status 1 and a report, not a traceback, on our errors and for want of memory."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except RoutedExpertsError as error:
            _report(ctx, error)
        except (MemoryError, RuntimeError) as error:
            if not _is_memory(error):
                raise
            _report(ctx, _no_memory(error))


def _report(ctx: click.Context, error: RoutedExpertsError) -> NoReturn:
    if ctx.params.get("as_json"):
        print_json({"error": describe_error(error)})
    else:
        click.echo(f"error: {error}", err=True)
    ctx.exit(1)


def _is_memory(error: BaseException) -> bool:
    # torch has a class of its own for a device's memory only; the CPU's allocator raises a bare RuntimeError.
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "DefaultCPUAllocator" in str(error)


def _no_memory(error: BaseException) -> DeviceError:
    wanted = re.search(r"tried to allocate ([\d.]+ \w+)", str(error))
    return DeviceError(
        "not enough memory",
        found=f"no room for {wanted[1]}" if wanted else "an allocation that failed",
        needed="memory for the weights, a second copy of them in float32, and the calls",
        hint="give a smaller layer or fewer tokens",
    )


def describe_error(error: RoutedExpertsError) -> dict[str, str | None]:
    """Return the class and the parts of an error."""
    return {
        "type": type(error).__name__,
        "message": error.message,
        "found": error.found,
        "needed": error.needed,
        "hint": error.hint,
    }


def print_json(data: object) -> None:
    """Print ``data`` as indented JSON, on stdout: also an error is the answer a program asked for."""
    click.echo(json.dumps(data, indent=2))


def open_console() -> Console:
    """Return a console on stdout that takes text as it is: found paths may hold brackets and colons."""
    return Console(highlight=False, markup=False, emoji=False)


def make_table(console: Console, *columns: str, header: bool = True) -> Table:
    """Return a table that folds long words instead of cutting them; lines are drawn on a terminal only."""
    style = box.SIMPLE_HEAD if console.is_terminal and header else None
    table = Table(box=style, show_header=header, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_section(console: Console, title: str, table: Table | Text) -> None:
    """Print a titled part of a report, with an empty line after it."""
    console.print(Text(title, style="bold cyan"))
    console.print(table)
    console.print()


def print_pairs(console: Console, title: str, pairs: Iterable[tuple[str, object]]) -> None:
    """Print names and values; a value of None reads as a dash."""
    table = make_table(console, "name", "value", header=False)
    for name, value in pairs:
        table.add_row(name, "-" if value is None else str(value))
    print_section(console, title, table)


def verdict(accepted: bool) -> Text:
    """Return "can" or "cannot", coloured where colours show."""
    return Text("can", style="green") if accepted else Text("cannot", style="red")


def reasons(found: str | None, needed: str | None, hint: str | None) -> str:
    """Return the parts of a decision, one a line; empty parts are left out."""
    parts = (("found", found), ("needed", needed), ("hint", hint))
    return "\n".join(f"{label}: {text}" for label, text in parts if text)


def duration(microseconds: float | None) -> str:
    """Return a time for reading; None reads as a dash."""
    if microseconds is None:
        return "-"
    return f"{microseconds:.1f} us" if microseconds < 1000 else f"{microseconds / 1000:.1f} ms"


def size(count: int | None) -> str | None:
    """Return bytes for reading, in binary units."""
    if count is None:
        return None
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
