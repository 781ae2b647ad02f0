"""Corrupt quantized checkpoints: refused by the name of the tensor, before a weight is read or allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fp8_files as fp8
import pytest
import torch
from checkpoint_files import Spy
from fp8_files import UE8M0, E, H, I, change, config, folder, matrices, prefix, stacked
from safetensors.torch import load_file

import routed_experts as rx
from routed_experts.checkpoint import quantized, read, read_experts
from routed_experts.errors import CheckpointError

AT = prefix(1)
SCALE = f"{AT}5.up_proj.weight_scale_inv"
BAD = [(float("nan"), "NaN"), (float("inf"), "Inf"), (0.0, "0"), (-1.0, "a negative scale")]


@pytest.fixture(autouse=True)
def nothing_is_allocated(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """Reading a weight, or making room for one, fails every test of this file."""

    def no_room(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(quantized, "read_dequantized", no_room)
    monkeypatch.setattr(read, "read_dequantized", no_room)
    monkeypatch.setattr(read._Reader, "read", no_room)
    return Spy().install(monkeypatch)


def refused(path: Path, **options: Any) -> CheckpointError:
    """The same error with and without ``dequantize``."""
    caught = []
    for dequantize in (False, True):
        with pytest.raises(CheckpointError) as one:
            read_experts(path, 1, dequantize=dequantize, **options)
        caught.append(one.value)
    assert str(caught[0]) == str(caught[1])
    error = caught[0]
    assert error.found
    assert error.needed
    assert error.hint
    return error


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As stacks on disk."""
    return {AT + role: tensor for role, tensor in stacked(tensors).items()}


@pytest.mark.parametrize("shards", [0, 3])
def test_missing_scale(shards: int, nothing_is_allocated: Spy, tmp_path: Path) -> None:
    """B43: by the number of the expert and the name of the tensor."""
    error = refused(change(folder(tmp_path, matrices(), config(), shards=shards), SCALE, None))
    assert error.found == f"expert 5 has no {SCALE}"
    assert not nothing_is_allocated.read


def test_missing_scale_is_named_as_its_neighbours_are(tmp_path: Path) -> None:
    tensors = matrices(suffix="scale", names=fp8.W_NAMES, static=True)
    del tensors[f"{AT}5.w3.scale"], tensors[f"{AT}7.w2.activation_scale"]
    error = refused(folder(tmp_path, tensors, config(activation_scheme="static")))
    assert error.found == f"expert 5 has no {AT}5.w3.scale, expert 7 has no {AT}7.w2.activation_scale"


def test_no_scales_at_all(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in matrices().items() if "scale" not in name}
    assert f"expert 0 has no {AT}0.down_proj.weight_scale_inv" in str(
        refused(folder(tmp_path, tensors, config())).found
    )


def test_missing_scale_of_a_stack(tmp_path: Path) -> None:
    tensors = whole(matrices())
    del tensors[AT + "down_proj_scale_inv"]
    error = refused(folder(tmp_path, tensors, config()))
    assert "(down_proj_scale_inv missing)" in str(error.needed)
    assert AT in error.message


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("5.up_proj.scale", (2, 3)),
        ("5.up_proj.activation_scale", ()),
        ("5.up_proj.weight_scale", (2, 3)),
        ("16.up_proj.weight_scale_inv", (2, 3)),
        ("gate_up_proj_scale_inv", (E, 4, 3)),
        ("post_expert_norm.scale", (H,)),
    ],
)
def test_extra_scale(name: str, shape: tuple[int, ...], nothing_is_allocated: Spy, tmp_path: Path) -> None:
    error = refused(folder(tmp_path, matrices() | {AT + name: torch.ones(shape)}, config()))
    assert AT + name in str(error) or "beside" in str(error.found)
    assert not nothing_is_allocated.read


def test_scales_that_no_config_declares(tmp_path: Path) -> None:
    plain = {name: t.bfloat16() if t.element_size() == 1 else t for name, t in matrices().items()}
    settings = {key: value for key, value in config().items() if key != "quantization_config"}
    error = refused(folder(tmp_path / "matrices", plain, settings))
    assert f"expert 0 has {AT}0.down_proj.weight_scale_inv" in str(error.found)
    assert "declares no such scales" in str(error.hint)
    error = refused(folder(tmp_path / "stacks", {AT + r: t.float() for r, t in stacked(matrices()).items()}, settings))
    assert "down_proj_scale_inv" in str(error.found)


