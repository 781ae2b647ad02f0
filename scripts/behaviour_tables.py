"""Write docs/behaviour.md: what compiles and what repeats, measured by tests/behaviour.py.

    python scripts/behaviour_tables.py [--device cuda]

Cells of the device named are measured anew; those of others are kept in docs/behaviour.json. ``--check`` measures
nothing and exits 1 when the page is not what the cells say.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
CELLS, PAGE = ROOT / "docs" / "behaviour.json", ROOT / "docs" / "behaviour.md"
_HEAD = """# Compiled and repeated

Written by `scripts/behaviour_tables.py` from calls of `tests/behaviour.py`; a test makes the CPU's cells again. T=24,
K=2, E=6, H=64, I=32.
"""
_COMPILE = """
## Under torch.compile

`yes`: the call compiles that way, and its result, in training its gradients too, are those of a plain call within the
dtype's rounding. `declined`: the backend does not take such a call on this device at all. A compiled `auto` without
gradients is one operator that chooses by the real number of tokens; with gradients it is `grouped_mm`.
"""
_REPEAT = """
## The same bits again

`equal`: calls with the same input have the same bits, result and gradients. Sums over the slots of a token run in
float32 in slot order on every backend.
"""


def render(cells: dict[str, Any]) -> str:
    """The page."""
    parts = [_HEAD, _COMPILE, *_tables(cells, "compile", _compile_cell), _REPEAT, *_tables(cells, "repeat", str)]
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


def _tables(cells: dict[str, Any], what: str, text: Any) -> list[str]:
    found = []
    for device, one in sorted(cells.items()):
        rows: dict[tuple[str, str], dict[str, str]] = {}
        for key, value in one[what].items():
            name, mode, dtype = key.split()
            rows.setdefault((name, mode), {})[dtype] = text(value)
        dtypes = list(next(iter(rows.values())))
        lines = [f"\n### On {device}: {one['where']}\n", f"| Backend | Mode | {' | '.join(dtypes)} |"]
        lines.append("| --- " * (len(dtypes) + 2) + "|")
        lines += [f"| `{name}` | {mode} | {' | '.join(row.values())} |" for (name, mode), row in rows.items()]
        found.append("\n".join(lines))
    return found


def _compile_cell(value: dict[str, str]) -> str:
    """Both ways in a few words."""
    ways = set(value.values())
    if value["fullgraph=False"] == "yes":
        return "yes, in one graph" if value["fullgraph=True"] == "yes" else "yes, with graph breaks"
    return ways.pop() if len(ways) == 1 else "; ".join(f"{way}: {found}" for way, found in value.items())


def measure(device: str) -> dict[str, Any]:
    """The cells of one device, and what it is."""
    sys.path.insert(0, str(ROOT / "tests"))
    cells = importlib.import_module("behaviour").cells
    card = torch.cuda.get_device_name() if device == "cuda" else "x86-64"
    return {"where": f"{card}, torch {torch.__version__.split('+')[0]}", **cells(device)}


def main() -> int:
    """Measure and write, or check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    cells = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    if options.check:
        return int(PAGE.read_text() != render(cells))
    cells[options.device] = measure(options.device)
    CELLS.write_text(json.dumps(cells, indent=1, sort_keys=True) + "\n")
    PAGE.write_text(render(json.loads(CELLS.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
