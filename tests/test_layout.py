"""Layouts against a naive sort: every dtype, every stride, sentinels, padding, devices, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from routed_experts import _core
from routed_experts.errors import DtypeError, LayoutError
from routed_experts.layout import ID_CODES, ExpertLayout, build_layout, first_out_of_range
from routed_experts.layout_device import _layout_torch, first_out_of_range_torch

ID_DTYPES = list(ID_CODES)
EXPERTS = [1, 3, 60, 160, 384, 1024]


def oracle(ids: list[int], num_experts: int, alignment: int) -> dict[str, list[int]]:
    """Sort pairs by (expert, pair), sentinels as expert E; lay padded rows down one by one."""
    bucket = [i if 0 <= i < num_experts else num_experts for i in ids]
    order = sorted(range(len(ids)), key=lambda pair: (bucket[pair], pair))
    counts = [bucket.count(e) for e in range(num_experts)]
    offsets = [sum(counts[: e + 1]) for e in range(num_experts)]
    expected = {"order": order, "inverse": [order.index(pair) for pair in range(len(ids))], "counts": counts}
    expected |= {"offsets": offsets, "rows": offsets[-1]}
    if alignment > 1:
        starts, rows = [0], []
        for e, count in enumerate(counts):
            rows += [e] * count
            rows += [-1] * (-len(rows) % alignment)
            starts.append(len(rows))
        rows += [-1] * (len(ids) + min(len(ids), num_experts) * (alignment - 1) - len(rows))
        blocks = [rows[row] for row in range(0, len(rows) // alignment * alignment, alignment)]
        expected |= {"starts": starts, "row_expert": rows, "block_expert": blocks}
    return expected


def values(layout: ExpertLayout) -> dict[str, list[int]]:
    """Read a layout as plain numbers, checking dtypes on the way."""
    parts = {name: part for name, part in layout._asdict().items() if part is not None}
    assert {part.dtype for part in parts.values()} == {torch.int32}
    return {name: part.tolist() for name, part in parts.items()}


def device_layout(ids: torch.Tensor, num_experts: int, alignment: int) -> ExpertLayout:
    """Run the torch ops that other devices run, on a CPU tensor."""
    parts = _layout_torch(ids, num_experts, alignment)
    return ExpertLayout(*parts[:4], parts[3][-1], *parts[4:])


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int]:
    """Ids (T, K) of any integer dtype, mostly in 0..E-1, and E."""
    num_experts = draw(st.sampled_from(EXPERTS) | st.integers(1, 5000))
    dtype = draw(st.sampled_from(ID_DTYPES))
    info = torch.iinfo(dtype)
    near = st.integers(max(info.min, -2), min(info.max, num_experts + 2))
    inside = st.integers(0, min(info.max, num_experts - 1))
    tokens, slots = draw(st.integers(0, 20)), draw(st.sampled_from([0, 1, 2, 8]))
    size = tokens * slots
    ids = draw(st.lists(inside | inside | near | st.sampled_from([info.min, info.max]), min_size=size, max_size=size))
    return torch.tensor(ids, dtype=dtype).view(tokens, slots), num_experts


@settings(deadline=None)
@given(routings(), st.sampled_from([1, 2, 7, 16, 128]))
def test_equals_the_oracle_on_both_paths(routing: tuple[torch.Tensor, int], alignment: int) -> None:
    ids, num_experts = routing
    before = ids.clone()
    expected = oracle(ids.flatten().tolist(), num_experts, alignment)
    assert values(build_layout(ids, num_experts, alignment=alignment)) == expected
    assert values(device_layout(ids, num_experts, alignment)) == expected
    assert torch.equal(ids, before)


@settings(deadline=None)
@given(routings())
def test_first_out_of_range_names_token_slot_and_value(routing: tuple[torch.Tensor, int]) -> None:
    ids, num_experts = routing
    flat = ids.flatten().tolist()
    position = next((p for p, value in enumerate(flat) if not 0 <= value < num_experts), None)
    assert first_out_of_range_torch(ids, num_experts) == position
    slots = ids.shape[1]
    expected = None if position is None else (position // slots, position % slots, flat[position])
    assert first_out_of_range(ids, num_experts) == expected


@pytest.mark.parametrize("num_experts", EXPERTS)
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_any_number_of_experts_equals_a_stable_argsort(num_experts: int, slots: int) -> None:
    ids = torch.randint(num_experts, (513, slots), generator=torch.Generator().manual_seed(num_experts))
    layout = build_layout(ids, num_experts)
    assert layout.order.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert layout.counts.tolist() == torch.bincount(ids.flatten(), minlength=num_experts).tolist()
    assert layout.inverse[layout.order.long()].tolist() == list(range(513 * slots))


def test_order_is_stable_where_the_default_sort_is_not() -> None:
    ids = torch.randint(4, (4096, 1), generator=torch.Generator().manual_seed(0))
    assert build_layout(ids, 4).order.tolist() == ids.flatten().argsort(stable=True).tolist()
    assert ids.flatten().argsort().tolist() != ids.flatten().argsort(stable=True).tolist()


def test_minus_one_and_too_large_ids_never_reach_an_expert() -> None:
    layout = build_layout(torch.tensor([[0, -1], [2, 1], [8, 2]]), 3)
    assert values(layout) == {
        "order": [0, 3, 2, 5, 1, 4],
        "inverse": [0, 4, 2, 1, 5, 3],
        "counts": [1, 1, 2],
        "offsets": [1, 2, 4],
        "rows": 4,
    }


def test_groups_start_at_multiples_of_the_alignment() -> None:
    counts = torch.tensor([128, 130, 65])
    ids = torch.arange(3).repeat_interleave(counts).view(-1, 1)
    layout = build_layout(ids, 3, alignment=128)
    assert layout.starts.tolist() == [0, 128, 384, 512]
    assert layout.block_expert.tolist() == [0, 1, 1, 2, -1]
    # Padding is labelled -1, within the rows in use and behind them.
    labels = [0] * 128 + [1] * 130 + [-1] * 126 + [2] * 65 + [-1] * (323 + 3 * 127 - 449)
    assert layout.row_expert.tolist() == labels
    padded_row = layout.starts[ids.flatten()] + layout.inverse - (layout.offsets - layout.counts)[ids.flatten()]
    assert torch.equal(layout.row_expert[padded_row].long(), ids.flatten())


@pytest.mark.parametrize("dtype", ID_DTYPES, ids=str)
def test_strided_ids_of_every_dtype(dtype: torch.dtype) -> None:
    plain = torch.randint(6, (40, 9), generator=torch.Generator().manual_seed(1)).to(dtype)
    views = {"columns": plain[:, 2:5], "transposed": plain.t(), "zero stride": plain[:1].expand(7, 9)}
    for name, ids in views.items():
        expected = oracle(ids.flatten().tolist(), 6, 4)
        assert values(build_layout(ids, 6, alignment=4)) == expected, name
        assert values(device_layout(ids, 6, 4)) == expected, name


def test_ids_in_unaligned_memory() -> None:
    ids = torch.frombuffer(bytearray(1 + 8 * 6), dtype=torch.int64, offset=1).view(3, 2)
    ids.copy_(torch.tensor([[2, 0], [1, 9], [0, 2]]))
    assert ids.data_ptr() % 8 != 0
    assert build_layout(ids, 3).order.tolist() == [1, 4, 2, 0, 5, 3]
    assert first_out_of_range(ids, 3) == (1, 1, 9)


@pytest.mark.parametrize("shape", [(0, 8), (5, 0), (0, 0)])
def test_no_tokens_or_no_slots(shape: tuple[int, int]) -> None:
    expected = {"order": [], "inverse": [], "counts": [0] * 3, "offsets": [0] * 3, "rows": 0}
    assert values(build_layout(torch.empty(shape, dtype=torch.int64), 3)) == expected
    expected |= {"starts": [0] * 4, "row_expert": [], "block_expert": []}
    assert values(build_layout(torch.empty(shape, dtype=torch.int64), 3, alignment=128)) == expected


def test_the_default_device_does_not_matter() -> None:
    ids = torch.tensor([[1, 0]])
    with torch.device("meta"):
        layout = build_layout(ids, 2, alignment=2)
    assert {part.device.type for part in layout} == {"cpu"}
    assert layout.order.tolist() == [1, 0]


def shapes(layout: ExpertLayout) -> list[tuple[int, ...]]:
    return [tuple(part.shape) for part in layout]


def test_meta_and_fake_ids_give_the_shapes() -> None:
    real = torch.zeros(5, 2, dtype=torch.int64)
    expected = shapes(build_layout(real, 3, alignment=8))
    assert shapes(build_layout(real.to("meta"), 3, alignment=8)) == expected
    with FakeTensorMode() as mode:
        fake = build_layout(mode.from_tensor(real), 3, alignment=8)
    assert shapes(fake) == expected
    assert all(part.dtype == torch.int32 for part in fake)


@pytest.mark.parametrize("ids", [torch.ones(2, 2, dtype=torch.bool), torch.ones(2, 2), [[0, 1]]], ids=type)
def test_ids_that_are_not_integers(ids: object) -> None:
    for call in (build_layout, first_out_of_range):
        with pytest.raises(DtypeError, match=r"found: (torch|list)") as caught:
            call(ids, 3)
        assert caught.value.needed
        assert caught.value.hint


WIDE = torch.zeros(1, 1, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("ids", "num_experts", "alignment", "found"),
    [
        (WIDE.flatten(), 3, 1, r"shape \(1,\)"),
        (WIDE[None], 3, 1, r"shape \(1, 1, 1\)"),
        (WIDE, 0, 1, "num_experts=0"),
        (WIDE, -1, 1, "num_experts=-1"),
        (WIDE, 2**31, 1, "num_experts=2147483648"),
        (WIDE, 3, 0, "alignment=0"),
        (WIDE.expand(2**28, 8), 3, 1, "2147483648 rows"),
        (WIDE.expand(2**27, 15), 2**26, 128, "rows"),
    ],
)
def test_impossible_sizes(ids: torch.Tensor, num_experts: int, alignment: int, found: str) -> None:
    with pytest.raises(LayoutError, match=f"found: .*{found}") as caught:
        build_layout(ids, num_experts, alignment=alignment)
    assert caught.value.needed
    assert caught.value.hint


def test_rust_refuses_an_output_it_cannot_fill() -> None:
    ids, out = torch.zeros(2, 2, dtype=torch.int64), torch.full((13,), 7, dtype=torch.int32)
    for address, length in ((0, 12), (out.data_ptr() + 1, 12), (out.data_ptr(), 13)):
        with pytest.raises(LayoutError, match="output"):
            _core.layout_build(ids.data_ptr(), 4, 4, 2, 1, 1, address, length)
    with pytest.raises(DtypeError, match="code 8"):
        _core.layout_build(ids.data_ptr(), 8, 4, 2, 1, 1, out.data_ptr(), 12)
    assert out.tolist() == [7] * 13


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiles_whole_for_any_number_of_tokens(backend: str) -> None:
    def rows_of(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        layout = build_layout(ids + 0, 5, alignment=4)
        return *layout[:4], layout.rows + 0, *layout[5:]

    torch.compiler.reset()
    compiled = torch.compile(rows_of, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (3, 8, 2, 17):
            ids = torch.randint(-1, 7, (tokens, 2), generator=torch.Generator().manual_seed(tokens))
            layout = ExpertLayout(*compiled(ids))
            assert values(layout) == oracle(ids.flatten().tolist(), 5, 4)


def test_the_compiled_op_is_sound() -> None:
    for ids in (torch.tensor([[0, 4], [9, -1]]), torch.empty(0, 2, dtype=torch.int32)):
        torch.library.opcheck(torch.ops.routed_experts.build_layout.default, (ids, 5, 4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_rust_and_replays_in_a_graph() -> None:
    ids = torch.randint(-1, 66, (4096, 8), device="cuda")
    build_layout(ids, 64, alignment=128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = build_layout(ids, 64, alignment=128)
    ids.random_(-1, 66)
    graph.replay()
    expected = build_layout(ids.cpu(), 64, alignment=128)
    assert values(captured) == values(expected)
    assert first_out_of_range(ids, 64) == first_out_of_range(ids.cpu(), 64)
