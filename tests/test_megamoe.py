"""Mega MoE's contract on two gloo ranks: every argument, growth of the buffers, and what becomes of the weights."""

from __future__ import annotations

import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from external_experts import H, K, error_of, quantized, routed
from external_fakes import per_token_cast_to_fp8
from external_megamoe import Buffer, FakeMegaMoe

import routed_experts as rx
from routed_experts import megamoe_buffers
from routed_experts.backends import deepgemm_megamoe as megamoe
from routed_experts.backends.spec import Spec

LOCAL, RANKS = 3, 2
TOTAL = LOCAL * RANKS


def whole(limit=None, seed=0):
    return quantized("mxfp4", (1, 32), True, seed=seed, experts=TOTAL, swiglu_limit=limit)


def share(experts, rank):
    """This rank's experts, in memory of their own."""
    tensors = {
        name: None if t is None else t[rank * LOCAL : (rank + 1) * LOCAL].clone()
        for name, t in experts._tensors.items()
    }
    return rx.ExpertWeights(
        **tensors, swiglu_limit=experts.swiglu_limit, quantization=experts.quantization, num_experts=LOCAL
    )


def call_of(rank, tokens, seed):
    x, ids, weights = routed(max(tokens, 1), seed=seed + 10 * rank, experts=TOTAL)
    flat = ids.view(-1)
    flat[::5], flat[1::7] = -1, TOTAL + 2
    weights.view(-1)[::5] = float("inf")
    return x[:tokens], ids[:tokens], weights[:tokens]


def check_values(rank, fake, limit, tokens, seed, group):
    stored, reference = whole(limit)
    experts, call = share(stored, rank), call_of(rank, tokens[rank], seed)
    with torch.no_grad():
        got = megamoe.run(experts, *call, process_group=group)
        assert got.shape == call[0].shape
        assert got.dtype == call[0].dtype
        if tokens[rank]:
            values, scale = per_token_cast_to_fp8(call[0], use_ue8m0=True, gran_k=32)
            cast = values.float() * scale.repeat_interleave(32, 1)
            wanted = rx.run_experts(cast, *call[1:], reference, backend="eager", expert_parallel=True)
            assert error_of(got, wanted) < 5e-3, error_of(got, wanted)
            assert torch.equal(megamoe.run(experts, *call, process_group=group), got)
        else:
            megamoe.run(experts, *call, process_group=group)
    return experts


def scenario_values(rank, fake, group):
    check_values(rank, fake, None, (5, 9), 1, group)
    check_values(rank, fake, 0.5, (8, 8), 2, group)
    assert fake.transforms == 2  # once for each set of weights
    assert fake.runs == 4
    assert Buffer.alive == 1  # shared by layers


def scenario_a_rank_without_tokens_takes_part(rank, fake, group):
    check_values(rank, fake, None, (0, 4), 3, group)
    check_values(rank, fake, None, (6, 0), 4, group)


def scenario_buffers_grow_on_all_ranks_when_one_needs_it(rank, fake, group):
    check_values(rank, fake, None, (4, 4), 5, group)
    (_, first), *_ = megamoe_buffers._BUFFERS.values()
    assert first.num_max_tokens_per_rank == 384
    check_values(rank, fake, None, (4, 385), 6, group)
    ((_, second),) = megamoe_buffers._BUFFERS.values()
    assert second.num_max_tokens_per_rank == 768
    assert first.x is None
    assert Buffer.alive == 1
    check_values(rank, fake, None, (300, 2), 7, group)
    assert next(iter(megamoe_buffers._BUFFERS.values()))[1] is second
    megamoe_buffers.release_buffers(group)
    assert Buffer.alive == 0


def scenario_a_size_that_was_named_needs_no_agreement(rank, fake, group):
    os.environ["ROUTED_EXPERTS_MEGAMOE_TOKENS"] = "500"
    agree, dist.all_reduce = dist.all_reduce, lambda *a, **k: pytest.fail("ranks agreed")
    try:
        check_values(rank, fake, None, (4, 7), 8, group)
        ((_, buffer),) = megamoe_buffers._BUFFERS.values()
        assert buffer.num_max_tokens_per_rank == 768
        os.environ["ROUTED_EXPERTS_MEGAMOE_TOKENS"] = "3"
        experts = share(whole()[0], rank)
        with torch.no_grad(), pytest.raises(rx.LayoutError, match="at most 3"):
            megamoe.run(experts, *call_of(rank, 4, 1), process_group=group)
        os.environ["ROUTED_EXPERTS_MEGAMOE_TOKENS"] = "many"
        with torch.no_grad(), pytest.raises(rx.LayoutError, match="cannot be read"):
            megamoe.run(experts, *call_of(rank, 4, 1), process_group=group)
    finally:
        dist.all_reduce = agree
        del os.environ["ROUTED_EXPERTS_MEGAMOE_TOKENS"]


