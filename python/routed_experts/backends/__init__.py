"""Backends, one file each; the table below is the only list of them."""

from __future__ import annotations

# Each is a module of this package with a BACKEND; imported on first use, in this order.
BUILT_IN = ("eager", "batched_mm", "grouped_mm", "fused", "deepgemm", "deepgemm_megamoe", "sonicmoe")
