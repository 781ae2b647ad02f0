"""Plans of an exchange: worked by hand, and the torch plan equal to the Rust one bit for bit."""

from __future__ import annotations

import pytest
import torch

import routed_experts as rx
from routed_experts.layout import ID_CODES
from routed_experts.parallel.all_to_all import fewer_chunks
from routed_experts.parallel.exchange import deal, gather, spread
from routed_experts.parallel.header import Agreement
from routed_experts.parallel.plan import count_rows, plan_dispatch
from routed_experts.parallel.plan_device import count_rows_torch, plan_torch


def lists(plan):
    return [part.tolist() for part in plan]


@pytest.mark.parametrize("make", [plan_dispatch, plan_torch], ids=["rust", "torch"])
def test_worked_by_hand(make):
    """Experts 0, 1 on rank 0, 2, 3 on rank 1. Token 0 has both on rank 1: one row; token 2 has one of nobody."""
    index = torch.tensor([[3, 2], [2, 0], [4, 1]])
    rows, source, pairs, place, homes = lists(make(index, 4, 2))
    assert rows == [2, 2]
    assert source == [1, 2, 0, 1, -1, -1]
    assert pairs == [[3, -1], [5, -1], [0, 1], [2, -1], [-1, -1], [-1, -1]]
    assert place == [[4, 5], [6, 0], [-1, 2]]
    assert homes == [[2, -1], [0, 3], [1, -1]]


@pytest.mark.parametrize("make", [plan_dispatch, plan_torch], ids=["rust", "torch"])
def test_one_rank_and_an_idle_rank(make):
    rows, source, _, place, homes = lists(make(torch.tensor([[1, 0], [0, 0]]), 2, 1))
    assert (rows, source, place, homes) == ([2], [0, 1], [[0, 1], [2, 3]], [[0], [1]])
    rows, source, _, place, homes = lists(make(torch.tensor([[5, 5], [5, 4]]), 6, 3))
    assert (rows, source, place) == ([0, 0, 2], [0, 1, -1, -1], [[0, 1], [2, 3]])
    assert homes == [[0, -1], [1, -1]]


@pytest.mark.parametrize("make", [count_rows, count_rows_torch], ids=["rust", "torch"])
def test_counts_by_run_of_tokens(make):
    index = torch.tensor([[3, 2], [2, 0], [4, 1]])
    rows, widest = make(index, 4, 2, 2)
    assert (rows.tolist(), int(widest)) == ([[0, 1], [2, 1]], 2)
    rows, widest = make(index, 4, 2, 5)
    assert rows.tolist() == [[0, 0], [0, 1], [0, 0], [1, 1], [1, 0]]
    assert (rows.dtype, widest.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize("dtype", ID_CODES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_torch_equals_rust(dtype):
    g = torch.Generator().manual_seed(3)
    sizes = [(0, 2, 4, 2), (5, 0, 4, 2), (1, 1, 1, 1), (17, 3, 8, 4), (40, 8, 64, 8), (9, 5, 6, 3), (30, 2, 128, 64)]
    for tokens, slots, experts, ranks in sizes:
        low = 0 if dtype in (torch.uint8, torch.uint16, torch.uint32, torch.uint64) else -2
        index = torch.randint(low, experts + 2, (slots, tokens), generator=g).to(dtype).t()
        torch_plan, plan = plan_torch(index, experts, ranks), plan_dispatch(index, experts, ranks)
        for name, ours, right in zip(plan._fields, torch_plan, plan, strict=True):
            assert ours.dtype == right.dtype == torch.int32
            assert torch.equal(ours, right), (name, tokens, slots, experts, ranks)
        for chunks in (1, 3):
            rust, other = count_rows(index, experts, ranks, chunks), count_rows_torch(index, experts, ranks, chunks)
            assert torch.equal(rust.rows_CW, other[0])
            assert torch.equal(rust.widest, other[1])
            assert torch.equal(rust.rows_CW.sum(0), plan.rows.long())


def test_experts_that_ranks_cannot_share():
    for make in (plan_dispatch, lambda *a: count_rows(*a, 1)):
        with pytest.raises(rx.LayoutError, match="6 experts, 4 ranks"):
            make(torch.zeros(1, 1, dtype=torch.int64), 6, 4)


def test_rows_go_and_come_back():
    """Spread and gather are each other's transpose; dealt weights return to their pairs. Gradients in float64."""
    g = torch.Generator().manual_seed(4)
    index = torch.randint(-1, 9, (7, 3), generator=g)
    plan = plan_dispatch(index, 8, 4)
    rows = int(plan.rows.sum())
    source, homes = plan.source[:rows].long(), plan.homes.long()
    x = torch.randn(7, 5, dtype=torch.float64, generator=g, requires_grad=True)
    y = torch.randn(rows, 5, dtype=torch.float64, generator=g, requires_grad=True)
    dots = (spread(x, source, homes) * y).sum(), (x * gather(y, source, homes)).sum()
    assert torch.allclose(*dots)
    assert torch.autograd.gradcheck(spread, (x, source, homes))
    assert torch.autograd.gradcheck(gather, (y, source, homes))
    weights = torch.rand(7, 3, dtype=torch.float64, generator=g, requires_grad=True)
    pairs, place = plan.pairs[:rows].long(), plan.place.long()
    assert torch.autograd.gradcheck(deal, (weights, pairs, place))
    owned = (index >= 0) & (index < 8)
    assert torch.allclose(deal(weights, pairs, place).sum(), weights[owned].sum())


def test_rows_without_a_home_are_never_read():
    """A token without rows is exactly 0, whatever the row 0 that its homes would point to holds."""
    rows = torch.full((1, 2), float("nan"))
    homes = torch.tensor([[0, -1], [-1, -1]])
    assert gather(rows, torch.tensor([0]), homes)[1].tolist() == [0.0, 0.0]


def test_sums_of_homes_are_in_float32():
    rows = torch.tensor([[256.0], [0.5], [0.5]], dtype=torch.bfloat16)  # one by one, each half would be lost
    homes = torch.tensor([[0, 1, 2]])
    assert gather(rows, torch.zeros(3, dtype=torch.int64), homes).item() == 256.0
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert gather(rows, torch.zeros(3, dtype=torch.int64), homes).item() == 258.0


def test_short_batches_go_in_one_run():
    agreement = Agreement([3, 5], 2, False, False, [[1, 0], [0, 2]], [[2, 1], [1, 1]])
    one, chunks = fewer_chunks(agreement, 2, 3)
    assert (chunks, one.send_CW, one.receive_CW, one.tokens) == (1, [[1, 2]], [[3, 2]], [3, 5])
    assert fewer_chunks(agreement, 2, 2) == (agreement, 2)
