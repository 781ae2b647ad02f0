"""Keep README's table of backends equal to the specs that the backends are chosen by.

``--check`` exits 1 and prints the table that should stand there; ``--write`` puts it there; without either it
is printed. Each row of the table is one row of a backend: some have several, one a way to its numbers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from marked_table import MarkedTable

from routed_experts.backends.registry import REGISTRY
from routed_experts.backends.spec import Spec

TABLE = MarkedTable(
    Path(__file__).resolve().parent.parent / "README.md",
    "<!-- backends: written by `make format` -->",
    "<!-- end of backends -->",
)
COLUMNS = ("Backend", "Device", "Takes", "Dtypes", "Experts and call", "Machine", "In `auto`")
# Kinds of requirement that speak of the machine; the others speak of the experts and of the call.
MACHINE = {
    "any_package",
    "c_compiler",
    "capability",
    "capability_major",
    "kernel",
    "nvcc",
    "package",
    "python",
    "toolkit",
    "toolkit_version",
    "torch",
    "torch_capability",
}
# Conditions inside conditions would fill the table; `routed-experts select` explains them for a given case.
ELSEWHERE = {"dtype", "kernel_loads", "when"}


def words(requirement: dict[str, Any]) -> str:
    """Return one requirement of the vocabulary in a few words."""
    match requirement:
        case {"kind": "capability", "min": (major, minor)}:
            return f"SM{major}{minor}"
        case {"kind": "capability_major", "any_of": majors}:
            return " or ".join(f"SM{major}x" for major in majors)
        case {
            "kind": "torch_capability",
            "rows": [*_, {"torch_min": torch, "capability_min": (major, minor)}],
        }:
            return f"SM{major}{minor} with torch {torch}"
        case {"kind": "toolkit_version", "rows": rows}:
            return ", ".join(f"CUDA {row['min']} for SM{row['major']}x" for row in rows)
        case {"kind": "package", "name": name, "min": version}:
            return f"{name} {version}"
        case {"kind": "any_package", "any_of": names}:
            return " or ".join(names)
        case {"kind": "kernel", "package": package, "installed": installed}:
            return f"{package} or {installed}"
        case {"kind": "multiple_of", "n": n, "dims": dims}:
            return f"{', '.join(dims)} multiples of {n}"
        case {"kind": "at_most", "n": n, "dims": dims}:
            return f"{', '.join(dims)} at most {n}"
        case {"kind": "c_compiler"}:
            return "C compiler"
        case {"kind": "weights_aligned", "bytes": count}:
            return f"weight rows at multiples of {count} bytes"
        case {"kind": "scales", "any_of": pairs}:
            return " or ".join(f"{scale} scales" for _, scale in pairs)
        case {"kind": kind, **arguments}:
            values = (v if isinstance(v, str) else ", ".join(map(str, v)) for v in arguments.values())
            return " ".join([kind.replace("_", " "), *values])
    raise ValueError(f"{requirement} has no kind")


def cells(spec: Spec) -> list[str]:
    """Return the cells of one row, in the order of COLUMNS."""
    plain = [need for need in spec.requires if need["kind"] not in ELSEWHERE]
    dtypes = (", ".join(need["any_of"]) for need in spec.requires if need["kind"] == "dtype")
    return [
        f"`{spec.name}`" + (f" ({spec.path})" if spec.path else ""),
        ", ".join(spec.devices),
        spec.takes,
        next(dtypes, "all floats"),
        "; ".join(words(need) for need in plain if need["kind"] not in MACHINE) or "all",
        "; ".join(words(need) for need in plain if need["kind"] in MACHINE) or "any",
        "yes" if spec.auto else "no",
    ]


def main() -> int:
    """Print, check or write the table of every row of every registered backend."""
    rows = (cells(spec) for spec, _ in REGISTRY.table().rows)
    return TABLE.main(__doc__.splitlines()[0], COLUMNS, rows)


if __name__ == "__main__":
    sys.exit(main())
