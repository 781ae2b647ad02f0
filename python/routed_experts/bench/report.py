"""Tables of a run, and the setting that a figure is worth nothing without."""

from __future__ import annotations

import csv
import importlib.util
import os
import shutil
import subprocess
import sys
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import routed_experts as rx
from routed_experts.bench.measure import MODES
from routed_experts.machine import describe_machine

_QUERY = (
    "gpu_uuid,driver_version,pstate,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,power.limit,"
    "temperature.gpu,ecc.mode.current"
)


def setting(device: str) -> dict[str, Any]:
    """Command, date, versions and machine."""
    others = ("torch", "triton", "transformers")
    installed = {name: metadata.version(name) for name in others if importlib.util.find_spec(name)}
    installed["routed-experts"] = rx.__version__
    machine: dict[str, Any] = {
        "cpu": describe_machine()["cpu"],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
    }
    if device == "cuda":
        machine |= {"device": torch.cuda.get_device_name(), **card()}
    program, *arguments = sys.argv
    name = "routed-experts" if program.endswith(("routed-experts", "cli/__main__.py")) else f"python {program}"
    command = " ".join([name, *arguments])
    return {"command": command, "date": f"{date.today()}", "versions": installed, "machine": machine}


def card() -> dict[str, str]:
    """Driver, clocks and power of the current device as they are found; empty without nvidia-smi."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={_QUERY}", "--format=csv,noheader"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return parse_card(answer.stdout, uuid)


def parse_card(text: str, uuid: str) -> dict[str, str]:
    """Return the line of nvidia-smi's answer that speaks of ``uuid``, by field."""
    names = ["driver" if name == "driver_version" else name for name in _QUERY.split(",")]
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(names) and uuid in values[0]:
            return dict(zip(names[1:], values[1:], strict=True))
    return {}


def terminal() -> Console:
    """A console wide enough for the tables, in a log too."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def ratio(value: float | None) -> str:
    """Two digits after the point; None reads as a dash."""
    return "-" if value is None else f"{value:.2f}"


def name_of(row: dict[str, Any]) -> str:
    """Shape and dtype of a row, and the format of its weights."""
    fmt = row.get("quantization", "none")
    return f"{row['shape']} {row['dtype']}" + (f" {fmt}" if fmt != "none" else "")


def print_row(console: Console, row: dict[str, Any]) -> None:
    """One line a candidate."""
    floor = row["floor"]
    title = f"{name_of(row)}, T={row['tokens']}, {row['routing']}: auto is {row['auto_is']}"
    caption = f"floor {floor['us']:.1f} us ({floor['bound']}), {row['experts_hit']:.1f} experts hit"
    if row["published_x_floor"] is not None:
        caption += f", best published {row['published_x_floor']:.2f} x floor"
    table = Table(title=title, caption=caption, min_width=76)
    modes = [mode for mode, (times, why) in MODES.items() if row.get(times) or row.get(why)] or ["eager"]
    columns = ("candidate", *(f"{mode} us" for mode in modes), "x floor", "/ published", "error")
    for column in columns:
        table.add_column(column, justify="left" if column == "candidate" else "right", no_wrap=True)
    for name, error in row["error"].items():
        found = (row[MODES[mode][0]].get(name) for mode in modes)
        times = ("-" if us is None else f"{us:.1f}" for us in found)
        multiple, published = row["x_floor"].get(name), row["x_published"].get(name)
        table.add_row(name, *times, ratio(multiple), ratio(published), f"{error:.1e}")
    console.print(table)
    for what in ("failed", "no_compile", "no_graph"):
        for name, reason in row.get(what, {}).items():
            console.print(f"{name}, {what.replace('_', ' ')}: {reason}", highlight=False, markup=False)
    if row["auto_to_best_peer"] is not None:
        console.print(f"auto / best of transformers: {row['auto_to_best_peer']:.3f}")


def print_summary(console: Console, rows: list[dict[str, Any]], name: str) -> None:
    """Multiples of the floor of one candidate, a line a shape and a column a token count."""
    keys = list(dict.fromkeys((name_of(row), row["routing"]) for row in rows))
    counts = sorted({row["tokens"] for row in rows})
    table = Table(title=f"{name}: multiple of the floor (ratio to the best published)", min_width=60)
    for column in ("shape", *(f"T={tokens}" for tokens in counts)):
        table.add_column(column, justify="left" if column == "shape" else "right")
    cells = {(name_of(row), row["routing"], row["tokens"]): _cell(row, name) for row in rows}
    for key in keys:
        table.add_row(" ".join(key), *(cells.get((*key, tokens), "") for tokens in counts))
    if any(cell != "-" for cell in cells.values()):
        console.print(table)


def _cell(row: dict[str, Any], name: str) -> str:
    published = row["x_published"].get(name)
    return ratio(row["x_floor"].get(name)) + (f" ({published:.2f})" if published is not None else "")


_CSV = (
    "shape",
    "dtype",
    "quantization",
    "tokens",
    "routing",
    "mode",
    "candidate",
    "us",
    "x_floor",
    "floor_us",
    "error",
)


def write_csv(file: Path, rows: list[dict[str, Any]]) -> None:
    """One line a row, mode and candidate."""
    with file.open("w", newline="") as opened:
        lines = csv.writer(opened)
        lines.writerow(_CSV)
        for row in rows:
            same = [row.get(name, "none") for name in _CSV[:5]]
            for mode, (times, _) in MODES.items():
                for name, us in row.get(times, {}).items():
                    floor = row["floor"]["us"]
                    lines.writerow([*same, mode, name, us, us / floor, floor, row["error"].get(name)])
