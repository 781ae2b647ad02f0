"""A stand-in for Mega MoE on any process group: it checks every argument and computes the right answer in torch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from external_fakes import FakeDeepGemm, ceil_div, check_packed, unpack_exponents, unpack_fp4
from torch import Tensor

UNIT = 384


def interleaved(t: Tensor) -> Tensor:
    """[gate; up] to groups of 8 rows by turns."""
    e, n, *rest = t.shape
    halves = (t[:, : n // 2].reshape(e, -1, 8, *rest), t[:, n // 2 :].reshape(e, -1, 8, *rest))
    return torch.empty_like(t).copy_(torch.stack(halves, 2).reshape(t.shape))


def separated(t: Tensor) -> Tensor:
    """Undo ``interleaved``."""
    e, n, *rest = t.shape
    parts = t.reshape(e, -1, 2, 8, *rest)
    return torch.cat([parts[:, :, half].reshape(e, n // 2, *rest) for half in (0, 1)], 1)


def permuted(sf: Tensor) -> Tensor:
    """Scales as the tensor cores copy them: 4 rows of 32 by turns in each 128."""
    e, n, words = sf.shape
    assert n % 128 == 0
    moved = sf.reshape(e, -1, 4, 32, words).transpose(2, 3).reshape(sf.shape)
    return torch.empty_like(sf).copy_(moved)


def unpermuted(sf: Tensor) -> Tensor:
    e, _, words = sf.shape
    return sf.reshape(e, -1, 32, 4, words).transpose(2, 3).reshape(sf.shape)


class Buffer:
    """One symmetric buffer; making it is a collective with equal arguments on every rank."""

    alive = 0

    def __init__(self, group: Any, num_experts: int, tokens: int, topk: int, hidden: int, inner: int) -> None:
        said: list[Any] = [None] * group.size()
        dist.all_gather_object(said, (num_experts, tokens, topk, hidden, inner), group=group)
        assert len(set(said)) == 1, f"ranks differ: {said}"
        self.group, self.num_experts, self.num_topk = group, num_experts, topk
        self.hidden, self.inner = hidden, inner
        self.num_max_tokens_per_rank = most = ceil_div(tokens, UNIT) * UNIT
        self.x = torch.zeros(most, hidden, dtype=torch.uint8).view(torch.float8_e4m3fn)
        self.x_sf = torch.zeros(most, hidden // 128, dtype=torch.int32)
        self.topk_idx = torch.full((most, topk), 12345, dtype=torch.int64)
        self.topk_weights = torch.full((most, topk), float("nan"))
        Buffer.alive += 1

    def destroy(self) -> None:
        Buffer.alive -= 1
        self.x = self.x_sf = self.group = None


class FakeMegaMoe(FakeDeepGemm):
    """DeepGEMM on Blackwell with Mega MoE."""

    def __init__(self) -> None:
        super().__init__(major=10)
        self.transforms = self.runs = 0

    def get_symm_buffer_for_mega_moe(
        self,
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        use_fp8_dispatch=True,
        activation="swiglu",
    ):
        assert use_fp8_dispatch is True
        assert activation == "swiglu"
        assert num_experts % group.size() == 0
        assert hidden % 128 == 0
        assert intermediate_hidden % 128 == 0
        assert num_max_tokens_per_rank > 0
        return Buffer(group, num_experts, num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)

    def transform_weights_for_mega_moe(self, l1, l2):
        for weight, sf in (l1, l2):
            assert weight.dtype == torch.int8
            assert weight.is_contiguous()
            check_packed(sf, weight.shape[1], 2 * weight.shape[2], 32)
        self.transforms += 1
        return (interleaved(l1[0]), permuted(interleaved(l1[1]))), (l2[0], permuted(l2[1]))

    def fp8_fp4_mega_moe(
        self,
        y,
        l1,
        l2,
        buffer,
        cumulative_local_expert_recv_stats=None,
        recipe=(1, 1, 32),
        activation="swiglu",
        activation_clamp=None,
        fast_math=True,
    ):
        tokens = y.shape[0]
        assert y.dtype == torch.bfloat16
        assert y.shape == (tokens, buffer.hidden)
        assert y.is_contiguous()
        assert tokens <= buffer.num_max_tokens_per_rank
        assert recipe == (1, 1, 32)
        assert activation == "swiglu"
        assert activation_clamp is None or activation_clamp >= 0
        local = buffer.num_experts // buffer.group.size()
        shapes = ((2 * buffer.inner, buffer.hidden), (buffer.hidden, buffer.inner))
        for (weight, sf), (rows, columns) in zip((l1, l2), shapes, strict=True):
            assert weight.dtype == torch.int8
            assert weight.shape == (local, rows, columns // 2)
            assert weight.is_contiguous()
            check_packed(sf, rows, columns, 32)
        self.runs += 1
        y.copy_(self._all(buffer, tokens, self._local(l1, l2, activation_clamp, buffer)))

    def _local(self, l1, l2, clamp, buffer):
        """Return this rank's experts as a function of rows."""
        scale = lambda sf, columns: unpack_exponents(sf, columns // 32).repeat_interleave(32, -1)  # noqa: E731
        up = unpack_fp4(separated(l1[0])) * scale(separated(unpermuted(l1[1])), buffer.hidden)
        down = unpack_fp4(l2[0]) * scale(unpermuted(l2[1]), buffer.inner)

        def run(expert, x):
            gate, linear = (x @ up[expert].mT).chunk(2, -1)
            if clamp is not None:
                gate, linear = gate.clamp(max=clamp), linear.clamp(-clamp, clamp)
            return (torch.nn.functional.silu(gate) * linear) @ down[expert].mT

        return run

    def _all(self, buffer, tokens, run):
        """Exchange, compute this rank's share of every rank's tokens, and sum over ranks."""
        group = buffer.group
        x = buffer.x[:tokens].float() * unpack_exponents(buffer.x_sf[:tokens], buffer.hidden // 32).repeat_interleave(
            32, -1
        )
        mine = (x, buffer.topk_idx[:tokens].clone(), buffer.topk_weights[:tokens].clone())
        calls: list[Any] = [None] * group.size()
        dist.all_gather_object(calls, mine, group=group)
        local = buffer.num_experts // group.size()
        first = dist.get_rank(group) * local
        shares = []
        for rows, index, weights in calls:
            assert ((index >= -1) & (index < buffer.num_experts)).all()
            assert weights.isfinite().all()
            out = torch.zeros_like(rows)
            for expert in range(local):
                token, slot = (index == first + expert).nonzero(as_tuple=True)
                out.index_add_(0, token, weights[token, slot, None] * run(expert, rows[token]))
            shares.append(out)
        given: list[Any] = [None] * group.size()
        dist.all_gather_object(given, shares, group=group)
        return sum(one[dist.get_rank(group)] for one in given)
