"""What a run says as a whole: series against T, where the fastest changes, and ratios to an older run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

from routed_experts.bench.measure import MODES
from routed_experts.bench.report import name_of


@dataclass(frozen=True)
class Group:
    """Rows that differ in T alone, in one mode: microseconds of each candidate by T, and the floor's."""

    title: str
    mode: str
    floor: dict[int, float] = field(default_factory=dict)
    us: dict[str, dict[int, float]] = field(default_factory=dict)

    def crossings(self) -> list[tuple[float, str, str]]:
        """Return (T, fastest below, fastest above) where the fastest changes; ``auto`` is none of them."""
        fastest = {t: self.fastest(t) for t in sorted(self.floor)}
        found = []
        for (low, before), (high, after) in itertools.pairwise(fastest.items()):
            if before and after and before != after:
                found.append((self._meeting(low, high, before, after), before, after))
        return found

    def fastest(self, tokens: int) -> str | None:
        """The candidate with the least time at T."""
        here = {name: times[tokens] for name, times in self.us.items() if tokens in times and name != "auto"}
        return min(here, key=here.__getitem__) if here else None

    def _meeting(self, low: int, high: int, before: str, after: str) -> float:
        """Where two lines on logarithmic axes meet; the geometric mean where one of them ends."""
        one, two = self.us[before], self.us[after]
        share = 0.5
        if {low, high} <= one.keys() & two.keys():
            ahead, behind = (math.log(two[t] / one[t]) for t in (low, high))
            share = ahead / (ahead - behind) if ahead != behind else 0.5
        return low * (high / low) ** share


def groups(rows: list[dict[str, Any]]) -> list[Group]:
    """Return the groups of a run, in its order."""
    found: dict[tuple[str, str], Group] = {}
    for row in rows:
        title = f"{name_of(row)}, {row['routing']}"
        for mode, (times, _) in MODES.items():
            if row.get(times):
                group = found.setdefault((title, mode), Group(title, mode))
                group.floor[row["tokens"]] = row["floor"]["us"]
                for name, us in row[times].items():
                    group.us.setdefault(name, {})[row["tokens"]] = us
    return list(found.values())


def compare(old: dict[str, Any], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line for each row, mode and candidate that both runs have: times, ratio, ratio of floor multiples.

    A ratio above 1 is slower than before. That of the multiples takes out what the device as a whole has changed.
    """
    before = {_same(row): row for row in old["rows"]}
    lines = []
    for row in new["rows"]:
        past = before.get(_same(row))
        if past is None:
            continue
        for mode, (times, _) in MODES.items():
            for name in row.get(times, {}).keys() & past.get(times, {}).keys():
                was, now = past[times][name], row[times][name]
                per_floor = (now / row["floor"]["us"]) / (was / past["floor"]["us"])
                key = {"row": f"{name_of(row)}, {row['routing']}", "tokens": row["tokens"], "mode": mode, "name": name}
                lines.append(key | {"old_us": was, "new_us": now, "ratio": now / was, "floor_ratio": per_floor})
    return sorted(lines, key=lambda line: -line["ratio"])


def _same(row: dict[str, Any]) -> tuple[Any, ...]:
    sizes = tuple(row["sizes"])
    return sizes, row["dtype"], row.get("quantization", "none"), row["tokens"], row["routing"]