def scenario_reshaped_weights_belong_to_it(rank, fake, group):
    experts = share(whole()[0], rank)
    address, before = experts.gate_up_proj.data_ptr(), experts.gate_up_proj.clone()
    call = call_of(rank, 4, 9)
    with torch.no_grad():
        rx.run_experts(*call, experts, backend="eager", expert_parallel=True)
        megamoe.run(experts, *call, process_group=group)
        assert experts.gate_up_proj.data_ptr() == address
        assert not torch.equal(experts.gate_up_proj, before)
        for backend in ("eager", "auto", "grouped_mm"):
            with pytest.raises(rx.RoutedExpertsError, match="deepgemm_megamoe has reshaped"):
                rx.run_experts(*call, experts, backend=backend, expert_parallel=True)
        with pytest.raises(rx.SwitchError):
            rx.run_experts(*call, experts, backend="eager", expert_parallel=True)
        with pytest.raises(rx.SwitchError, match="reshaped"):
            experts.save_checkpoint("/tmp/never-written")


SCENARIOS = {name: value for name, value in globals().items() if name.startswith("scenario_")}


def work(rank, port, results):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for name, scenario in SCENARIOS.items():
        rx.reset_kernels()
        Buffer.alive = 0
        fake = FakeMegaMoe()
        rx.register_kernel("deepgemm", fake)
        try:
            scenario(rank, fake, dist.group.WORLD)
            results[name, rank] = ""
        except BaseException:
            results[name, rank] = traceback.format_exc()
            break  # ranks may no longer be at the same call
    rx.reset_kernels()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes():
    """What each scenario came to on each rank: they share two processes, which take longer to start than to run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    with context.Manager() as manager:
        results = manager.dict()
        ranks = [context.Process(target=work, args=(rank, port, results)) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(180)
        for process in ranks:
            if process.is_alive():
                process.kill()
        return dict(results)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SCENARIOS)
def test_on_two_ranks(outcomes, name):
    for rank in range(RANKS):
        assert outcomes.get((name, rank), "never ended") == ""


def experts_and_call():
    return share(whole()[0], 0), call_of(0, 4, 1)


def test_the_group_is_asked_for_before_a_load(monkeypatch):
    monkeypatch.setattr(megamoe, "load_kernel", lambda name: pytest.fail("loaded"))
    experts, call = experts_and_call()
    with torch.no_grad(), pytest.raises(rx.UnsupportedExperts, match="process group"):
        megamoe.run(experts, *call)
    with torch.no_grad(), pytest.raises(ValueError, match="process group"):
        rx.run_experts(*call, experts, backend="deepgemm_megamoe", expert_parallel=True)


def test_other_weights_are_refused_before_a_load(monkeypatch):
    monkeypatch.setattr(megamoe, "load_kernel", lambda name: pytest.fail("loaded"))
    fp8, _ = quantized("fp8_block", (128, 128), True)
    with torch.no_grad(), pytest.raises(NotImplementedError, match="FP4"):
        megamoe.run(fp8, *routed(3), process_group=object())


def test_a_gradient_is_refused_before_all_else(monkeypatch):
    monkeypatch.setattr(megamoe, "load_kernel", lambda name: pytest.fail("loaded"))
    experts, (x, ids, weights) = experts_and_call()
    with pytest.raises(rx.GradientUnsupported):
        megamoe.run(experts, x.requires_grad_(), ids, weights)


def test_a_backend_that_takes_a_group_is_handed_it_also_without_tokens():
    seen = []

    def run(experts, x, ids, weights, *, process_group):
        seen.append((process_group, x.shape[0]))
        return torch.zeros_like(x)

    rx.register_backend("groups", run, spec=Spec(name="groups", takes_group=True, auto=False))
    try:
        group, experts = object(), rx.RoutedExperts(2, 8, 4)
        for tokens in (3, 0, 3):
            x, ids = torch.zeros(tokens, 8), torch.zeros(tokens, 1, dtype=torch.long)
            rx.run_experts(x, ids, torch.ones(tokens, 1), experts, backend="groups", process_group=group)
        assert seen == [(group, 3), (group, 0), (group, 3)]
        rx.run_experts(torch.zeros(3, 8), ids, torch.ones(3, 1), experts, backend="groups", process_group=None)
        assert seen[-1] == (None, 3)
    finally:
        rx.unregister_backend("groups")
    with pytest.raises(rx.LayoutError, match="takes_group"):
        Spec(name="groups", takes="slots", gives="slots", takes_group=True)


def test_sizes():
    assert (H % 128, K) == (0, 3)
    small, _ = quantized("mxfp4", (1, 32), True)
    object.__setattr__(small, "intermediate_size", 96)
    with torch.no_grad(), pytest.raises(rx.LayoutError, match="intermediate_size 96"):
        megamoe.run(small, *routed(3), process_group=object())
