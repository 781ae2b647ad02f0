"""Tokens are spread over the ranks; each goes once to every rank that has one of its experts, and its sum comes back.

The way of a token: planned (plan.py), spread to rows, sent with the ids and weights of the slots that it has there,
run and weighted by that rank's experts, sent back, and summed over ranks in float32 in the order of the ranks. Runs
of tokens follow each other, so that rows of one travel while another is computed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from routed_experts.parallel.all_reduce import Compute
from routed_experts.parallel.exchange import Trip, deal, gather, spread, take_or_zero
from routed_experts.parallel.header import Agreement
from routed_experts.parallel.link import Link
from routed_experts.parallel.plan import plan_dispatch


class Batch(NamedTuple):
    """This rank's tokens, ids counting the experts of all ranks."""

    x_TH: Tensor
    index_TK: Tensor
    weights_TK: Tensor


class _Home(NamedTuple):
    """How a run's rows, R of them, become its tokens again."""

    source_R: Tensor
    homes_TM: Tensor


def run_all_to_all(link: Link, compute: Compute, share: int, batch: Batch, agreement: Agreement, chunks: int) -> Tensor:
    """Run this rank's tokens over ``share`` experts a rank, in ``chunks`` runs of tokens: (T, H)."""
    runs = [_Run(link, share, part, agreement, chunk) for chunk, part in enumerate(_split(batch, chunks))]
    runs[0].send()
    for run, following in zip(runs, [*runs[1:], None], strict=True):
        if following is not None:
            following.send()  # it travels while this one is computed
        run.compute(compute)
    outs = [run.receive() for run in runs]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def fewer_chunks(agreement: Agreement, chunks: int, least_tokens: int) -> tuple[Agreement, int]:
    """Return one run instead of ``chunks`` where no rank has tokens for so many; all ranks decide alike."""
    if chunks == 1 or max(agreement.tokens) >= chunks * least_tokens:
        return agreement, chunks
    send, receive = ([[sum(column) for column in zip(*counts, strict=True)]] for counts in agreement[-2:])
    return agreement._replace(send_CW=send, receive_CW=receive), 1


def _split(batch: Batch, chunks: int) -> list[Batch]:
    tokens = batch.x_TH.shape[0]
    edges = [chunk * tokens // chunks for chunk in range(chunks + 1)]
    return [Batch(*(tensor[first:end] for tensor in batch)) for first, end in pairwise(edges)]


class _Run:
    """One run of tokens on its way."""

    def __init__(self, link: Link, share: int, batch: Batch, agreement: Agreement, chunk: int) -> None:
        self.share, self.batch, self.widest = share, batch, agreement.widest
        send, receive = agreement.send_CW[chunk], agreement.receive_CW[chunk]
        self.rows = sum(send)
        # What one rank wants of gradients, all ranks have part in.
        self.there = Trip(link, send, receive, differentiable=agreement.wants_grad)
        self.ids = Trip(link, send, receive, differentiable=False)
        self.back = Trip(link, receive, send, differentiable=agreement.wants_grad or agreement.trains)
        self.world = link.world

    def send(self) -> None:
        """Plan, and start tokens, ids and weights on their way."""
        x, index, weights = self.batch
        plan = plan_dispatch(index, self.share * self.world, self.world)
        source = plan.source[: self.rows].long()
        pairs = plan.pairs[: self.rows, : self.widest].long()
        self.home = _Home(source, plan.homes.long())
        ids = take_or_zero(index.long() % self.share, pairs).masked_fill(pairs < 0, self.share)
        self.ids.start(ids.to(torch.int32))
        rows = spread(x, source, self.home.homes_TM)
        dealt = deal(weights, pairs, _place(plan.place.long(), index.shape[1], self.widest))
        self.there.start(rows, dealt)

    def compute(self, compute: Compute) -> None:
        """Run what the ranks have sent here, and start the results on their way back."""
        (ids,) = self.ids.finish()
        rows, weights = self.there.finish()
        self.back.start(compute(rows, ids.long(), weights))

    def receive(self) -> Tensor:
        """Wait for the results, and sum every token's."""
        (rows,) = self.back.finish()
        return gather(rows, *self.home)


def _place(place_TK: Tensor, slots: int, widest: int) -> Tensor:
    """Places in rows of K slots as places in rows of ``widest``."""
    if widest == slots:
        return place_TK
    row, place = place_TK // max(slots, 1), place_TK % max(slots, 1)
    return torch.where(place_TK < 0, -1, row * widest + place)
