"""The products of very many rows in E4M3 on Hopper, in Gluon: warps that fetch, and two groups of warps that multiply.

Letters as in kernels/experts.py. What a step of 128 sums on the tensor cores must be scaled in float32 before it is
added, and one group of warps would leave the tensor cores idle meanwhile. Here each of two groups has half the rows
of a tile and no barrier joins them: one scales while the other multiplies. A third one, of a single warp, fetches
tiles by TMA as far ahead as there is room for, across the tiles of a program, which takes one after the other.

Rows are sorted, as TMA cannot gather; their scales have an own row for every group of columns, (D / 128, S).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from routed_experts.kernels.gates import gate_pair
from routed_experts.kernels.rows import tile_and_block

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.

# Rows of a group of warps, columns of each of the two products of a step, and the step's depth: that of the scales.
ROWS = gl.constexpr(64)
SIDE = gl.constexpr(128)


@gluon.jit
def _fields(tiles, program, num_pairs, num_tiles, BLOCKS: gl.constexpr, GROUP: gl.constexpr):
    """A program's tile: expert, first sorted row, and how many it has, 0 where there is none; see ``rows_of_tile``."""
    tile, _block = tile_and_block(program, BLOCKS, GROUP)
    fields = tiles + num_pairs
    exists = tile < num_tiles
    expert = gl.load(fields + tile, mask=exists, other=-1)
    first = gl.load(fields + num_tiles + tile, mask=exists, other=0)
    count = gl.load(fields + 2 * num_tiles + tile, mask=exists, other=0)
    return expert, first, count


