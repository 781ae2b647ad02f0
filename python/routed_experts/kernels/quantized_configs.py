"""Block sizes of the kernels for quantized experts; see kernels/configs.py.

Weights are one byte or half of one, so that a step of the same bytes is deeper.
"""

from __future__ import annotations

from collections.abc import Iterator

from routed_experts.kernels.configs import Config, Regime, Table, smaller_ones

# Elements of a row that share a scale where rows are quantized.
ROW_GROUP = 128
# A product of E4M3 numbers is at least so deep, and one of packed codes has two of half the depth.
LEAST_DEPTH = 32
_ALL = float("inf")
_FEWEST_TOKENS = 2

_HOPPER_E4M3 = Table(
    (Config(16, 32, 128, 4, 4, True), Config(16, 64, 128, 4, 4, True)),
    (
        Regime(4, Config(16, 64, 128, 4, 3, True), Config(16, 128, 128, 4, 3, True)),
        Regime(16, Config(32, 64, 128, 4, 3, True), Config(32, 128, 128, 4, 3, True)),
        Regime(_ALL, Config(64, 64, 128, 4, 3), Config(64, 128, 128, 4, 3)),
    ),
    few=(Config(16, 32, 128, 4, 4, True), Config(16, 128, 128, 4, 3, True)),
)
# Where columns are not the tensor cores' rows, numbers become bfloat16: many rows have that paid by few columns.
_HOPPER_E2M1 = Table(
    (Config(16, 32, 128, 4, 4, True), Config(16, 64, 128, 4, 4, True)),
    (
        Regime(8, Config(16, 64, 128, 4, 4, True), Config(16, 128, 128, 4, 4, True)),
        Regime(32, Config(32, 64, 128, 4, 4, True), Config(32, 128, 128, 4, 4, True)),
        Regime(64, Config(64, 64, 128, 4, 4, True), Config(64, 128, 128, 4, 4, True)),
        Regime(128, Config(64, 64, 128, 4, 3), Config(64, 128, 128, 4, 3)),
        Regime(_ALL, Config(128, 128, 128, 8, 3), Config(128, 128, 64, 8, 5)),
    ),
    few=(Config(16, 32, 128, 4, 4, True), Config(16, 128, 128, 4, 4, True)),
)
# Of records, kernels/packed.py, whose steps are of 128.
_HOPPER_RECORDS = Table(
    (Config(16, 64, 128, 4, 4, True), Config(16, 64, 128, 4, 6, True)),
    (
        Regime(8, Config(16, 32, 128, 4, 6, True), Config(16, 128, 128, 4, 4, True)),
        Regime(32, Config(32, 64, 128, 4, 4, True), Config(32, 128, 128, 4, 5, True)),
        Regime(256, Config(64, 64, 128, 4, 4, True), Config(64, 128, 128, 4, 4, True)),
        Regime(_ALL, Config(128, 64, 128, 8, 4, True), Config(128, 128, 128, 8, 3, True)),
    ),
    few=(Config(16, 32, 128, 4, 6, True), Config(16, 128, 128, 4, 4, True)),
)
_HOPPER_ROWS = Table(
    (Config(64, 64, 128, 4, 3), Config(64, 128, 128, 4, 3)),
    (
        Regime(64, Config(64, 64, 128, 4, 4), Config(64, 128, 64, 4, 5)),
        Regime(128, Config(64, 64, 128, 4, 3), Config(64, 128, 64, 4, 5)),
        Regime(_ALL, Config(64, 64, 128, 4, 3), Config(64, 128, 128, 4, 4)),
    ),
)
# For tensor cores that take their operands from registers.
_DEFAULT = Table(
    (Config(16, 32, 128, 4, 3), Config(16, 64, 128, 4, 3)),
    (
        Regime(4, Config(16, 32, 128, 4, 3), Config(16, 64, 128, 4, 3)),
        Regime(16, Config(32, 32, 64, 4, 3), Config(32, 64, 64, 4, 3)),
        Regime(_ALL, Config(64, 64, 64, 4, 3), Config(64, 128, 64, 4, 3)),
    ),
)
_DEFAULT_ROWS = Table(
    (Config(64, 64, 64, 4, 3), Config(64, 128, 64, 4, 3)),
    (Regime(_ALL, Config(64, 64, 64, 4, 3), Config(64, 128, 64, 4, 3)),),
)
_HOPPER_TABLES = (_HOPPER_E4M3, _HOPPER_E2M1, _HOPPER_ROWS, _HOPPER_RECORDS)
TABLES = {9: _HOPPER_TABLES, 10: _HOPPER_TABLES}


def table(capability: tuple[int, int], *, is_fp4: bool, quantizes: bool, records: bool) -> Table:
    """The table of an architecture, for E4M3 or E2M1 weights, or for E4M3 rows too, before (E4M3) or in records."""
    defaults = (_DEFAULT, _DEFAULT, _DEFAULT_ROWS, _DEFAULT)
    e4m3, e2m1, rows, recorded = TABLES.get(capability[0], defaults)
    if is_fp4:
        return recorded if records else e2m1
    return rows if quantizes else e4m3


def registers(config: Config) -> int | None:
    """Most registers of a thread of a product of records: the compiler takes more than the best occupancy leaves."""
    if config.warps == 4:
        return 168
    return 128 if config.columns <= 64 else None


def products(table: Table, mean_rows: float, most_rows: int) -> tuple[Config, Config]:
    """Configurations of both products: by mean rows an expert, or for 0 those of few pairs."""
    if mean_rows:
        regime = next(regime for regime in table.regimes if mean_rows <= regime.mean_rows)
        return regime.up, regime.down
    up, down = table.few if table.few and most_rows > _FEWEST_TOKENS else table.unsorted
    rows = max(up.rows, min(64, 1 << (most_rows - 1).bit_length()))
    return up._replace(rows=rows), down._replace(rows=rows)


def fit(config: Config, widths: int, row_bytes: int, is_fp4: bool, shared_limit: int) -> Config:
    """The configuration made small enough for the device.

    Args:
        config: what the table says.
        widths: columns of the weights' tile per column of the result, 2 for a gated unit.
        row_bytes: of an element of a row.
        is_fp4: whether a byte has two weights.
        shared_limit: bytes of shared memory a block may have.
    """
    return next(smaller for smaller in smaller(config) if _shared(smaller, widths, row_bytes, is_fp4) <= shared_limit)


def smaller(config: Config) -> Iterator[Config]:
    """The configuration and ever smaller ones that are deep enough."""
    return (one for one in smaller_ones(config) if one.depth >= LEAST_DEPTH)


def _shared(config: Config, widths: int, row_bytes: int, is_fp4: bool) -> int:
    """Bytes of the pipeline's tiles beside one of unfolded weights."""
    columns = widths * config.columns
    stage = config.rows * config.depth * row_bytes + columns * config.depth // (1 + is_fp4)
    unfolded = columns * config.depth * row_bytes
    return max(config.stages * stage + unfolded, config.rows * columns * 4)
