"""The tile of one product of a kernel. Kernels work in it, and what is measured of tiles is kept without them."""

from __future__ import annotations

from typing import NamedTuple


class Config(NamedTuple):
    """Tile of one product: rows, columns (of the result), depth of a step; warps and pipeline stages.

    ``swap`` computes the transpose, with the weights in the place where Hopper's tensor cores want 64 rows.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    swap: bool = False
