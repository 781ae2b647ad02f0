"""What went wrong for users of comparable systems under expert parallelism, at the level of ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_inputs import inputs, make
from parallel_ranks import all_good, run_ranks

import routed_experts as rx
from routed_experts.parallel import traffic

DISPATCHES = ("all_reduce", "all_to_all")
BACKENDS = ("eager", "batched_mm", "grouped_mm", "fused")


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found, wanted, atol=1e-5)


def sentinels_in_every_backend(rank: int) -> None:
    """B20: eager meets ids of other ranks. B21: a token without an expert reads exactly 0, on poisoned memory."""
    experts, _ = make(8)
    x, _, weights = inputs(experts=8)
    x[3] = float("nan")  # and is nobody's
    index = torch.tensor([[0, 7], [4, 4], [3, 8], [8, -1], [5, 2]])
    wanted = rx.run_experts(x, index, weights, experts, backend="eager", expert_parallel=True)
    assert not wanted[3].any()
    for dispatch in DISPATCHES:
        for backend in BACKENDS:
            for power in range(6, 20):
                torch.full((2**power,), float("nan"))
            layer = rx.parallel.ExpertParallel(experts, None, dispatch, backend=backend, timeout=30)
            out = layer(x, index, weights)
            assert close(out, wanted), (dispatch, backend)
            assert out[3].tolist() == [0.0] * 8


def no_flag_to_forget(rank: int) -> None:
    """B22: local ids with the sentinel of other ranks are right without any flag being set."""
    experts, _ = make(8)
    share = experts.shard(rank, 2)
    x, index, weights = inputs(experts=8)
    local = index - 4 * rank
    local = torch.where((local < 0) | (local >= 4), 4, local)
    for backend in BACKENDS:
        total = rx.run_experts(x, local, weights, share, backend=backend)
        dist.all_reduce(total)
        assert close(total, rx.run_experts(x, index, weights, experts)), backend


def weights_meet_their_own_experts(rank: int) -> None:
    """B23: E = K = 2, so that (T, K) could be taken for (T, E)."""
    experts, _ = make(2)
    x, _, _ = inputs(tokens=2, experts=2)
    index, weights = torch.tensor([[1, 0], [1, 0]]), torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    alone = [rx.run_experts(x, torch.full((2, 1), e), torch.ones(2, 1), experts) for e in range(2)]
    wanted = torch.tensor([[0.9], [0.6]]) * alone[1] + torch.tensor([[0.1], [0.4]]) * alone[0]
    for dispatch in DISPATCHES:
        assert close(rx.parallel.ExpertParallel(experts, None, dispatch, timeout=30)(x, index, weights), wanted)


def an_empty_rank_stays_in_the_graph(rank: int) -> None:
    """B28: rank 1 has no tokens, and rank 1's experts are chosen by nobody."""
    experts, tensors = make(8, grad=True)
    x, index, weights = inputs(experts=8)
    mine = slice(0, 5 * (1 - rank))
    a, w = x[mine].clone().requires_grad_(), weights[mine].clone().requires_grad_()
    out = rx.parallel.ExpertParallel(experts, None, "all_to_all", timeout=30)(a, index[mine] % 4, w)
    assert out.requires_grad
    assert out.shape == a.shape
    out.sum().backward()
    assert (a.grad.shape, w.grad.shape) == (a.shape, w.shape)
    for tensor in tensors.values():
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad[4:].any()
        assert bool(tensor.grad[:4].any()) == (rank == 0)


def all_rows(rank: int) -> str:
    sentinels_in_every_backend(rank)
    no_flag_to_forget(rank)
    weights_meet_their_own_experts(rank)
    an_empty_rank_stays_in_the_graph(rank)
    return "good"


def test_rows_at_rank_level(tmp_path):
    assert all_good(run_ranks(all_rows, 2, tmp_path)) == ["good", "good"]


def test_experts_that_do_not_divide_fail_at_set_up():
    """B24: E=6 over 4 ranks, wherever a share is first spoken of."""
    weights, _ = make(6)
    for attempt in (lambda: weights.shard(0, 4), lambda: traffic(6, 2, 8, 6, 4)):
        with pytest.raises(ValueError, match="6 experts, 4 ranks"):
            attempt()