@pytest.mark.parametrize("shape", [(3, 2), (1, 3), (2, 4), (1, 1), (), (6,)])
def test_wrong_grid(shape: tuple[int, ...], nothing_is_allocated: Spy, tmp_path: Path) -> None:
    tensors = matrices()
    error = refused(change(folder(tmp_path / "one", tensors, config()), SCALE, torch.ones(shape)))
    assert SCALE in error.message
    for name in tensors:
        if ".up_proj.weight_scale" in name or ".gate_proj.weight_scale" in name:
            tensors[name] = torch.ones(shape)
    error = refused(folder(tmp_path / "all", tensors, config()))
    assert f"{AT}0.gate_proj.weight_scale_inv has the wrong grid" in error.message
    assert str(error.needed) == "[2, 3] for blocks of [16, 16] over N=32, K=40"
    assert not nothing_is_allocated.read


@pytest.mark.parametrize("shape", [(E, 4, 4), (E, 2, 3), (E - 1, 4, 3), (E, 1, 1), (E, 3, 4), (E, 12)])
def test_wrong_grid_of_a_stack(shape: tuple[int, ...], tmp_path: Path) -> None:
    tensors = whole(matrices()) | {AT + "gate_up_proj_scale_inv": torch.ones(shape)}
    error = refused(folder(tmp_path, tensors, config()))
    assert f"{AT}gate_up_proj_scale_inv has the wrong grid" in error.message
    assert (error.found, str(error.needed)[:10]) == (str(list(shape)), "[16, 4, 3]")


def test_a_declared_block_that_is_not_the_one_of_the_grid(tmp_path: Path) -> None:
    error = refused(folder(tmp_path, matrices(), config(weight_block_size=[32, 16])))
    assert error.needed == "[1, 3] for blocks of [32, 16] over N=32, K=40"
    error = refused(folder(tmp_path / "tensor", matrices(), config(weight_block_size=None)))
    assert "one scale per matrix" in str(error.needed)


def test_gated_stack_with_one_scale_for_both_halves(tmp_path: Path) -> None:
    tensors = whole(matrices(block=None)) | {AT + "gate_up_proj_scale_inv": torch.ones(E, 1, 1)}
    assert "[16, 2, 1]" in str(refused(folder(tmp_path, tensors, config(weight_block_size=None))).needed)


@pytest.mark.parametrize(("value", "kind"), BAD)
@pytest.mark.parametrize("stacks", [False, True])
def test_values_that_are_no_scales(
    stacks: bool, value: float, kind: str, nothing_is_allocated: Spy, tmp_path: Path
) -> None:
    """B43."""
    tensors = matrices()
    tensors[SCALE][1, 2] = value
    name = AT + "gate_up_proj_scale_inv" if stacks else SCALE
    error = refused(folder(tmp_path, whole(tensors) if stacks else tensors, config(), shards=2))
    assert (error.message, error.found) == (f"{name} holds scales that are none", f"{kind} in expert 5")
    assert not [name for name in nothing_is_allocated.read if "scale" not in name]


