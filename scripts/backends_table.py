"""Keep README's table of backends equal to the specs that the backends are chosen by.

``--check`` exits 1 and prints the table that should stand there; ``--write`` puts it there; without either it
is printed. Each row of the table is one row of a backend: some have several, one a way to its numbers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from routed_experts.backends.registry import REGISTRY

README = Path(__file__).resolve().parent.parent / "README.md"
BEGIN, END = "<!-- backends: written by `make format` -->", "<!-- end of backends -->"
COLUMNS = ("Backend", "Devices", "Takes", "Gives", "Needs", "In `auto`")


def sentence(requirement: dict[str, Any]) -> str:
    """Return one requirement of the vocabulary in words: its kind, then its arguments."""
    arguments = (v for k, v in requirement.items() if k != "kind" and v is not None)
    words = (", ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in arguments)
    return " ".join([str(requirement["kind"]).replace("_", " "), *words])


def table() -> str:
    """Return the markdown table of every row of every registered backend."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"| {' | '.join('---' for _ in COLUMNS)} |"]
    for spec, _ in REGISTRY.table().rows:
        label = f"`{spec.name}`" + (f" ({spec.path})" if spec.path else "")
        needs = "; ".join(map(sentence, spec.requires)) or "nothing"
        cells = [label, ", ".join(spec.devices), spec.takes, spec.gives, needs, "yes" if spec.auto else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def split_readme() -> tuple[str, str, str]:
    """Return README's text before the table, the table, and the text after it."""
    before, found, rest = README.read_text().partition(BEGIN)
    inside, closed, after = rest.partition(END)
    if not (found and closed):
        sys.exit(f"{README}: the lines {BEGIN!r} and {END!r} are not both there")
    return before, inside.strip(), after


def main() -> int:
    """Print, check or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    options = parser.parse_args()
    wanted = table()
    if options.write:
        before, _, after = split_readme()
        README.write_text(f"{before}{BEGIN}\n{wanted}\n{END}{after}")
    elif not options.check or split_readme()[1] != wanted:
        print(wanted)
        return 1 if options.check else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
