"""What a choice by default figures costs: time of what ``auto`` takes over that of the best, from benches/results/.

``--check`` exits 1 when docs/auto.md does not hold the table; ``--write`` puts it there; without either it is printed.
The choice is made here and now, for the machine and the versions of each file; the times are the file's. A row whose
choice was not measured in its run says nothing and is counted apart.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from marked_table import MarkedTable

import routed_experts as rx
from routed_experts.bench.measure import MODES

ROOT = Path(__file__).resolve().parent.parent
TABLE = MarkedTable(ROOT / "docs" / "auto.md", "<!-- regret: written by `make format` -->", "<!-- end of regret -->")
FILES = (
    "cpu-experts.json",
    "cpu-auto.json",
    "h200-fused.json",
    "h200-fused-routing.json",
    "h200-fused-prefill.json",
    "h200-auto.json",
)
LIMIT = 1.15
COLUMNS = ("File", "Device", "Mode", "Rows", "Geometric mean", "Worst", "Where", "Not measured")


class Regret(NamedTuple):
    """One row of one mode: what ``auto`` takes, and how many times the best backend's time that is."""

    where: str
    chosen: str
    times: float | None  # None where the choice was not measured


def facts_of(report: dict[str, Any]) -> rx.Facts:
    """The facts of the machine that a file is of."""
    versions = report["versions"]
    here = rx.current_facts()
    packages = {**here.packages, "triton": versions.get("triton")}
    found = here.replace(torch=versions["torch"], packages=packages, c_compiler="cc", python_headers="include")
    if "driver" not in report["machine"]:
        return found.replace(device="cpu")
    return found.replace(device="cuda", capability=(9, 0), device_name=report["machine"]["device"], device_count=1)


def choice(row: dict[str, Any], mode: str, facts: rx.Facts) -> str:
    """The backend that ``auto`` takes for a row: weights of its sizes, on no device."""
    experts, top_k, hidden, inner = row["sizes"]
    dtype = getattr(torch, row["dtype"])
    up = torch.empty(experts, 2 * inner, hidden, device="meta", dtype=dtype)
    down = torch.empty(experts, hidden, inner, device="meta", dtype=dtype)
    weights = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
    how = {"num_tokens": row["tokens"], "num_top_k": top_k, "capturing": mode == "graph", "facts": facts}
    return rx.select_backend(weights, **how).name


def regrets(report: dict[str, Any], mode: str) -> Iterator[Regret]:
    """Every row of a file that has times of backends in a mode."""
    facts = facts_of(report)
    for row in report["rows"]:
        us = {name: us for name, us in row.get(MODES[mode][0], {}).items() if name in rx.backends()}
        if us and row.get("quantization", "none") == "none":
            chosen = choice(row, mode, facts)
            where = f"{row['shape']} {row['dtype']} T={row['tokens']}"
            yield Regret(where, chosen, us[chosen] / min(us.values()) if chosen in us else None)


def lines() -> Iterator[tuple[str, ...]]:
    """The rows of the table."""
    for file in (ROOT / "benches" / "results" / name for name in FILES):
        if not file.exists():
            continue
        report = json.loads(file.read_text())
        for mode in MODES:
            found = list(regrets(report, mode))
            known = [one for one in found if one.times is not None]
            if not known:
                continue
            worst = max(known, key=lambda one: one.times or 0)
            mean = math.exp(sum(math.log(one.times or 1) for one in known) / len(known))
            device = report["machine"].get("device", "CPU")
            where = f"{worst.where}: {worst.chosen}" if (worst.times or 0) > 1 else "-"
            missing = str(len(found) - len(known))
            yield file.name, device, mode, str(len(known)), f"{mean:.3f}", f"{worst.times:.3f}", where, missing


def main() -> int:
    """Print, check or write the table."""
    os.environ["ROUTED_EXPERTS_CACHE"] = os.devnull  # default figures, whatever was measured on this machine
    return TABLE.main(__doc__.splitlines()[0], COLUMNS, lines())


if __name__ == "__main__":
    sys.exit(main())