@pytest.mark.parametrize("dtype", [UE8M0, torch.uint8])
def test_255_in_ue8m0(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = matrices(dtype=dtype)
    tensors[SCALE].view(torch.uint8)[0, 0] = 255
    error = refused(folder(tmp_path, tensors, config(scale_fmt="ue8m0")))
    assert (error.message, error.found) == (f"{SCALE} holds scales that are none", "255 (NaN) in expert 5")


@pytest.mark.parametrize(("value", "kind"), BAD)
def test_values_that_are_no_scales_of_inputs(value: float, kind: str, tmp_path: Path) -> None:
    tensors = matrices(static=True)
    tensors[f"{AT}5.down_proj.activation_scale"] = torch.tensor(value)
    error = refused(folder(tmp_path, tensors, config(activation_scheme="static")))
    assert (f"{AT}5.down_proj.activation_scale" in error.message, error.found) == (True, f"{kind} in expert 5")


def test_powers_of_two_that_are_none_are_never_rounded(tmp_path: Path) -> None:
    """B38: rounded up without quantizing again, a block would be up to twice what it was."""
    tensors = {name: t.float() if "scale" in name else t for name, t in matrices(dtype=UE8M0).items()}
    tensors[SCALE][1, 1] = 0.75
    path = folder(tmp_path, tensors, config(scale_fmt="ue8m0"))
    error = refused(path)
    assert error.message.startswith(SCALE)
    assert error.found == "0.75 in expert 5"
    tensors[SCALE][1, 1] = 2.0**-130
    assert SCALE in refused(folder(tmp_path / "subnormal", tensors, config(scale_fmt="ue8m0"))).message


@pytest.mark.parametrize(
    ("dtype", "changes"),
    [
        (torch.float16, {}),
        (torch.bfloat16, {}),
        (torch.int8, {}),
        (torch.float64, {}),
        (torch.uint8, {"scale_fmt": "float"}),
        (torch.float8_e4m3fn, {}),
        (torch.float16, {"weight_block_size": None}),
    ],
)
def test_wrong_dtype_of_scales(dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path) -> None:
    tensors = matrices(block=None if changes.get("weight_block_size", 1) is None else fp8.BLOCK)
    tensors = {name: t.to(dtype) if "scale" in name else t for name, t in tensors.items()}
    error = refused(folder(tmp_path, tensors, config(**changes)))
    assert f"{AT}0.gate_proj.weight_scale_inv has the wrong dtype" in error.message
    assert str(dtype) in str(error.found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.uint8, UE8M0])
def test_wrong_dtype_of_weights(dtype: torch.dtype, nothing_is_allocated: Spy, tmp_path: Path) -> None:
    def made(weight: torch.Tensor) -> torch.Tensor:
        return weight.to(dtype) if dtype == torch.bfloat16 else weight.view(dtype)

    tensors = {name: t if "scale" in name else made(t) for name, t in matrices().items()}
    error = refused(folder(tmp_path / "all", tensors, config()))
    assert (f"{AT}0.gate_proj.weight has the wrong dtype" in error.message, error.found) == (True, str(dtype))
    name = f"{AT}5.down_proj.weight"
    error = refused(folder(tmp_path / "one", matrices() | {name: tensors[name]}, config()))
    assert f"{name} differs from" in error.message
    assert not nothing_is_allocated.read


def test_fp4_weights_declared_as_fp8_and_the_other_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, 64), "up_proj": (I, 64), "down_proj": (64, I)})
    tensors = matrices(dtype=UE8M0, is_fp4=True)
    assert "torch.int8" in str(refused(folder(tmp_path / "a", tensors, config())).found)
    assert "torch.int8, as" in str(refused(folder(tmp_path / "b", matrices(), config(expert_dtype="fp4"))).needed)


