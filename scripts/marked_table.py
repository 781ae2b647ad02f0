"""A table between two marks of a page, which a script writes and checks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class MarkedTable(NamedTuple):
    """Where a table stands: the page, and the lines before and behind it."""

    page: Path
    begin: str
    end: str

    def split(self) -> tuple[str, str, str]:
        """Return the page's text before the table, the table, and the text after it."""
        before, found, rest = self.page.read_text().partition(self.begin)
        inside, closed, after = rest.partition(self.end)
        if not (found and closed):
            sys.exit(f"{self.page}: the lines {self.begin!r} and {self.end!r} are not both there")
        return before, inside.strip(), after

    def main(self, about: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
        """Print the table; or exit with 1 if the page holds another (--check), or put it there (--write)."""
        parser = argparse.ArgumentParser(description=about)
        action = parser.add_mutually_exclusive_group()
        action.add_argument("--check", action="store_true")
        action.add_argument("--write", action="store_true")
        options = parser.parse_args()
        wanted = "\n".join(f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *rows])
        if options.write:
            before, _, after = self.split()
            self.page.write_text(f"{before}{self.begin}\n{wanted}\n{self.end}{after}")
        elif not options.check or self.split()[1] != wanted:
            print(wanted)
            return 1 if options.check else 0
        return 0
