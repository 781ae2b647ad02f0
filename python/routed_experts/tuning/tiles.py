"""What was measured of kernels' tiles: every trial, how far it reaches, and which one is taken.

A trial stands for one layer and one token count; its ratio is its time over that of the built-in tiles, which took
turns with it. Whatever is read from a file is checked here before a kernel sees it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

from routed_experts.tiles import Config
from routed_experts.tuning.keys import Key

# Tiles are taken instead of the built-in ones from so much of their time on: nearer than that is noise.
WORTHWHILE = 0.97
# Lowest and highest value of what is a power of two, and of the pipeline's stages.
_POWERS = {"rows": (16, 256), "columns": (16, 512), "depth": (16, 512), "warps": (1, 16)}
_STAGES = (1, 8)

# Of the first and of the second product.
Tiles: TypeAlias = tuple[Config, Config]


class Trial(NamedTuple):
    """What came of tiles: their ratio, and the token counts from ``low`` to ``high`` that it holds for; or ``why`` not.

    ``ratio`` is None of what could not be run.
    """

    ratio: float | None
    low: int = 0
    high: int = 0
    why: str = ""


class Record(NamedTuple):
    """Trials at one token count, and microseconds of a call with the built-in tiles, which are among them."""

    default_us: float
    default: Tiles
    trials: dict[Tiles, Trial]

    def best(self) -> Tiles:
        """The tiles to take: the fastest, or the built-in ones where these are as good."""
        ratios = {tiles: trial.ratio for tiles, trial in self.trials.items() if trial.ratio is not None}
        found = min(ratios, key=ratios.__getitem__, default=self.default)
        return found if ratios.get(found, 1.0) <= WORTHWHILE else self.default


# By token count; by the canonical text of a key.
Records: TypeAlias = dict[int, Record]
Found: TypeAlias = dict[str, tuple[Key, Records]]


def tiles_at(records: Records, tokens: int) -> Tiles | None:
    """Return the measured tiles for a token count, of the nearest record that reaches it; None for built-in ones."""
    reaching = []
    for measured, record in records.items():
        best = record.best()
        trial = record.trials.get(best)
        if trial is not None and trial.low <= tokens <= trial.high:
            reaching.append((abs(math.log(measured / tokens)), -measured, best, best == record.default))
    if not reaching:
        return None
    _, _, best, is_default = min(reaching)
    return None if is_default else best


def added(kept: Records, new: Records) -> None:
    """Add records to others: newer trials replace older ones of the same tiles."""
    for tokens, record in new.items():
        old = kept.get(tokens)
        # Trials are ratios to the built-in tiles: those of other ones say nothing.
        trials = old.trials if old is not None and old.default == record.default else {}
        kept[tokens] = record._replace(trials={**trials, **record.trials})


def is_valid(config: Config) -> bool:
    """Whether every value is a power of two, or of stages a number, that a kernel may be asked for."""
    powers = all(
        type(value := getattr(config, name)) is int and low <= value <= high and value & (value - 1) == 0
        for name, (low, high) in _POWERS.items()
    )
    stages = type(config.stages) is int and _STAGES[0] <= config.stages <= _STAGES[1]
    return powers and stages and type(config.swap) is bool


def to_plain(records: Records) -> list[dict[str, Any]]:
    """Return records as a file holds them."""
    return [
        {
            "tokens": tokens,
            "default_us": record.default_us,
            "default": record.default,
            "trials": [{"tiles": tiles, **trial._asdict()} for tiles, trial in record.trials.items()],
        }
        for tokens, record in sorted(records.items())
    ]


def from_plain(plain: list[dict[str, Any]]) -> Records:
    """Return the records of a file.

    Raises:
        ValueError, TypeError, KeyError: values that are none.
    """
    found = {}
    for one in plain:
        us = float(one["default_us"])
        trials = dict(map(_trial, one["trials"]))
        if not (_is_count(one["tokens"]) and 0 < us < math.inf):
            raise ValueError("a record of tiles that is none")
        found[one["tokens"]] = Record(us, _tiles(one["default"]), trials)
    return found


def _trial(plain: dict[str, Any]) -> tuple[Tiles, Trial]:
    tiles, trial = _tiles(plain["tiles"]), Trial(plain["ratio"], plain["low"], plain["high"], str(plain["why"]))
    if trial.ratio is None:
        return tiles, trial
    ratio = float(trial.ratio)
    if not (0 < ratio < math.inf and _is_count(trial.low) and _is_count(trial.high) and trial.low <= trial.high):
        raise ValueError("a trial of tiles that is none")
    return tiles, trial._replace(ratio=ratio)


def _tiles(plain: list[list[Any]]) -> Tiles:
    up, down = (Config(*one) for one in plain)
    if not (is_valid(up) and is_valid(down) and up.rows == down.rows):
        raise ValueError(f"tiles {plain} that are none")
    return up, down


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0
