"""From expert ids to rows sorted by expert.

Letters: T tokens, K slots a token, S = T*K (token, slot) pairs, E experts, A alignment, R padded rows.
Pair s is slot ``s % K`` of token ``s // K``. An id outside 0..E-1 is a sentinel: nobody's row, sorted behind
every expert.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from routed_experts import _core
from routed_experts.errors import DtypeError, LayoutError
from routed_experts.layout_device import _layout_torch, first_out_of_range_torch, layout_sizes

# Codes of the macro `with_id_type!` in rust/bindings/src/layout.rs.
ID_CODES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.uint16: 5,
    torch.uint32: 6,
    torch.uint64: 7,
}
INT32_LIMIT = 2**31


class ExpertLayout(NamedTuple):
    """Where each (token, slot) pair goes when rows are sorted by expert; every tensor is int32.

    The padded fields are None at alignment 1. They place the same rows, in the same order, so that every
    expert starts at a multiple of A: sorted row ``r`` of expert ``e`` is padded row
    ``starts[e] + r - (offsets[e] - counts[e])``. Sentinels have no padded row.

    Attributes:
        order: (S,) sorted row -> pair; stable, sentinels last in pair order.
        inverse: (S,) pair -> sorted row; ``inverse[order[r]] == r``.
        counts: (E,) pairs of each expert.
        offsets: (E,) exclusive end of each expert's sorted rows.
        rows: () number of rows that are not sentinels, ``offsets[-1]``; a tensor: reading it may wait.
        starts: (E+1,) first padded row of each expert, a multiple of A; the last ends the rows in use.
        row_expert: (R,) expert of each padded row, -1 on padding and behind the end;
            R = S + min(S, E) * (A - 1), whatever the ids.
        block_expert: (R // A,) expert of each block of A padded rows, -1 behind the end.
    """

    order: Tensor
    inverse: Tensor
    counts: Tensor
    offsets: Tensor
    rows: Tensor
    starts: Tensor | None = None
    row_expert: Tensor | None = None
    block_expert: Tensor | None = None


def build_layout(top_k_index: Tensor, num_experts: int, *, alignment: int = 1) -> ExpertLayout:
    """Sort the pairs of a routing by expert.

    On CPU this is a counting sort in Rust, on CUDA one of Triton; where neither runs, torch ops give the same
    bits. Nothing waits for the device. The ids are only read. Under ``torch.compile`` it is one opaque op.

    Args:
        top_k_index: (T, K) expert ids of any integer dtype and any strides; T and K may be 0.
        num_experts: E, at least 1.
        alignment: A, at least 1; above 1 the padded fields are filled too.

    Returns:
        An :class:`ExpertLayout` on the device of the ids.

    Raises:
        DtypeError: ids that are not integers (bool included), or an E or A that is not.
        LayoutError: ids that are not (T, K), E or A below 1, or more than 2**31 - 1 pairs or padded rows.
    """
    if torch.compiler.is_compiling():
        return _from_parts(torch.ops.routed_experts.build_layout(top_k_index, num_experts, alignment))
    code = _check(top_k_index, num_experts, alignment)
    if type(top_k_index) is not Tensor or not top_k_index.is_cpu:
        return _from_parts(_layout_elsewhere(top_k_index, num_experts, alignment))
    pairs = top_k_index.numel()
    if alignment == 1:
        sizes = [pairs, pairs, num_experts, num_experts]
        length = 2 * (pairs + num_experts)
    else:
        sizes = layout_sizes(pairs, num_experts, alignment)
        length = sum(sizes)
    ids = top_k_index.contiguous()
    # One allocation for all parts: at T=1 allocating is most of the time.
    buffer = ids.new_empty(length, dtype=torch.int32)
    _core.layout_build(
        ids.data_ptr(),
        code,
        pairs,
        num_experts,
        alignment,
        torch.get_num_threads(),
        buffer.data_ptr(),
        length,
    )
    return _from_parts(torch.unsafe_split_with_sizes(buffer, sizes))


def first_out_of_range(top_k_index: Tensor, num_experts: int) -> tuple[int, int, int] | None:
    """Return (token, slot, value) of the first id outside 0..E-1 in pair order, or None.

    Waits for the device, so it is for checked mode only. Takes and refuses what :func:`build_layout` does.
    """
    code = _check(top_k_index, num_experts, 1)
    if type(top_k_index) is Tensor and top_k_index.is_cpu:
        ids = top_k_index.contiguous()
        position = _core.layout_first_out_of_range(ids.data_ptr(), code, ids.numel(), num_experts)
    else:
        position = first_out_of_range_torch(top_k_index, num_experts)
    if position is None:
        return None
    token, slot = divmod(position, top_k_index.shape[1])
    return token, slot, int(top_k_index[token, slot].item())


def _layout_elsewhere(top_k_index: Tensor, num_experts: int, alignment: int) -> list[Tensor]:
    # Fake tensors and other subclasses must see torch ops.
    if type(top_k_index) is Tensor and top_k_index.is_cuda:
        kernels = _kernels()
        if kernels is not None and kernels.takes(top_k_index.numel(), num_experts, alignment):
            return kernels.device_layout(top_k_index, num_experts, alignment)
    return _layout_torch(top_k_index, num_experts, alignment)


@functools.cache
def _kernels() -> Any:
    """The module of our Triton kernels, or None where Triton cannot run; asked once, at the first CUDA ids."""
    try:
        from routed_experts.kernels import layout
    except ImportError:
        return None
    return layout if layout.usable() else None


def _from_parts(parts: list[Tensor] | tuple[Tensor, ...]) -> ExpertLayout:
    order, inverse, counts, offsets, *padded = parts
    return ExpertLayout(order, inverse, counts, offsets, offsets[-1], *padded)


def _check(top_k_index: Tensor, num_experts: int, alignment: int) -> int:
    """Return the code of the ids' dtype; raise unless a layout can be made, before anything is allocated."""
    code = ID_CODES.get(top_k_index.dtype) if isinstance(top_k_index, Tensor) else None
    if code is None:
        raise _dtype_error(top_k_index)
    if top_k_index.dim() != 2:
        raise LayoutError(
            "expert ids must have one row a token",
            found=f"shape {tuple(top_k_index.shape)}",
            needed="shape (T, K)",
            hint="give flat ids a shape: top_k_index.view(num_tokens, num_top_k)",
        )
    if not (isinstance(num_experts, int) and isinstance(alignment, int)):
        raise DtypeError(
            "sizes of a layout are whole numbers",
            found=f"num_experts={num_experts!r}, alignment={alignment!r}",
            needed="int",
            hint="pass the E of this module, and alignment=1 for rows without padding",
        )
    if not 0 < num_experts < INT32_LIMIT or not 0 < alignment < INT32_LIMIT:
        raise LayoutError(
            "a layout needs at least one expert and an alignment of at least 1",
            found=f"num_experts={num_experts}, alignment={alignment}",
            needed="both from 1 to 2**31 - 1",
            hint="pass the E of this module, and alignment=1 for rows without padding",
        )
    rows = top_k_index.numel()
    if alignment > 1:
        rows += min(rows, num_experts) * (alignment - 1)
    if rows >= INT32_LIMIT:
        raise LayoutError(
            "rows of a layout are numbered in int32",
            found=f"up to {rows} rows for ids of shape {tuple(top_k_index.shape)} at alignment {alignment}",
            needed="less than 2**31",
            hint="split the tokens over several calls, or use a smaller alignment",
        )
    return code


def _dtype_error(top_k_index: object) -> DtypeError:
    found = str(top_k_index.dtype) if isinstance(top_k_index, Tensor) else type(top_k_index).__name__
    return DtypeError(
        "expert ids must be integers",
        found=found,
        needed="a tensor of int64, or of any other integer dtype",
        hint="pass the indices of topk, neither a mask nor scores",
    )


@torch.library.custom_op("routed_experts::build_layout", mutates_args=())
def _layout_op(top_k_index: Tensor, num_experts: int, alignment: int) -> list[Tensor]:
    layout = build_layout(top_k_index, num_experts, alignment=alignment)
    # An op may not return tensors that share memory.
    return [part.clone() for part in layout if part is not None and part is not layout.rows]


@_layout_op.register_fake
def _(top_k_index: Tensor, num_experts: int, alignment: int) -> list[Tensor]:
    sizes = layout_sizes(top_k_index.numel(), num_experts, alignment)
    return [top_k_index.new_empty(size, dtype=torch.int32) for size in sizes]
