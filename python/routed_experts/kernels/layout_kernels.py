"""The kernels of :mod:`routed_experts.kernels.layout`: a stable counting sort, and lists of row blocks.

Letters: S pairs, E experts, EP a power of two of at least E and 32, U rows a unit (an aligned block, or a tile).
A bucket is an expert, or E for a sentinel. No program waits for another of its launch and nothing adds
atomically to memory, so bits depend on the ids alone. Loops run to bounds known at run time: one compilation
serves every S.

Memory that the programs of a launch share is read only. So in the single launch for small S every program that
needs the counts of all experts counts all ids itself.
"""

# Triton reads the annotations of a kernel's arguments as types of its own.
from __future__ import annotations

import triton
import triton.language as tl

# Row tiles that go through the column blocks of a product together; see kernels/rows.py.
GROUP = tl.constexpr(8)


@triton.jit
def _load_ids(ids, pair, pairs, slots, stride_t, stride_k):
    """Ids of pairs as they are stored; anything behind the last pair."""
    token = pair // slots
    slot = pair - token * slots
    place = token.to(tl.int64) * stride_t + slot.to(tl.int64) * stride_k
    return tl.load(ids + place, mask=pair < pairs, other=0)


@triton.jit
def _bucket(value, pair, pairs, E: tl.constexpr):
    """Bucket of each id; E behind the last pair."""
    # A uint64 that wraps becomes negative: a sentinel either way. Narrower unsigned ids keep their value.
    wide = value.to(tl.int64)
    return tl.where((wide >= 0) & (wide < E) & (pair < pairs), wide, E).to(tl.int32)


@triton.jit
def _histogram(bucket, E: tl.constexpr, EP: tl.constexpr, SIZE: tl.constexpr):
    """Counts (EP,) of SIZE buckets, those of bucket E left out."""
    real = bucket < E
    counts = tl.histogram(tl.where(real, bucket, 0), EP)
    others = SIZE - tl.sum(real.to(tl.int32), 0)
    return counts - tl.where(tl.arange(0, EP) == 0, others, 0)


@triton.jit
def _count_all(ids, pairs, slots, stride_t, stride_k, E: tl.constexpr, EP: tl.constexpr, KEYS: tl.constexpr):
    """Counts (EP,) of every expert over all pairs."""
    lane = tl.arange(0, KEYS)
    counts = tl.zeros((EP,), tl.int32)
    value = _load_ids(ids, lane, pairs, slots, stride_t, stride_k)
    for start in range(0, pairs, KEYS):
        # Asked for one round early, or every round would wait for memory.
        following = _load_ids(ids, start + KEYS + lane, pairs, slots, stride_t, stride_k)
        counts += _histogram(_bucket(value, start + lane, pairs, E), E, EP, KEYS)
        value = following
    return counts


@triton.jit
def _store_rank(out, pair, rank, pairs, TILES: tl.constexpr):
    """Order at the front of the output; inverse behind it, which tiles go without."""
    tl.store(out + rank, pair, mask=pair < pairs)
    if not TILES:
        tl.store(out + pairs.to(tl.int64) + pair, rank, mask=pair < pairs)


@triton.jit
def _own_units(counts, own, E: tl.constexpr, EP: tl.constexpr, U: tl.constexpr, TILES: tl.constexpr):
    """Count, first sorted row, number of units and first unit of the experts ``own``, and the units of all."""
    expert = tl.arange(0, EP)[None, :]
    mine = own[:, None]
    all_counts = counts[None, :]
    all_units = (all_counts + (U - 1)) // U
    count = tl.sum(tl.where(expert == mine, all_counts, 0), 1)
    row = tl.sum(tl.where(expert < mine, all_counts, 0), 1)
    before = expert < mine
    if TILES:
        before = (all_counts > count[:, None]) | ((all_counts == count[:, None]) & before)
    unit = tl.sum(tl.where(before, all_units, 0), 1)
    return count, row, (count + (U - 1)) // U, unit, tl.sum((counts + (U - 1)) // U, 0)


@triton.jit
def _spread(tile, used):
    """Where a tile stands: groups of GROUP from the first and from the second half of the list take turns.

    Tiles of large experts share their weights and wait for the tensor cores, those of small ones for memory; side by
    side they wait for both at once. What is left of the last group stays behind.
    """
    groups = used // GROUP
    half = (groups + 1) // 2
    group = tile // GROUP
    turn = tl.where(group < half, 2 * group, 2 * (group - half) + 1)
    return tl.where(group < groups, turn * GROUP + tile % GROUP, tile)