@pytest.mark.parametrize(("form", "columns"), [("mxfp8", 40), ("fp4", 40), ("fp4", 16)])
def test_groups_that_are_not_whole(form: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B47: K is counted in values, twice what is stored."""
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, columns), "up_proj": (I, columns), "down_proj": (columns, I)})
    tensors = matrices(dtype=UE8M0, is_fp4=form == "fp4", block=(1, 32))
    changes = {"expert_dtype": "fp4"} if form == "fp4" else {"weight_block_size": [1, 32]}
    assert f"K={columns}" in str(refused(folder(tmp_path, tensors, config(**changes))).found)


def test_a_block_across_gate_and_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (24, H), "up_proj": (24, H), "down_proj": (H, 24)})
    path = folder(tmp_path / "matrices", matrices(), config())
    with pytest.raises(CheckpointError, match="across gate and up") as caught:
        read_experts(path, 1)
    assert caught.value.hint == "read it with dequantize=True"
    assert "across gate and up" in refused(folder(tmp_path / "stacks", whole(matrices()), config())).message


@pytest.mark.parametrize("layout", [{"is_concatenated": False}, {"is_transposed": True, "fp4": True}])
def test_flags_that_no_blocks_fit(layout: dict[str, bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, 64), "up_proj": (I, 64), "down_proj": (64, I)})
    is_fp4 = layout.pop("fp4", False)
    tensors = whole(matrices(is_fp4=is_fp4))
    block = {"version": 1, "activation": "silu", "swiglu_limit": None, "swiglu_alpha": None, "has_gate": True}
    block |= {"has_bias": False, "is_transposed": False, "is_concatenated": True, "counts": [E], "shard": None}
    block |= {"tensors": ["gate_up_proj", "down_proj"], **layout}
    block["scheme"] = {"expert_dtype": "fp4"} if is_fp4 else {"block": [16, 16]}
    settings = config(expert_dtype="fp4" if is_fp4 else "fp8") | {"routed_experts": block}
    error = refused(folder(tmp_path, tensors, settings))
    assert ("alternate" if not is_fp4 else "contradict") in error.message


@pytest.mark.parametrize("role", ["gate_proj", "up_proj"])
def test_gate_and_up_quantized_with_different_inputs(role: str, tmp_path: Path) -> None:
    tensors = matrices(static=True)
    tensors[f"{AT}5.{role}.activation_scale"] = torch.tensor(9.0)
    error = refused(folder(tmp_path, tensors, config(activation_scheme="static")))
    assert error.message == f"{AT}5.up_proj.activation_scale differs from {AT}5.gate_proj.activation_scale"


@pytest.mark.parametrize("cut", [0, 9, 4000, -1])
def test_truncated_shard(cut: int, nothing_is_allocated: Spy, tmp_path: Path) -> None:
    path = folder(tmp_path, matrices(), config(), shards=3)
    shard = path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:cut])
    assert shard.name in refused(path).message
    assert not nothing_is_allocated.read


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_scheme": "sometimes"},
        {"activation_scheme": 1},
        {"weight_block_size": [128]},
        {"weight_block_size": [0, 128]},
        {"weight_block_size": [-1, 128]},
        {"weight_block_size": [128.0, 128]},
        {"weight_block_size": [True, 128]},
        {"weight_block_size": "128"},
        {"scale_fmt": "e8m0"},
        {"expert_dtype": "FP8"},
        {"expert_dtype": "int8"},
        {"dequantize": "no"},
        {"modules_to_not_convert": "lm_head"},
        {"modules_to_not_convert": [1]},
        {"ignored_layers": ["("]},
    ],
)
def test_values_of_the_config_that_are_none(changes: dict[str, Any], nothing_is_allocated: Spy, tmp_path: Path) -> None:
    error = refused(folder(tmp_path, matrices(), config(**changes)))
    assert "modules_to_not_convert" in error.message or next(iter(changes)) in error.message
    assert not nothing_is_allocated.read


def test_skipped_layers_that_were_converted_all_the_same(tmp_path: Path) -> None:
    path = folder(tmp_path, matrices(), config(modules_to_not_convert=["model.layers.1.mlp"]))
    assert "weight_scale_inv" in str(refused(path).found)


def test_our_block_and_the_config_disagree(tmp_path: Path) -> None:
    experts = rx.ExpertWeights(gate_up_proj=torch.randn(E, 2 * I, H), down_proj=torch.randn(E, H, I))
    rx.quantize_experts(experts, "fp8_block", block=fp8.BLOCK).save_checkpoint(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    for change_to in ({"weight_block_size": [32, 32]}, {"scale_fmt": "ue8m0"}, None):
        other = {"quantization_config": change_to and settings["quantization_config"] | change_to}
        file.write_text(json.dumps(settings | other))
        with pytest.raises(CheckpointError, match="declare different quantizations"):
            read_experts(tmp_path)


@pytest.mark.parametrize("scheme", [{"fmt": "fp9"}, {"block": [0, 16]}, {"more": 1}, "fp8", {"expert_dtype": "int8"}])
def test_a_scheme_of_ours_that_is_none(scheme: Any, tmp_path: Path) -> None:
    experts = rx.ExpertWeights(gate_up_proj=torch.randn(E, 2 * I, H), down_proj=torch.randn(E, H, I))
    rx.quantize_experts(experts, "fp8_block", block=fp8.BLOCK).save_checkpoint(tmp_path / "made")
    settings = json.loads((tmp_path / "made" / "config.json").read_text())
    block = settings["routed_experts"]
    block["scheme"] = block["scheme"] | scheme if isinstance(scheme, dict) else scheme
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        read_experts(folder(tmp_path / "changed", tensors, settings))
    assert caught.value.hint
