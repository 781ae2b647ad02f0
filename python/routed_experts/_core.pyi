"""The Rust extension module; private, its users are the Python files named in each group."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

__all__ = [
    "CpuExperts",
    "LaunchPlan",
    "Registry",
    "__version__",
    "dispatch_count",
    "dispatch_plan",
    "find_toolkit",
    "layout_build",
    "layout_first_out_of_range",
]

__version__: str

# layout.py: addresses and lengths of contiguous CPU tensors; dtype is a code of layout.ID_CODES.
def layout_build(
    ids: int,
    dtype: int,
    pairs: int,
    num_experts: int,
    alignment: int,
    threads: int,
    out: int,
    out_len: int,
    /,
) -> None: ...
def layout_first_out_of_range(ids: int, dtype: int, pairs: int, num_experts: int, /) -> int | None: ...

# parallel/plan.py: addresses of contiguous CPU tensors.
def dispatch_count(
    ids: int, dtype: int, tokens: int, slots: int, num_experts: int, ranks: int, chunks: int, out: int, /
) -> int: ...
def dispatch_plan(
    ids: int, dtype: int, tokens: int, slots: int, num_experts: int, ranks: int, out: int, out_len: int, /
) -> None: ...

# Private names of this file: the kinds of a parameter are pointer (the value is a slot), int32, int64, float32 (bits).
_Param: TypeAlias = tuple[str, int]
# (function, grid, threads of a block, shared bytes, dependent, parameters in order)
_Kernel: TypeAlias = tuple[int, tuple[int, int, int], int, int, bool, Sequence[_Param]]

# For the backends that launch compiled kernels themselves.
@final
class LaunchPlan:
    def __new__(cls, kernels: Sequence[_Kernel]) -> LaunchPlan: ...
    def launch(self, stream: int, pointers: tuple[int, ...]) -> None: ...

# (address, dtype code of fused_cpu.CODES or layout.ID_CODES, strides of rows and columns)
_Grid: TypeAlias = tuple[int, int, int, int]
# Addresses of weights, biases and scales; 0 for none.
_Address: TypeAlias = tuple[int, int, int]
# (columns, depth, strides of experts, columns and depth, strides of the bias)
_Weights: TypeAlias = tuple[int, ...]
# (format code, dtype code of the bias, (dtype code, strides, block, alternating) of the scales)
_Format: TypeAlias = tuple[int, int, tuple[Any, ...] | None]
# (activation, has a gate, halves are concatenated, limit, alpha)
_Gate: TypeAlias = tuple[str, bool, bool, float | None, float | None]

# fused_cpu.py: addresses of CPU tensors; strides count numbers.
@final
class CpuExperts:
    def __new__(
        cls, experts: int, weights: tuple[_Weights, ...], formats: tuple[_Format, ...], gate: _Gate
    ) -> CpuExperts: ...
    def run(
        self,
        shape: tuple[int, ...],
        x: _Grid,
        ids: _Grid,
        routing: _Grid,
        weights: tuple[_Address, _Address],
        out: int,
        threads: int,
    ) -> None: ...
    def rows(
        self,
        is_second: bool,
        shape: tuple[int, ...],
        x: _Grid,
        repeats: int,
        ids: _Grid,
        weights: _Address,
        out: int,
        threads: int,
    ) -> None: ...

# toolkit.py
def find_toolkit() -> dict[str, Any]: ...

# selection.py and backends/registry.py: specs are Spec.to_dict(), facts are Facts.to_dict().
@final
class Registry:
    def __new__(cls, specs: Sequence[Mapping[str, Any]]) -> Registry: ...
    def select(
        self,
        facts: Mapping[str, Any],
        problem: Mapping[str, Any],
        backend: str,
        measured: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]: ...
    def check_name(self, backend: str) -> None: ...
    def decisions(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]: ...
