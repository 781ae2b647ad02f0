"""Block sizes of the kernels: one table an architecture, chosen by rows an expert, clamped to the device.

Measured on an H200; docs/performance.md says what the alternatives cost. Architectures without a table of their
own take the default, which needs nothing beyond SM80.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from routed_experts.tiles import Config

# Up to this many pairs a program finds its rows by itself; above, sorting first is the cheaper.
MOST_PAIRS_UNSORTED = 64
# Programs that keep the memory of the largest devices busy.
_PROGRAMS = 256


class Regime(NamedTuple):
    """Configurations up to a mean number of rows an expert."""

    mean_rows: float
    up: Config
    down: Config


class Table(NamedTuple):
    """Configurations of one architecture."""

    unsorted: tuple[Config, Config]  # first and second product
    regimes: tuple[Regime, ...]
    few: tuple[Config, Config] | None = None  # unsorted, of more tokens than one or two: programs enough for wide ones


_HOPPER = Table(
    (Config(16, 32, 128, 4, 3, True), Config(16, 64, 128, 4, 4, True)),
    (
        Regime(4, Config(16, 64, 128, 4, 3, True), Config(16, 64, 128, 4, 4, True)),
        Regime(10, Config(32, 64, 64, 4, 4, True), Config(32, 128, 64, 4, 4, True)),
        Regime(64, Config(64, 64, 64, 4, 3), Config(64, 128, 64, 4, 3)),
        Regime(float("inf"), Config(128, 128, 64, 8, 4), Config(128, 256, 64, 8, 4)),
    ),
)
# For tensor cores that take their operands from registers: smaller tiles, whose numbers fit there.
_DEFAULT = Table(
    (Config(16, 32, 64, 4, 4), Config(16, 64, 64, 4, 4)),
    (
        Regime(4, Config(16, 32, 64, 4, 4), Config(16, 64, 64, 4, 4)),
        Regime(10, Config(32, 32, 64, 4, 3), Config(32, 64, 64, 4, 3)),
        Regime(64, Config(64, 64, 32, 4, 3), Config(64, 128, 32, 4, 3)),
        Regime(float("inf"), Config(128, 64, 32, 8, 3), Config(128, 128, 32, 8, 3)),
    ),
)
# By major compute capability.
TABLES = {9: _HOPPER, 10: _HOPPER}
# Weight gradients: rows and columns of an expert's matrix, and how many rows of the batch a step sums.
_HOPPER_SUMS, _DEFAULT_SUMS = Config(128, 256, 64, 8, 3), Config(128, 64, 32, 8, 4)
SUMS = {9: _HOPPER_SUMS, 10: _HOPPER_SUMS}


def sorted_configs(capability: tuple[int, int], num_pairs: int, num_experts: int) -> tuple[Config, Config]:
    """Configurations of the two products for rows sorted by expert; both have the same rows."""
    mean = num_pairs / num_experts
    table = TABLES.get(capability[0], _DEFAULT)
    regime = next(regime for regime in table.regimes if mean <= regime.mean_rows)
    return regime.up, regime.down


def unsorted_configs(capability: tuple[int, int], most_rows: int) -> tuple[Config, Config]:
    """Configurations for few pairs; ``most_rows`` is the most that one expert gets unless a token repeats it."""
    up, down = TABLES.get(capability[0], _DEFAULT).unsorted
    rows = max(up.rows, min(64, 1 << (most_rows - 1).bit_length()))
    return up._replace(rows=rows), down._replace(rows=rows)


def sums_config(capability: tuple[int, int], item_size: int, shared_limit: int) -> Config:
    """Configuration of a weight gradient, made small enough for the device."""
    return fit(SUMS.get(capability[0], _DEFAULT_SUMS), 1, item_size, shared_limit)


def split_of(config: Config, num_pairs: int, depth: int, columns: int) -> int:
    """Into how many parts the depth is cut, so that few pairs still make a program for every multiprocessor.

    A part keeps at least four steps: below, starting a program costs more than what it shares.
    """
    programs = num_pairs * -(-columns // config.columns)
    wanted = max(1, _PROGRAMS // programs)
    most = max(1, depth // (4 * config.depth))
    return min(4, 1 << (min(wanted, most).bit_length() - 1))


def fit(config: Config, widths: int, item_size: int, shared_limit: int) -> Config:
    """Return the configuration made small enough for the device: stages first, then depth, then columns.

    Args:
        config: what the table says.
        widths: columns of the weights' tile per column of the result, 2 for a gated unit.
        item_size: bytes of an element.
        shared_limit: bytes of shared memory a block may have.
    """
    return next(smaller for smaller in smaller_ones(config) if _shared(smaller, widths, item_size) <= shared_limit)


def smaller_ones(config: Config) -> Iterator[Config]:
    """The configuration and ever smaller ones, down to what any device holds."""
    while True:
        yield config
        if config.stages > 2:
            config = config._replace(stages=config.stages - 1)
        elif config.depth > 32:
            config = config._replace(depth=config.depth // 2)
        elif config.columns > 32:
            config = config._replace(columns=config.columns // 2, swap=False)
        elif config.depth > 16:
            config = config._replace(depth=16)
        elif config.stages > 1:
            config = config._replace(stages=1)
        else:
            return


def _shared(config: Config, widths: int, item_size: int) -> int:
    """Bytes of the pipeline's tiles; the result passes through the same memory afterwards."""
    tile = (config.rows + widths * config.columns) * config.depth * item_size
    return max(config.stages * tile, config.rows * widths * config.columns * 4)