@gluon.jit
def _fetch(
    rows, weight, tiles, rings, bars, num_pairs, num_tiles, programs,
    BLOCKS: gl.constexpr, GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
    PER_EXPERT: gl.constexpr, STRIDE: gl.constexpr, APART: gl.constexpr,
):
    """Fill the rings, step by step, as soon as both groups have left a slot."""
    row_ring, weight_ring = rings
    ready, empty = bars
    turn = 0
    expert, first, count = _fields(tiles, gl.program_id(0), num_pairs, num_tiles, BLOCKS, GROUP)
    for program in range(gl.program_id(0), programs, gl.num_programs(0)):
        _tile, block = tile_and_block(program, BLOCKS, GROUP)
        following = _fields(tiles, program + gl.num_programs(0), num_pairs, num_tiles, BLOCKS, GROUP)
        if count > 0:
            column = expert * PER_EXPERT + block * STRIDE
            is_full = count > ROWS
            for step in range(STEPS):
                slot = turn % STAGES
                mbarrier.wait(empty.index(slot), (turn // STAGES & 1) ^ 1)
                bar, d = ready.index(slot), step * SIDE
                if is_full:
                    mbarrier.expect(bar, 2 * ROWS * SIDE + 2 * SIDE * SIDE)
                else:
                    mbarrier.expect(bar, ROWS * SIDE + 2 * SIDE * SIDE)
                tma.async_copy_global_to_shared(rows, [first, d], bar, row_ring.index(2 * slot))
                tma.async_copy_global_to_shared(weight, [column, d], bar, weight_ring.index(2 * slot))
                other = row_ring.index(2 * slot + 1)
                tma.async_copy_global_to_shared(rows, [first + ROWS, d], bar, other, pred=is_full)
                tma.async_copy_global_to_shared(weight, [column + APART, d], bar, weight_ring.index(2 * slot + 1))
                turn += 1
        expert, first, count = following


@gluon.jit
def _products(
    rings, bars, turn, row_scale_M, mask_M, num_pairs, scale, other_scale,
    HALF: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, S_D: gl.constexpr,
    MMA: gl.constexpr,
):
    """Both products of a group's rows, (M, N) each; scales are read a step ahead."""
    row_ring, weight_ring = rings
    ready, empty = bars
    acc = gl.zeros((ROWS, SIDE), gl.float32, MMA)
    other_acc = gl.zeros((ROWS, SIDE), gl.float32, MMA)
    part = gl.zeros((ROWS, SIDE), gl.float32, MMA)
    row_scale = gl.load(row_scale_M, mask=mask_M, other=0.0)
    value, other = gl.load(scale), gl.load(other_scale)
    for step in range(STEPS):
        slot = turn % STAGES
        following = gl.minimum(step + 1, STEPS - 1)
        mbarrier.wait(ready.index(slot), turn // STAGES & 1)
        row = row_ring.index(2 * slot + HALF)
        flight = warpgroup_mma(row, weight_ring.index(2 * slot).permute((1, 0)), part, use_acc=False, is_async=True)
        next_row_scale = gl.load(row_scale_M + following * num_pairs.to(gl.int64), mask=mask_M, other=0.0)
        next_value, next_other = gl.load(scale + following * S_D), gl.load(other_scale + following * S_D)
        part = warpgroup_mma_wait(0, (flight,))
        # A wait for nothing, which this sum cannot be moved behind: there both parts would need registers at once.
        acc = warpgroup_mma_wait(0, (acc + part * gl.expand_dims(row_scale * value, 1),))
        flight = warpgroup_mma(row, weight_ring.index(2 * slot + 1).permute((1, 0)), part, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, (flight,))
        mbarrier.arrive(empty.index(slot))
        other_acc += part * gl.expand_dims(row_scale * other, 1)
        row_scale, value, other = next_row_scale, next_value, next_other
        turn += 1
    return acc, other_acc


@gluon.jit
def _pass(bars, turn, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """Leave the slots of a tile to the other group: it has all the rows."""
    ready, empty = bars
    for _ in range(STEPS):
        slot = turn % STAGES
        mbarrier.wait(ready.index(slot), turn // STAGES & 1)
        mbarrier.arrive(empty.index(slot))
        turn += 1


@gluon.jit
def _multiply_up(
    rings, bars, row_scale, tiles, scale, out, out_scale, num_pairs, num_tiles, programs,
    HALF: gl.constexpr, INNER: gl.constexpr, S_E: gl.constexpr, S_N: gl.constexpr, S_D: gl.constexpr,
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):
    """What a group of warps makes of its half of the rows: gated units in E4M3, and their scales."""
    BLOCKS: gl.constexpr = INNER // SIDE
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 32])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    turn = 0
    expert, first, count = _fields(tiles, gl.program_id(0), num_pairs, num_tiles, BLOCKS, GROUP)
    for program in range(gl.program_id(0), programs, gl.num_programs(0)):
        _tile, block = tile_and_block(program, BLOCKS, GROUP)
        following = _fields(tiles, program + gl.num_programs(0), num_pairs, num_tiles, BLOCKS, GROUP)
        if count > HALF * ROWS:
            row_M = first + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
            mask_M = row_M < first + count
            place = scale + expert.to(gl.int64) * S_E + block * S_N
            acc, linear = _products(
                rings, bars, turn, row_scale + row_M, mask_M, num_pairs, place, place + BLOCKS * S_N,
                HALF, STEPS, STAGES, S_D, MMA)
            acc = gate_pair(acc, linear, ACTIVATION, LIMIT, ALPHA)
            # As to_e4m3 does in kernels/decode.py, whose shapes would need a layout of their own.
            largest = gl.max(gl.abs(acc), axis=1)
            largest = gl.where(largest > 0, gl.maximum(largest, 1e-30), 448.0)
            gl.store(out_scale + block * num_pairs.to(gl.int64) + row_M, largest * (1.0 / 448.0), mask=mask_M)
            values = (acc * gl.expand_dims(448.0 / largest, 1)).to(gl.float8e4nv)
            wide_M = first + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
            column_N = block * SIDE + gl.arange(0, SIDE, gl.SliceLayout(0, WIDE))
            to = out + gl.expand_dims(wide_M.to(gl.int64) * INNER, 1) + gl.expand_dims(column_N, 0)
            mask = gl.expand_dims(wide_M < first + count, 1) & gl.expand_dims(column_N < INNER, 0)
            gl.store(to, gl.convert_layout(values, WIDE), mask=mask)
            turn += STEPS
        elif count > 0:
            _pass(bars, turn, STEPS, STAGES)
            turn += STEPS
        expert, first, count = following


@gluon.jit
def _store_half(slots, tile, pair_M, mask_M, column, HIDDEN: gl.constexpr, WIDE: gl.constexpr):
    column_N = column + gl.arange(0, SIDE, gl.SliceLayout(0, WIDE))
    to = slots + gl.expand_dims(pair_M.to(gl.int64) * HIDDEN, 1) + gl.expand_dims(column_N, 0)
    mask = gl.expand_dims(mask_M, 1) & gl.expand_dims(column_N < HIDDEN, 0)
    gl.store(to, gl.convert_layout(tile.to(slots.dtype.element_ty), WIDE), mask=mask)


@gluon.jit
def _multiply_down(
    rings, bars, row_scale, tiles, scale, slots, num_pairs, num_tiles, programs,
    HALF: gl.constexpr, HIDDEN: gl.constexpr, S_E: gl.constexpr, S_N: gl.constexpr, S_D: gl.constexpr,
    GROUP: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):
    """What a group of warps makes of its half of the rows: those of the pairs, in pair order."""
    BLOCKS: gl.constexpr = (HIDDEN + 2 * SIDE - 1) // (2 * SIDE)
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 32])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    turn = 0
    expert, first, count = _fields(tiles, gl.program_id(0), num_pairs, num_tiles, BLOCKS, GROUP)
    for program in range(gl.program_id(0), programs, gl.num_programs(0)):
        _tile, block = tile_and_block(program, BLOCKS, GROUP)
        following = _fields(tiles, program + gl.num_programs(0), num_pairs, num_tiles, BLOCKS, GROUP)
        if count > HALF * ROWS:
            row_M = first + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
            place = scale + expert.to(gl.int64) * S_E
            # Of a block behind the last column nothing is stored, and it has no scale.
            last: gl.constexpr = HIDDEN // SIDE - 1
            acc, other = _products(
                rings, bars, turn, row_scale + row_M, row_M < first + count, num_pairs,
                place + 2 * block * S_N, place + gl.minimum(2 * block + 1, last) * S_N,
                HALF, STEPS, STAGES, S_D, MMA)
            wide_M = first + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
            mask_M = wide_M < first + count
            pair_M = gl.load(tiles + wide_M, mask=mask_M, other=0)
            _store_half(slots, acc, pair_M, mask_M, 2 * block * SIDE, HIDDEN, WIDE)
            _store_half(slots, other, pair_M, mask_M, (2 * block + 1) * SIDE, HIDDEN, WIDE)
            turn += STEPS
        elif count > 0:
            _pass(bars, turn, STEPS, STAGES)
            turn += STEPS
        expert, first, count = following


@gluon.jit
def _rings(rows, weight, STAGES: gl.constexpr):
    """Shared memory of so many steps, and what says that a slot is filled, or left by both groups."""
    row_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, ROWS, SIDE], rows.layout)
    weight_ring = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, SIDE, SIDE], weight.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    return (row_ring, weight_ring), (ready, empty)


