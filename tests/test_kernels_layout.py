"""The Triton layout against the Rust one, bit for bit, and tiles against a plain loop.

Without a CUDA device the kernels run in Triton's interpreter, on memory full of garbage with canaries around it.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

import routed_experts.kernels
from routed_experts.layout import ID_CODES, _kernels, build_layout
from routed_experts.layout_device import layout_sizes

pytest.importorskip("triton", reason="the kernels are Triton's")
kernels = pytest.importorskip("routed_experts.kernels.layout")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GARBAGE = 0x5A5A5A5A
CANARIES = 512


@pytest.fixture(autouse=True)
def guarded(monkeypatch):
    """Give uninitialised memory garbage inside, and canaries on both sides that must outlive the test."""
    original, given = torch.Tensor.new_empty, []

    def new_empty(self, size, **kwargs):
        if "dtype" not in kwargs:  # the interpreter's
            return original(self, size, **kwargs)
        whole = original(self, size + 2 * CANARIES, **kwargs).fill_(GARBAGE)
        given.append(whole)
        return whole[CANARIES : CANARIES + size]

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    yield given
    monkeypatch.undo()
    for whole in given:
        assert (whole[:CANARIES] == GARBAGE).all()
        assert (whole[-CANARIES:] == GARBAGE).all()


@pytest.fixture
def three_launches(monkeypatch):
    """The way of large S for small ones, and a second round of sums over chunks from the third chunk on."""
    monkeypatch.setattr(kernels, "SMALL_PAIRS", 0)
    monkeypatch.setattr(kernels, "_block_sizes", lambda pairs: (32, 2))


@pytest.fixture(params=["one launch", "three launches"])
def path(request):
    """Both ways for the same small S."""
    if request.param == "three launches":
        request.getfixturevalue("three_launches")


def random_ids(pairs, experts, slots=1):
    """Ids with sentinels on both sides, (pairs // slots, slots)."""
    generator = torch.Generator().manual_seed(pairs + experts)
    return torch.randint(-2, experts + 2, (pairs // slots, slots), generator=generator)


def check_layout(ids, experts, alignment):
    """Compare every tensor with the one from Rust; ``ids`` are on the CPU, with any strides."""
    layout = build_layout(ids, experts, alignment=alignment)
    wanted = [part for name, part in layout._asdict().items() if part is not None and name != "rows"]
    placed = ids.to(DEVICE)
    assert placed.stride() == ids.stride()
    got = kernels.device_layout(placed, experts, alignment)
    assert [part.numel() for part in got] == layout_sizes(ids.numel(), experts, alignment)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == torch.int32
        assert torch.equal(one.cpu(), other)


def tiles_oracle(layout, block_rows):
    """Cut the rows of each expert, the largest expert first; then groups of both halves of the list take turns."""
    counts, ends = layout.counts.tolist(), layout.offsets.tolist()
    rows = []
    for expert in sorted(range(len(counts)), key=lambda e: (-counts[e], e)):
        for done in range(0, counts[expert], block_rows):
            first = ends[expert] - counts[expert] + done
            rows.append((expert, first, min(block_rows, counts[expert] - done)))
    pairs = len(layout.order)
    tiles = (pairs + min(pairs, len(counts)) * (block_rows - 1)) // block_rows
    groups = [rows[start : start + 8] for start in range(0, len(rows), 8)]
    left = [groups.pop()] if groups and len(groups[-1]) < 8 else []
    half = -(-len(groups) // 2)
    turns = [group for pair in itertools.zip_longest(groups[:half], groups[half:], fillvalue=[]) for group in pair]
    rows = list(itertools.chain.from_iterable(turns + left))
    return rows + [(-1, 0, 0)] * (tiles - len(rows))


def check_tiles(ids, experts, block_rows):
    layout = build_layout(ids, experts)
    tiles = kernels.sorted_tiles(ids.to(DEVICE), experts, block_rows)
    assert {part.dtype for part in tiles} == {torch.int32}
    assert torch.equal(tiles.order.cpu(), layout.order)
    got = list(zip(*(part.tolist() for part in tiles[1:]), strict=True))
    assert got == tiles_oracle(layout, block_rows)


CASES = [
    (0, 3, 16),
    (1, 1, 1),
    (1, 257, 128),
    (7, 60, 128),
    (64, 128, 16),
    (65, 3, 1),
    (513, 257, 16),
    (513, 60, 7),
    (513, 1024, 1),
]


@pytest.mark.parametrize(("pairs", "experts", "alignment"), CASES)
def test_layout_equals_rust(pairs, experts, alignment):
    check_layout(random_ids(pairs, experts), experts, alignment)


@pytest.mark.parametrize(("pairs", "experts", "alignment"), CASES[1:])
def test_three_launches_equal_rust(pairs, experts, alignment, three_launches):
    check_layout(random_ids(pairs, experts), experts, alignment)


@pytest.mark.parametrize(("pairs", "experts", "alignment"), [(4096, 60, 16), (4097, 128, 1), (20000, 60, 128)])
def test_layout_equals_rust_around_the_change_of_path(pairs, experts, alignment):
    assert kernels.SMALL_PAIRS == 4096
    check_layout(random_ids(pairs, experts), experts, alignment)


@pytest.mark.parametrize(
    ("pairs", "experts", "block_rows"),
    [(0, 3, 16), (1, 1, 1), (7, 60, 16), (64, 3, 1), (513, 60, 16), (513, 257, 128), (513, 60, 1), (2048, 8, 16)],
)
def test_order_of_tiles(pairs, experts, block_rows):
    check_tiles(random_ids(pairs, experts), experts, block_rows)


@pytest.mark.parametrize(("pairs", "experts", "block_rows"), [(65, 3, 16), (2100, 128, 16), (4100, 60, 64)])
def test_tiles_from_three_launches(pairs, experts, block_rows, three_launches):
    check_tiles(random_ids(pairs, experts), experts, block_rows)


@pytest.mark.parametrize("dtype", ID_CODES, ids=str)
def test_every_id_dtype_and_its_extremes(dtype, path):
    """No id wraps to a valid one: 65535, 2**31 + 1, 2**32 + 1 and 2**64 - 1 are sentinels, and so is -1."""
    info = torch.iinfo(dtype)
    wanted = [0, 5, 3, 299, info.min, info.max, -1, 300, 255, 65535, 2**31, 2**31 + 1, 2**32 + 1, 2**63 + 1, 5, 0]
    values = [value for value in wanted if info.min <= value <= info.max]
    check_layout(torch.tensor([values * 2, values[::-1] * 2], dtype=dtype), 300, 4)


def test_ids_of_any_strides(path):
    plain = random_ids(360, 6, slots=9)
    views = {"columns": plain[:, 2:5], "transposed": plain.t(), "zero stride": plain[:1].expand(7, 9)}
    views |= {"both zero": plain[3:4, 3:4].expand(40, 9), "unaligned": plain.flatten()[1:356].view(71, 5)}
    for ids in views.values():
        source = plain.to(DEVICE)
        placed = source.as_strided(ids.shape, ids.stride(), ids.storage_offset())
        wanted = build_layout(ids, 6, alignment=16)
        got = kernels.device_layout(placed, 6, 16)
        assert torch.equal(got[0].cpu(), wanted.order)
        assert torch.equal(got[5].cpu(), wanted.row_expert)


@pytest.mark.parametrize("value", [-1, 0, 2, 5, 6])
def test_every_pair_the_same(value, path):
    """One hot expert, first, middle or last; and nothing but sentinels of either side."""
    ids = torch.full((75, 4), value)
    check_layout(ids, 6, 16)
    check_tiles(ids, 6, 16)


def test_no_slots():
    check_layout(torch.empty(5, 0, dtype=torch.int64), 3, 16)
    check_tiles(torch.empty(5, 0, dtype=torch.int64), 3, 16)


def test_launches_depend_on_the_shape_alone():
    for pairs, launches in ((8, 1), (4096, 1), (4097, 3), (1 << 20, 3)):
        ids = torch.zeros(1, 1, dtype=torch.int64).expand(pairs, 1)
        out = torch.empty(0, dtype=torch.int32)
        assert (kernels.scratch_size(pairs, 128) > 0) == (launches == 3)
        for unit, tiles in ((1, False), (128, False), (16, True)):
            pending = list(kernels.launches(ids, out, out, 128, unit, tiles=tiles))
            assert len(pending) == launches
            # One compilation serves every S: nothing that is a constant of a kernel comes from it.
            again = list(kernels.launches(ids[: max(pairs - 1, 1)], out, out, 128, unit, tiles=tiles))
            if len(again) == len(pending):
                assert all(a.constants is b.constants for a, b in zip(pending, again, strict=True))


def test_what_the_kernels_take():
    assert kernels.takes(2**20, 4096, 128)
    assert not kernels.takes(8, 4097, 1)
    assert not kernels.takes(2**31 - 8, 1, 1)
    assert not kernels.takes(2**24, 4096, 2**20)


def test_torch_ops_stand_in_where_triton_cannot_run(monkeypatch):
    assert kernels.usable() == (DEVICE == "cuda")
    _kernels.cache_clear()
    assert _kernels() is (kernels if DEVICE == "cuda" else None)
    monkeypatch.setattr(kernels, "usable", lambda: True)
    _kernels.cache_clear()
    assert _kernels() is kernels
    monkeypatch.delattr(routed_experts.kernels, "layout")
    monkeypatch.setitem(sys.modules, "routed_experts.kernels.layout", None)
    _kernels.cache_clear()
    assert _kernels() is None
    _kernels.cache_clear()


def in_another_process(code, **environment):
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=plain | environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_are_not_imported_before_they_are_needed():
    code = (
        "import sys, torch, routed_experts as rx\n"
        "rx.build_layout(torch.zeros(3, 2, dtype=torch.int64), 4, alignment=16)\n"
        "rx.build_layout(torch.zeros(3, 2, dtype=torch.int64, device='meta'), 4)\n"
        "print([name for name in sys.modules if name.startswith('routed_experts.kernels')])"
    )
    assert in_another_process(code).strip() == "[]"


COMPILE = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from routed_experts.kernels import layout

out = torch.empty(0, dtype=torch.int32)
many = torch.zeros(1, 1, dtype=torch.int64).expand(4097, 1)
cases = [(8, 1, False, "*i64"), (60, 128, False, "*u16"), (128, 16, True, "*i32")]
launches = [(one, ids_type) for experts, unit, tiles, ids_type in cases for ids in (many[:8], many)
            for one in layout.launches(ids, out, out, experts, unit, tiles=tiles)]
for capability in (80, 120):
    for one, ids_type in launches:
        names = one.kernel.arg_names
        types = ["*i32" if isinstance(argument, torch.Tensor) else "i32" for argument in one.arguments]
        types = dict(zip(names, types + ["constexpr"] * (len(names) - len(types)), strict=True))
        if "ids" in types:
            types["ids"] = ids_type
        source = ASTSource(fn=one.kernel, signature=types, constexprs=one.constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": one.num_warps})
        assert made.asm["cubin"]
        # Triton before 3.5 counts wrong when threads hold copies of what a histogram reads.
        reads = [line for line in made.asm["ttgir"].splitlines() if "tt.histogram" in line]
        assert len(reads) == (one.kernel.__name__ in ("sort_small", "count_chunks")), one.kernel.__name__
        assert not any("slice" in line for line in reads), reads
        print(capability, one.kernel.__name__)
"""


def test_every_kernel_compiles_for_devices_that_are_not_here(tmp_path):
    compiled = in_another_process(COMPILE, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    names = {"sort_small", "count_chunks", "sum_chunks", "place_chunks"}
    assert set(compiled) == {f"{capability} {name}" for capability in (80, 120) for name in names}