@triton.jit
def _write_tiles(
    out, counts, program, pairs, E: tl.constexpr, EP: tl.constexpr, U: tl.constexpr,
    PROGRAMS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Expert, first sorted row and rows of the tiles of this program's experts, and its share of unused tiles."""
    own = program * OWN + tl.arange(0, OWN)
    count, row, units, unit, used = _own_units(counts, own, E, EP, U, True)
    tiles = (pairs + tl.minimum(pairs, E) * (U - 1)) // U
    experts = out + pairs.to(tl.int64)
    firsts = experts + tiles
    rows = firsts + tiles
    lane = tl.arange(0, WIDTH)
    for start in range(0, tl.max(units, 0), WIDTH):
        index = (start + lane)[None, :]
        mask = index < units[:, None]
        place = _spread(unit[:, None] + index, used)
        done = index * U
        tl.store(experts + place, own[:, None] + index * 0, mask=mask)
        tl.store(firsts + place, row[:, None] + done, mask=mask)
        tl.store(rows + place, tl.minimum(count[:, None] - done, U), mask=mask)
    for start in range(used + program * WIDTH, tiles, PROGRAMS * WIDTH):
        place = start + lane
        zero = tl.zeros((WIDTH,), tl.int32)
        tl.store(experts + place, zero - 1, mask=place < tiles)
        tl.store(firsts + place, zero, mask=place < tiles)
        tl.store(rows + place, zero, mask=place < tiles)


@triton.jit
def _write_padded(
    starts, counts, program, pairs, E: tl.constexpr, EP: tl.constexpr, U: tl.constexpr,
    PROGRAMS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Starts, and the labels of rows and blocks of this program's experts, and its share of those behind the end."""
    if program == 0:
        expert = tl.arange(0, EP)
        ends = tl.cumsum((counts + (U - 1)) // U, 0) * U
        tl.store(starts, 0)
        tl.store(starts + 1 + expert, ends, mask=expert < E)
    own = program * OWN + tl.arange(0, OWN)
    count, _row, units, unit, used = _own_units(counts, own, E, EP, U, False)
    rows = pairs + tl.minimum(pairs, E) * (U - 1)
    blocks = rows // U
    row_expert = starts + (E + 1)
    block_expert = row_expert + rows
    lane = tl.arange(0, WIDTH)
    for start in range(0, tl.max(units, 0), WIDTH):
        index = (start + lane)[None, :]
        tl.store(block_expert + unit[:, None] + index, own[:, None] + index * 0, mask=index < units[:, None])
    for start in range(0, tl.max(units, 0) * U, WIDTH):
        index = (start + lane)[None, :]
        label = tl.where(index < count[:, None], own[:, None], -1)
        tl.store(row_expert + (unit * U)[:, None] + index, label, mask=index < (units * U)[:, None])
    nobody = tl.zeros((WIDTH,), tl.int32) - 1
    for start in range(used + program * WIDTH, blocks, PROGRAMS * WIDTH):
        tl.store(block_expert + start + lane, nobody, mask=start + lane < blocks)
    for start in range(used * U + program * WIDTH, rows, PROGRAMS * WIDTH):
        tl.store(row_expert + start + lane, nobody, mask=start + lane < rows)


@triton.jit
def _write_experts(
    out, counts, program, pairs, E: tl.constexpr, EP: tl.constexpr, U: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Everything an output says of experts, from the counts of all."""
    if TILES:
        _write_tiles(out, counts, program, pairs, E, EP, U, PROGRAMS, OWN, WIDTH)
    else:
        expert = tl.arange(0, EP)
        totals = out + 2 * pairs.to(tl.int64)
        if program == 0:
            tl.store(totals + expert, counts, mask=expert < E)
            tl.store(totals + E + expert, tl.cumsum(counts, 0), mask=expert < E)
        if U > 1:
            _write_padded(totals + 2 * E, counts, program, pairs, E, EP, U, PROGRAMS, OWN, WIDTH)


_SIZES = ("pairs", "slots", "stride_t", "stride_k")


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=("ids", "out"))
def sort_small(
    ids, out, pairs, slots, stride_t, stride_k,
    E: tl.constexpr, EP: tl.constexpr, U: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """All of an output for S up to 2**SHIFT; PROGRAMS programs for the experts, then one for QUERIES pairs each.

    The key ``bucket << SHIFT | pair`` differs for any two pairs, so a pair's sorted row is the number of smaller
    keys. Lanes behind the last pair have the largest keys.
    """
    program = tl.program_id(0)
    if program < PROGRAMS:
        counts = _count_all(ids, pairs, slots, stride_t, stride_k, E, EP, KEYS)
        _write_experts(out, counts, program, pairs, E, EP, U, TILES, PROGRAMS, OWN, WIDTH)
    else:
        pair = (program - PROGRAMS) * QUERIES + tl.arange(0, QUERIES)
        value = _load_ids(ids, pair, pairs, slots, stride_t, stride_k)
        mine = (_bucket(value, pair, pairs, E) << SHIFT) | pair
        lane = tl.arange(0, KEYS)
        rank = tl.zeros((QUERIES,), tl.int32)
        value = _load_ids(ids, lane, pairs, slots, stride_t, stride_k)
        for start in range(0, pairs, KEYS):
            following = _load_ids(ids, start + KEYS + lane, pairs, slots, stride_t, stride_k)
            key = (_bucket(value, start + lane, pairs, E) << SHIFT) | (start + lane)
            rank += tl.sum((key[None, :] < mine[:, None]).to(tl.int32), 1)
            value = following
        _store_rank(out, pair, rank, pairs, TILES)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=("ids", "scratch"))
def count_chunks(
    ids, scratch, pairs, slots, stride_t, stride_k,
    E: tl.constexpr, EP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """First of three launches for any S, a program for each CHUNK pairs.

    Row c of the table (chunks, E+1) at the front of scratch: pairs of chunk c whose bucket is at most e. Lanes
    behind the last pair count for bucket E, of whose size nothing is said.
    """
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    value = _load_ids(ids, pair, pairs, slots, stride_t, stride_k)
    counts = _histogram(_bucket(value, pair, pairs, E), E, EP, CHUNK)
    expert = tl.arange(0, EP)
    row = scratch + chunk.to(tl.int64) * (E + 1)
    tl.store(row + expert, tl.cumsum(counts, 0), mask=expert < E)
    tl.store(row + E, CHUNK)


@triton.jit(do_not_specialize=("chunks",), do_not_specialize_on_alignment=("scratch",))
def sum_chunks(scratch, chunks, E: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Second launch, a program for COLUMNS buckets.

    Behind the table: a second one, (chunks, E+1), of the pairs of bucket e in the chunks before c; and behind that
    the first sorted row (E+1) of each bucket.
    """
    bucket = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    size = chunks.to(tl.int64) * (E + 1)
    before = tl.zeros((COLUMNS,), tl.int32)
    at_most = tl.zeros((COLUMNS,), tl.int32)
    for start in range(0, chunks, ROWS):
        chunk = start + tl.arange(0, ROWS)
        place = chunk.to(tl.int64)[:, None] * (E + 1) + bucket[None, :]
        mask = (chunk < chunks)[:, None] & (bucket <= E)[None, :]
        up_to = tl.load(scratch + place, mask=mask, other=0)
        below = tl.load(scratch + place - 1, mask=mask & (bucket > 0)[None, :], other=0)
        count = up_to - below
        tl.store(scratch + size + place, before[None, :] + tl.cumsum(count, 0) - count, mask=mask)
        before += tl.sum(count, 0)
        at_most += tl.sum(up_to, 0)
    tl.store(scratch + 2 * size + bucket, at_most - before, mask=bucket <= E)


@triton.jit(do_not_specialize=(*_SIZES, "chunks"), do_not_specialize_on_alignment=("ids", "out", "scratch"))
def place_chunks(
    ids, out, scratch, pairs, slots, stride_t, stride_k, chunks,
    E: tl.constexpr, EP: tl.constexpr, U: tl.constexpr, TILES: tl.constexpr,
    PROGRAMS: tl.constexpr, OWN: tl.constexpr, WIDTH: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Third launch: PROGRAMS programs for the experts, then one for QUERIES pairs each."""
    program = tl.program_id(0)
    size = chunks.to(tl.int64) * (E + 1)
    begins = scratch + 2 * size
    if program < PROGRAMS:
        expert = tl.arange(0, EP)
        begin = tl.load(begins + expert, mask=expert < E, other=0)
        counts = tl.load(begins + 1 + expert, mask=expert < E, other=0) - begin
        _write_experts(out, counts, program, pairs, E, EP, U, TILES, PROGRAMS, OWN, WIDTH)
    else:
        first = (program - PROGRAMS) * QUERIES
        pair = first + tl.arange(0, QUERIES)
        bucket = _bucket(_load_ids(ids, pair, pairs, slots, stride_t, stride_k), pair, pairs, E)
        chunk = first // CHUNK
        rank = tl.load(begins + bucket) + tl.load(scratch + size + chunk.to(tl.int64) * (E + 1) + bucket)
        for start in range(chunk * CHUNK, first + QUERIES, KEYS):
            other = start + tl.arange(0, KEYS)
            key = _bucket(_load_ids(ids, other, pairs, slots, stride_t, stride_k), other, pairs, E)
            same = (key[None, :] == bucket[:, None]) & (other[None, :] < pair[:, None])
            rank += tl.sum(same.to(tl.int32), 1)
        _store_rank(out, pair, rank, pairs, TILES)
