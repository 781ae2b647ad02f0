"""``weights.shard(rank, world)``: what a share is, and what full weights say of themselves."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from checkpoint_files import CONFIG, E, matrices, save
from moe_inputs import inputs, make

import routed_experts as rx
from routed_experts.parallel import traffic


def test_full_weights_have_no_shard():
    weights, _ = make(8)
    assert weights.shard == None  # noqa: E711
    assert not weights.shard
    assert repr(weights.shard) == "None"
    assert weights.shard != (0, 1)
    assert {weights.shard, None} == {None}


@pytest.mark.parametrize("flags", [{}, {"swiglu_limit": 0.5, "swiglu_alpha": 1.7}])
def test_shares_are_views_that_add_up(flags):
    weights, tensors = make(8, grad=True, **flags)
    x, index, routing = inputs(experts=8)
    whole = rx.run_experts(x, index, routing, weights)
    total = torch.zeros_like(whole)
    for rank in range(4):
        share = weights.shard(rank, 4)
        assert (share.shard, share.num_experts) == ((rank, 4), 2)
        assert isinstance(share.shard, tuple)
        assert share.shard[1] == 4
        assert share.down_proj.data_ptr() == tensors["down_proj"][2 * rank].data_ptr()
        total = total + rx.run_experts(x, index - 2 * rank, routing, share, expert_parallel=True)
    assert torch.allclose(total, whole, atol=1e-5)
    found = torch.autograd.grad(total.sum(), list(tensors.values()))
    for ours, right in zip(found, torch.autograd.grad(whole.sum(), list(tensors.values())), strict=True):
        assert torch.allclose(ours, right, atol=1e-5)


def test_a_share_is_not_shared_again():
    share = make(8)[0].shard(1, 2)
    with pytest.raises(rx.LayoutError, match="the share of rank 1 of 2"):
        share.shard(0, 2)


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (2, 2), (-1, 2), (0, 0), (0, 16), ("0", 2)])
def test_shares_that_cannot_be(rank, world):
    with pytest.raises(rx.LayoutError) as error:
        make(8)[0].shard(rank, world)
    if world in (3, 16):
        assert error.value.found == f"8 experts, {world} ranks"
    else:
        assert error.value.found == f"rank={rank!r}, world={world!r}"


def test_shares_of_a_module_and_copies():
    module = rx.RoutedExperts(4, 8, 6)
    live = rx.ExpertWeights.from_module(module)
    assert not live.shard
    share = live.shard(1, 2)
    assert torch.equal(share.down_proj, module.down_proj[2:])
    plain = make(4)[0].shard(1, 2)
    for twin in (copy.copy(plain), pickle.loads(pickle.dumps(plain))):
        assert (twin.shard, twin.num_experts) == ((1, 2), 2)
        with pytest.raises(rx.LayoutError):
            twin.shard(0, 2)


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp8", "fp8_tensor", "mxfp4"])
def test_quantized_shares_keep_whole_grids(fmt):
    weights = rx.quantize_experts(make(4, 64, 96)[0], fmt, **({"block": (32, 32)} if fmt == "fp8_block" else {}))
    share = weights.shard(1, 2)
    assert (share.quantization, share.shard) == (weights.quantization, (1, 2))
    assert (share.intermediate_size, share.hidden_size) == (96, 64)
    for name in ("up_scale", "down_scale"):
        ours, right = (getattr(one, name).view(torch.uint8) for one in (share, weights))
        assert torch.equal(ours, right[2:])
    half = make(4, 64, 96)[0].shard(1, 2)
    quantized = rx.quantize_experts(half, fmt, **({"block": (32, 32)} if fmt == "fp8_block" else {}))
    assert quantized.shard == (1, 2)
    assert torch.equal(quantized.down_proj.view(torch.uint8), share.down_proj.view(torch.uint8))
    with pytest.raises(rx.LayoutError):
        quantized.shard(0, 2)
    assert weights.shard(0, 2).num_experts == 2


def test_a_sharded_checkpoint_states_what_it_read(tmp_path, caplog):
    save(tmp_path, matrices(), CONFIG)
    whole = rx.ExpertWeights.from_checkpoint(tmp_path, 1)
    assert not whole.shard
    with caplog.at_level(logging.INFO, "routed_experts"):
        share = rx.ExpertWeights.from_checkpoint(tmp_path, 1, rank=1, world=2)
    assert (share.shard, share.num_experts) == ((1, 2), E // 2)
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(share, name), getattr(whole.shard(1, 2), name))
    size = sum(t.numel() * t.element_size() for t in share.tensors() if t is not None)
    assert f"read {size} bytes of experts range({E // 2}, {E})" in caplog.text
    share.save_checkpoint(tmp_path / "share")
    assert rx.ExpertWeights.from_checkpoint(tmp_path / "share").shard == (1, 2)


def test_memory_of_the_model_is_that_of_a_share():
    share = make(8, 32, 24)[0].shard(0, 4)
    size = share.gate_up_proj.nbytes + share.down_proj.nbytes
    assert traffic(8, 2, 32, 24, 4, weight_bytes=4).weight_bytes == size
    with pytest.raises(rx.LayoutError, match="top_k"):
        traffic(8, 9, 32, 24, 4)
