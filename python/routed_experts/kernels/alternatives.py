"""Tiles that may be better than the built-in ones for one call: what a search tries, and in what order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

import torch

from routed_experts.kernels import configs, quantized_configs
from routed_experts.kernels.choice import Choice, Device, Sizes, choose
from routed_experts.kernels.configs import Config
from routed_experts.problem import bucket
from routed_experts.tuning.tiles import Tiles, is_valid
from routed_experts.weights import ExpertWeights

# Float32 sums a thread: of more, registers run out.
_MOST_SUMS = 128
_ANY_ROOM = 1 << 40  # bytes of shared memory: a device that every tile fits
_LEAST_SWAPPED = 64  # rows that tensor cores take of weights that stand in their place
# A record holds from half its token count to twice.
_REACH = 2


class Call:
    """One call's choices by tiles."""

    def __init__(self, experts: ExpertWeights, sizes: Sizes, dtype: torch.dtype, device: Device) -> None:
        """Take what a choice depends on."""
        self.experts, self.sizes, self.dtype, self.device = experts, sizes, dtype, device
        self.default = self.choice(None)
        self.tiles: Tiles = (self.default.up, self.default.down)

    def choice(self, tiles: Tiles | None, device: Device | None = None, tokens: int | None = None) -> Choice:
        """The call as it runs with these tiles, on this device and at this token count or others."""
        sizes = self.sizes if tokens is None else self.sizes._replace(tokens=tokens)
        return choose(self.experts, sizes, self.dtype, device or self.device, may_quantize=True, tiles=tiles)

    def has_room(self, tiles: Tiles) -> bool:
        """Whether the device's shared memory holds the tiles as they are."""
        return self.choice(tiles) == self.choice(tiles, self.device._replace(shared_bytes=_ANY_ROOM))

    def reach(self, tiles: Tiles) -> tuple[int, int]:
        """Lowest and highest token count at which the same kernels would run in place of the same built-in tiles."""
        here, tokens = self._kernels(tiles, None), self.sizes.tokens

        def last(counts: list[int]) -> int:
            alike = itertools.takewhile(lambda count: self._kernels(tiles, count) == here, counts)
            return max(alike, key=lambda count: abs(count - tokens), default=tokens)

        below, above = _buckets(-(-tokens // _REACH), tokens), _buckets(tokens, _REACH * tokens)
        return min(tokens, last(below[::-1])), max(tokens, last(above))

    def _kernels(self, tiles: Tiles, tokens: int | None) -> tuple[Choice, Choice]:
        """What must not change; the parts that a depth is cut into may."""
        both = self.choice(tiles, tokens=tokens), self.choice(None, tokens=tokens)
        return both[0]._replace(split=1), both[1]._replace(split=1)


def _buckets(low: int, high: int) -> list[int]:
    """The token counts of a range that choices are made for."""
    found = []
    while low <= high:
        found.append(bucket(low))
        low = found[-1] + 1
    return found


def in_order(call: Call, ratios: Mapping[Tiles, float | None]) -> Iterator[Tiles]:
    """Tiles to try next: the built-in ones, those of other regimes, then what is beside the best so far.

    ``ratios`` are those of tiles tried before, None of those that could not be run; these do not come again.
    """
    best = min((tiles for tiles, ratio in ratios.items() if ratio is not None), key=_of(ratios), default=call.tiles)
    seen = set(ratios)
    # The kernels of kernels/e4m3_hopper.py are written for their tiles.
    others = itertools.chain() if call.default.programs else itertools.chain(_regimes(call), _beside(call, best))
    for tiles in itertools.chain([call.tiles], others):
        if tiles not in seen and (tiles == call.tiles or (all(map(is_valid, tiles)) and _fits_registers(call, tiles))):
            seen.add(tiles)
            yield tiles


def _of(ratios: Mapping[Tiles, float | None]) -> Callable[[Tiles], float]:
    return lambda tiles: ratios[tiles] or 0.0


def _regimes(call: Call) -> Iterator[Tiles]:
    """The built-in tiles of the neighbouring regimes, with rows as here where there is no sort."""
    choice = call.default
    if choice.is_quantized:
        is_fp4 = call.experts.dtype == torch.int8
        kinds = {"is_fp4": is_fp4, "quantizes": choice.quantizes, "records": choice.has_records}
        table = quantized_configs.table(call.device.capability, **kinds)
    else:
        table = configs.TABLES.get(call.device.capability[0], configs._DEFAULT)
    rows = choice.up.rows
    for up, down in (table.unsorted, *((regime.up, regime.down) for regime in table.regimes)):
        if rows // 2 <= up.rows <= 2 * rows:
            yield (up, down) if choice.is_sorted else (up._replace(rows=rows), down._replace(rows=rows))


def _beside(call: Call, best: Tiles) -> Iterator[Tiles]:
    """One value of one product at a time, both products by turns; then the rows, which they share."""
    up, down = best
    for one, other in zip(_changes(call, up, call.default.up), _changes(call, down, call.default.down), strict=True):
        yield one, down
        yield up, other
    for rows in (up.rows // 2, up.rows * 2):
        yield up._replace(rows=rows), down._replace(rows=rows)


def _changes(call: Call, config: Config, default: Config) -> Iterator[Config]:
    yield config._replace(stages=config.stages + 1)
    yield config._replace(stages=config.stages - 1)
    for name in ("columns", "depth", "warps"):
        value = getattr(config, name)
        yield config._replace(**{name: value * 2})
        yield config._replace(**{name: value // 2})
    # Kernels of E4M3 rows and of descriptors have one order of their operands.
    fixed = call.default.quantizes or call.default.is_large
    yield default if fixed else config._replace(swap=not config.swap)


def _fits_registers(call: Call, tiles: Tiles) -> bool:
    widths = 1 + call.experts.has_gate, 1
    sums = (one.rows * one.columns * width // (32 * one.warps) for one, width in zip(tiles, widths, strict=True))
    wide = all(not one.swap or one.columns * width >= _LEAST_SWAPPED for one, width in zip(tiles, widths, strict=True))
    return wide and all(number <= _MOST_SUMS for number in sums)
