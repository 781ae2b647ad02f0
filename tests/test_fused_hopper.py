"""Which FP8 calls the kernels in Gluon take, and how rows are made for them; what comes of it: test_gpu_fp8_rows.py."""

from __future__ import annotations

import pytest
import torch
from quantized_stacks import Stored, build, routing

import routed_experts as rx

pytest.importorskip("triton", reason="Triton is not installed")

from routed_experts.kernels import choice, e4m3_hopper_mlp, e4m3_mlp, fused, hopper, launch
from routed_experts.kernels.memory import cut, places

BLOCKS = Stored("fp8_block", (128, 128))
H200 = choice.Device((9, 0), 232448, 132)


def chosen(device=H200, stored=BLOCKS, tokens=65536, experts=2, hidden=256, inner=128, **flags):
    weights = build(stored, experts=experts, hidden=hidden, inner=inner, **flags)[0]
    sizes = choice.Sizes(tokens, 2, experts, hidden, inner)
    return choice.choose(weights, sizes, torch.bfloat16, device, may_quantize=True)


@pytest.fixture
def gluon(monkeypatch):
    """Triton with Gluon, whichever is installed: nothing is compiled here."""
    monkeypatch.setattr(hopper, "has_gluon", lambda: True)


def test_many_rows_on_hopper(gluon):
    found = chosen()
    assert (found.programs, found.up, found.down) == (132, hopper.UP, hopper.DOWN)
    assert fused._of_rows(found) is e4m3_hopper_mlp
    # Should a device have less room after all, the other kernels take the call.
    first, *others = choice.smaller_choices(found)
    assert first == found
    assert {fused._of_rows(one) for one in others} == {e4m3_mlp}
    assert others[-1].up.columns < hopper.UP.columns


@pytest.mark.parametrize(
    "changes",
    [
        {"device": choice.Device((8, 9), 101376, 132)},
        {"device": choice.Device((10, 0), 232448, 148)},
        {"device": choice.Device((9, 0), 200000, 132)},
        {"device": choice.Device((9, 0), 232448)},
        {"tokens": 1024},  # too little to do
        {"tokens": 65536 * 16, "experts": 8, "hidden": 128, "inner": 32},  # a broken block
        {"hidden": 320},
        {"stored": Stored("fp8_block", (128, 128), ue8m0=True)},
        {"stored": Stored("fp8_block", (64, 128))},
        {"stored": Stored("fp8_tensor")},
        {"stored": Stored("mxfp8", (1, 32), ue8m0=True)},
        {"bias": True},
        {"stored": Stored("fp8_tensor"), "is_concatenated": False},
        {"is_transposed": True},
    ],
    ids=str,
)
def test_what_other_kernels_take(changes, gluon):
    assert chosen(**changes).programs == 0


def test_few_rows_an_expert_are_left_to_other_kernels(gluon, monkeypatch):
    monkeypatch.setattr(choice, "_LARGE_FLOPS", 0)
    assert chosen(tokens=128).programs
    assert not chosen(tokens=127).programs


def test_a_search_has_no_other_tiles_to_try(gluon):
    from routed_experts.kernels import alternatives

    weights = build(BLOCKS, experts=2, hidden=256, inner=128)[0]
    many, few = (choice.Sizes(tokens, 2, 2, 256, 128) for tokens in (65536, 64))
    calls = [alternatives.Call(weights, sizes, torch.bfloat16, H200) for sizes in (many, few)]
    found = [list(alternatives.in_order(call, {})) for call in calls]
    assert found[0] == [(hopper.UP, hopper.DOWN)]
    assert len(found[1]) > 5


def test_without_gluon_other_kernels_take_all(monkeypatch):
    monkeypatch.setattr(hopper, "has_gluon", lambda: False)
    assert chosen().programs == 0


def test_an_older_triton_has_no_gluon(monkeypatch):
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper", reason="this Triton has no Gluon")
    there = dict.fromkeys(("language.nvidia.hopper", "nvidia.hopper"), True)
    monkeypatch.setattr(hopper, "_is_there", lambda name: there[name.removeprefix(hopper._GLUON + ".")])
    monkeypatch.setattr(hopper, "IS_INTERPRETED", False)
    for name in there:
        there[name] = False
        assert not hopper.has_gluon.__wrapped__()
        there[name] = True


def test_weights_with_gaps_are_left_to_other_kernels(gluon):
    weights = build(BLOCKS, experts=2, hidden=256, inner=128)[0]
    wide = torch.zeros(2, 256, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {**weights._tensors, "gate_up_proj": wide[:, :, :256].copy_(weights.up_weight)}
    gaps = rx.ExpertWeights(**tensors, quantization=weights.quantization)
    assert hopper.suits(weights, 1e4, (9, 0), 232448)
    assert not hopper.suits(gaps, 1e4, (9, 0), 232448)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets on the CPU")
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 128), (37, 384), (300, 640)])
def test_rows_are_quantized_and_sorted(tokens, hidden, gluon, poisoned):
    experts, slots = 5, 3
    x, ids, _ = routing(tokens, slots, experts, hidden, torch.bfloat16, sentinels=True)
    weights = build(BLOCKS, experts=experts, hidden=hidden, inner=128)[0]
    sizes = choice.sizes_of(weights, ids)
    found = choice.Choice(True, hopper.UP, hopper.DOWN, "ieee", is_large=True, quantizes=True, programs=132)
    pieces = e4m3_hopper_mlp.pieces_of(found, sizes, torch.bfloat16)
    memory = torch.full((places(pieces)[1],), 255, dtype=torch.uint8)
    row_scale, _, _, slots_memory, tiles, places_of, chunks = cut(memory, pieces)
    rows = e4m3_hopper_mlp.rows_in(slots_memory)
    for one in e4m3_hopper_mlp.layout_launches(ids, tiles, chunks, experts, found.up.rows, tiles=True):
        launch.launch(one)
    for one in e4m3_hopper_mlp.gather(x, sizes, tiles, places_of, rows, row_scale):
        launch.launch(one)
    order = tiles[: sizes.pairs].long()
    assert torch.equal(order.sort().values, torch.arange(sizes.pairs))
    assert (ids.flatten()[order][:-1] <= ids.flatten()[order][1:]).logical_or(ids.flatten()[order][1:] < 0).all()
    groups = x[order // slots].float().unflatten(1, (-1, 128))
    largest = groups.abs().amax(2)
    assert torch.equal(row_scale.T, torch.where(largest > 0, largest, 448.0) * (1.0 / 448.0))
    back = rows.float().unflatten(1, (-1, 128)) * row_scale.T[..., None]
    assert ((back - groups).abs() <= groups.abs() / 16 + row_scale.T[..., None] * 2.0**-10).all()
