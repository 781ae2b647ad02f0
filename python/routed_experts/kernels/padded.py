"""Rows in a padded layout: gathered from tokens, gated, and summed back; the steps around a grouped product.

Letters: T tokens, K slots, S = T*K pairs, R padded rows, E experts, H hidden and I intermediate size, C columns. With
GROUP above 0 rows leave as e4m3 beside one scale a group of GROUP columns: float32 at ``scales[group * SCALE + row]``,
or with PACKED the exponent of a power of two, a byte each, four groups in an int32 (``SCALE`` counts those). Scales
stand column by column, SCALE apart, as the tensor memory accelerator reads them. Rows of padding are neither read
nor written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.gates import activate, gate_pair
from routed_experts.kernels.product import IS_INTERPRETED
from routed_experts.kernels.rows import load_expert
from routed_experts.kernels.units import load_pair

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def _store_scale(scales, scale_M, row_M, mask_M, group, SCALE, PACKED: tl.constexpr):
    if PACKED:
        place_M = ((group // 4) * SCALE.to(tl.int64) + row_M) * 4 + group % 4
        exponent_M = (scale_M.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8)
        tl.store(scales + place_M, exponent_M, mask=mask_M)
    else:
        tl.store(scales + group * SCALE.to(tl.int64) + row_M, scale_M, mask=mask_M)


@triton.jit
def _store_rows(
    out, scales, value, row_M, mask_M, column_N, group, SCALE,
    C: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
):
    """Store a tile of float32 (M, columns) to rows (R, C), as it is or as e4m3 beside its scales."""
    if GROUP > 0:
        scale_M = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-4) / 448.0
        if PACKED:
            bits_M = scale_M.to(tl.uint32, bitcast=True)
            scale_M = ((bits_M + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        value = tl.minimum(tl.maximum(value / scale_M[:, None], -448.0), 448.0)
        if IS_INTERPRETED:
            # Triton's interpreter loses the carry of a mantissa that rounds up: leave it nothing to round.
            bits = value.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000
            value = bits.to(tl.float32, bitcast=True)
        _store_scale(scales, scale_M, row_M, mask_M, group, SCALE, PACKED)
    place = out + row_M[:, None].to(tl.int64) * C + column_N[None, :]
    tl.store(place, value.to(out.dtype.element_ty), mask=mask_M[:, None] & (column_N < C)[None, :])


@triton.jit
def _fill_rest(scales, row_M, mask_M, SCALE, GROUPS: tl.constexpr, PACKED: tl.constexpr):
    """Exponents of 1 for the groups that fill up the last int32."""
    if PACKED:
        one_M = tl.full(row_M.shape, 1.0, tl.float32)
        for group in tl.static_range(GROUPS, (GROUPS + 3) // 4 * 4):
            _store_scale(scales, one_M, row_M, mask_M, group, SCALE, True)


@triton.jit(do_not_specialize=["x_stride", "num_rows", "scale_stride"], do_not_specialize_on_alignment=["x"])
def gather_rows(
    x, order, row_expert, starts, offsets, counts, out, scales, position, x_stride, num_rows, scale_stride,
    K: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Tokens x (T, H) to padded rows (R, H), and the padded row of every pair that has one."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1)
    expert_M = tl.load(row_expert + row_M, mask=row_M < num_rows, other=-1)
    mask_M = expert_M >= 0
    end_M = tl.load(offsets + expert_M, mask=mask_M, other=0)
    first_M = end_M - tl.load(counts + expert_M, mask=mask_M, other=0)
    sorted_M = first_M + row_M - tl.load(starts + expert_M, mask=mask_M, other=0)
    pair_M = tl.load(order + sorted_M, mask=mask_M, other=0)
    column_N = group * BLOCK_N + tl.arange(0, BLOCK_N)
    place = x + (pair_M // K)[:, None].to(tl.int64) * x_stride + column_N[None, :]
    value = tl.load(place, mask=mask_M[:, None] & (column_N < C)[None, :], other=0.0).to(tl.float32)
    _store_rows(out, scales, value, row_M, mask_M, column_N, group, scale_stride, C, GROUP, PACKED)
    if group == 0:
        tl.store(position + pair_M, row_M, mask=mask_M)
        _fill_rest(scales, row_M, mask_M, scale_stride, GROUPS, PACKED)


@triton.jit(do_not_specialize=["num_rows", "scale_stride"])
def gate_rows(
    u, bias, row_expert, out, scales, num_rows, scale_stride,
    INNER: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr,
    GROUP: tl.constexpr, PACKED: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """First products u (R, 2I), or (R, I) without a gate, plus their bias, to the second product's rows (R, I)."""
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    group = tl.program_id(1)
    expert_M = tl.load(row_expert + row_M, mask=row_M < num_rows, other=-1)
    mask_M = expert_M >= 0
    column_N = group * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATE == "none":
        inside = mask_M[:, None] & (column_N < INNER)[None, :]
        value = tl.load(u + row_M[:, None].to(tl.int64) * INNER + column_N[None, :], mask=inside, other=0.0)
        value = value.to(tl.float32)
        if bias is not None:
            place = bias + expert_M[:, None].to(tl.int64) * INNER + column_N[None, :]
            value += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = activate(value, ACTIVATION)
    else:
        gate, linear = load_pair(u, row_M, mask_M, group, GATE, INNER, BLOCK_M, BLOCK_N)
        if bias is not None:
            more_gate, more_linear = load_pair(bias, expert_M, mask_M, group, GATE, INNER, BLOCK_M, BLOCK_N)
            gate += more_gate
            linear += more_linear
        value = gate_pair(gate, linear, ACTIVATION, LIMIT, ALPHA)
    _store_rows(out, scales, value, row_M, mask_M, column_N, group, scale_stride, INNER, GROUP, PACKED)
    if group == 0:
        _fill_rest(scales, row_M, mask_M, scale_stride, GROUPS, PACKED)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["ids", "weights"])
def weigh_rows(
    rows, position, ids, weights, bias, out, num_tokens,
    E: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, IDS_T: tl.constexpr, IDS_K: tl.constexpr,
    WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Weighted sum over the slots of every token, in slot order, in float32; a sentinel adds exactly 0."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = column_N < HIDDEN
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for slot in range(K):
        pair_T = token_T * K + slot
        expert_T = load_expert(ids, pair_T, K, E, IDS_T, IDS_K, token_T < num_tokens)
        real_T = expert_T >= 0
        mask = real_T[:, None] & inside_N[None, :]
        row_T = tl.load(position + pair_T, mask=real_T, other=0).to(tl.int64)
        value = tl.load(rows + row_T[:, None] * HIDDEN + column_N[None, :], mask=mask, other=0.0).to(tl.float32)
        if bias is not None:
            place = bias + expert_T[:, None].to(tl.int64) * HIDDEN + column_N[None, :]
            value += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        place_T = weights + token_T.to(tl.int64) * WEIGHTS_T + slot * WEIGHTS_K
        total += value * tl.load(place_T, mask=real_T, other=0.0).to(tl.float32)[:, None]
    place = out + token_T[:, None].to(tl.int64) * HIDDEN + column_N[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(token_T < num_tokens)[:, None] & inside_N[None, :])