def test_blocks_are_not_cut_by_ranks():
    """B39: I=1536 over 8 ranks would be 192 columns, no multiple of 128: experts are shared, I is not."""
    weights = rx.quantize_experts(make(8, 128, 1536)[0], "fp8_block")
    shapes = {weights.shard(rank, 8).down_scale.shape for rank in range(8)}
    assert shapes == {(1, 1, 12)}
    cut = {"gate_up_proj": weights.gate_up_proj[:, : 2 * 192], "down_proj": weights.down_proj[:, :, :192]}
    scales = {"gate_up_proj_scale_inv": weights.up_scale, "down_proj_scale_inv": weights.down_scale}
    with pytest.raises(rx.LayoutError) as error:
        rx.ExpertWeights(**cut, **scales, quantization=weights.quantization)
    assert "384" in str(error.value) or "192" in str(error.value)


def bytes_between_ranks(rank: int) -> dict[str, float]:
    """Bytes a token that leave this rank for others in one forward."""
    from routed_experts.parallel.link import Link

    sent = 0
    start, add = Link.start, Link.sum

    def counting_start(link: Any, out: Any, rows: Any, out_splits: Any, in_splits: Any) -> Any:
        nonlocal sent
        row = rows[0].numel() * rows.element_size() if rows.shape[0] else 0
        sent += row * (sum(in_splits) - in_splits[link.rank])
        return start(link, out, rows, out_splits, in_splits)

    def counting_sum(link: Any, tensor: Any) -> Any:
        nonlocal sent
        sent += 2 * (link.world - 1) / link.world * tensor.numel() * tensor.element_size()  # a ring
        return add(link, tensor)

    Link.start, Link.sum = counting_start, counting_sum
    tokens, experts, top_k, hidden = 512, 16, 4, 256
    weights, _ = make(experts, hidden, 8)
    found = {}
    for dispatch in DISPATCHES:
        sent = 0
        g = torch.Generator().manual_seed(rank if dispatch == "all_to_all" else 9)
        scores, index = torch.rand(tokens, experts, generator=g).topk(top_k)
        x = torch.randn(tokens, hidden, generator=g)
        rx.parallel.ExpertParallel(weights, None, dispatch, timeout=30)(x, index, scores)
        found[dispatch] = sent / tokens
    return found


def test_measured_bytes_are_those_of_the_model(tmp_path):
    """The figures of docs/scaling.md: what a forward really sends, against the model's even routing."""
    results = all_good(run_ranks(bytes_between_ranks, 4, tmp_path))
    model = traffic(16, 4, 256, 8, 4, element_bytes=4, weight_bytes=4)
    measured = sum(result["all_to_all"] for result in results) / 4
    assert measured == pytest.approx(model.all_to_all_bytes, rel=0.03)
    assert measured < 0.8 * model.pairs_bytes  # each token once a rank, not once an expert
    assert {result["all_reduce"] for result in results} == {model.all_reduce_bytes}
    assert model.ranks_per_token == pytest.approx(4 * (1 - 12 * 11 * 10 * 9 / (16 * 15 * 14 * 13)))


def test_the_table_of_the_docs_is_the_models():
    page = (Path(__file__).resolve().parent.parent / "docs" / "scaling.md").read_text()
    shapes = {"Qwen3-30B-A3B": (128, 8, 2048, 768, 2.0), "DeepSeek-V3": (256, 8, 7168, 2048, 1.0)}
    rows = re.findall(r"^\| (\S+) \| (\d+) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for name, ranks, cells in rows:
        *shape, stored = shapes[name]
        model = traffic(*shape, int(ranks), weight_bytes=stored)
        wanted = [
            f"{model.ranks_per_token:.2f}",
            f"{model.all_to_all_bytes / 1024:.1f}",
            f"{model.pairs_bytes / 1024:.1f}",
            f"{model.all_reduce_bytes / 1024:.1f}",
            f"{model.weight_bytes / 2**20:.0f}",
            f"{model.rows_per_expert:.3g}",
        ]
        assert cells.split(" | ") == wanted