@gluon.jit(do_not_specialize=["num_pairs", "num_tiles", "programs"])
def up_hopper(
    rows, row_scale, tiles, weight, scale, out, out_scale, num_pairs, num_tiles, programs,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, S_E: gl.constexpr, S_N: gl.constexpr, S_D: gl.constexpr,
    ACTIVATION: gl.constexpr, LIMIT: gl.constexpr, ALPHA: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, FETCH_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):
    """First product and gate: E4M3 sorted rows (S, H) to (S, I), whose scales are (I / 128, S)."""
    STEPS: gl.constexpr = HIDDEN // SIDE
    BLOCKS: gl.constexpr = INNER // SIDE
    rings, bars = _rings(rows, weight, STAGES)
    gl.warp_specialize([
        (_multiply_up, (rings, bars, row_scale, tiles, scale, out, out_scale, num_pairs, num_tiles, programs,
        0, INNER, S_E, S_N, S_D, ACTIVATION, LIMIT, ALPHA, GROUP, STEPS, STAGES)),
        (_multiply_up, (rings, bars, row_scale, tiles, scale, out, out_scale, num_pairs, num_tiles, programs,
        1, INNER, S_E, S_N, S_D, ACTIVATION, LIMIT, ALPHA, GROUP, STEPS, STAGES)),
        (_fetch, (rows, weight, tiles, rings, bars, num_pairs, num_tiles, programs,
        BLOCKS, GROUP, STEPS, STAGES, 2 * INNER, SIDE, INNER)),
    ], [4, 1], [REGISTERS, FETCH_REGISTERS])


@gluon.jit(do_not_specialize=["num_pairs", "num_tiles", "programs"])
def down_hopper(
    rows, row_scale, tiles, weight, scale, slots, num_pairs, num_tiles, programs,
    HIDDEN: gl.constexpr, INNER: gl.constexpr, S_E: gl.constexpr, S_N: gl.constexpr, S_D: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, FETCH_REGISTERS: gl.constexpr, REGISTERS: gl.constexpr,
):
    """Second product, not yet weighted: E4M3 sorted rows (S, I) to a row of every pair (S, H)."""
    STEPS: gl.constexpr = INNER // SIDE
    BLOCKS: gl.constexpr = (HIDDEN + 2 * SIDE - 1) // (2 * SIDE)
    rings, bars = _rings(rows, weight, STAGES)
    gl.warp_specialize([
        (_multiply_down, (rings, bars, row_scale, tiles, scale, slots, num_pairs, num_tiles, programs,
        0, HIDDEN, S_E, S_N, S_D, GROUP, STEPS, STAGES)),
        (_multiply_down, (rings, bars, row_scale, tiles, scale, slots, num_pairs, num_tiles, programs,
        1, HIDDEN, S_E, S_N, S_D, GROUP, STEPS, STAGES)),
        (_fetch, (rows, weight, tiles, rings, bars, num_pairs, num_tiles, programs,
        BLOCKS, GROUP, STEPS, STAGES, HIDDEN, 2 * SIDE, SIDE)),
    ], [4, 1], [REGISTERS, FETCH_REGISTERS])
