"""read_experts on FP8 and FP4 checkpoints as they are found: names, formats, scale dtypes, shares, bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fp8_files as fp8
import pytest
import torch
from checkpoint_files import Spy
from fp8_files import BLOCK, UE8M0, E, H, I, config, folder, matrices, prefix, stacked, values

from routed_experts.checkpoint import read_experts
from routed_experts.errors import CheckpointError
from routed_experts.quantization import Quantization

SCALES = ("gate_up_proj_scale_inv", "down_proj_scale_inv")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Raw bytes: two NaN or two zeros are then told apart."""
    return tensor.contiguous().view(torch.uint8)


def assert_reads(path: Path, wanted: dict[str, torch.Tensor], quantization: Quantization, layer: int = 1) -> None:
    read = read_experts(path, layer)
    assert read["quantization"] == quantization
    for role, tensor in wanted.items():
        assert read[role].dtype == tensor.dtype, role
        assert read[role].shape == tensor.shape, role
        assert torch.equal(bits(read[role]), bits(tensor)), role


@pytest.mark.parametrize("shards", [0, 3])
@pytest.mark.parametrize("layer", [0, 1])
def test_folder_in_the_style_of_deepseek_v3(layer: int, shards: int, tmp_path: Path) -> None:
    tensors = matrices((0, 1))
    path = folder(tmp_path, tensors, config(), shards=shards)
    assert_reads(path, stacked(tensors, layer), Quantization("fp8_block", BLOCK), layer)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale", "qscale_weight"])
@pytest.mark.parametrize("names", [None, fp8.W_NAMES])
def test_names_of_scales_and_matrices(names: dict[str, str] | None, suffix: str, tmp_path: Path) -> None:
    path = folder(tmp_path, matrices(suffix=suffix, names=names), config(), shards=2)
    assert_reads(path, stacked(matrices()), Quantization("fp8_block", BLOCK))


@pytest.mark.parametrize("ends", ["{}_scale_inv", "{}.weight_scale_inv", "{}.scale", "{}.qscale_weight"])
def test_stacks_on_disk(ends: str, tmp_path: Path) -> None:
    wanted = stacked(matrices())
    named = {
        prefix(1) + (ends.format(role.removesuffix("_scale_inv")) if role in SCALES else role): tensor
        for role, tensor in wanted.items()
    }
    assert_reads(folder(tmp_path, named, config()), wanted, Quantization("fp8_block", BLOCK))


@pytest.mark.parametrize("block", [BLOCK, (1, 32)])
@pytest.mark.parametrize("scale_fmt", ["ue8m0", "absent"])
@pytest.mark.parametrize("dtype", [UE8M0, torch.uint8])
def test_ue8m0_scales_as_their_dtype_or_as_bytes(
    dtype: torch.dtype, scale_fmt: str, block: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, 64), "up_proj": (I, 64), "down_proj": (64, I)})
    tensors = matrices(block=block, dtype=dtype)
    path = folder(tmp_path, tensors, config(scale_fmt=scale_fmt, weight_block_size=list(block)))
    wanted = stacked(tensors)
    wanted |= {role: wanted[role].view(UE8M0) for role in SCALES}
    assert_reads(path, wanted, Quantization("fp8_block" if block == BLOCK else "mxfp8", block, scale_dtype=UE8M0))


def test_ue8m0_stored_as_float32_becomes_the_same_powers_of_two(tmp_path: Path) -> None:
    """B46: the exponents are taken, nothing is rounded."""
    tensors = matrices(dtype=UE8M0)
    tensors[f"{prefix(1)}0.gate_proj.weight_scale_inv"].view(torch.uint8)[0, :3] = torch.tensor([0, 1, 254]).byte()
    wanted = stacked(tensors)
    as_floats = {name: tensor.float() if "scale" in name else tensor for name, tensor in tensors.items()}
    path = folder(tmp_path, as_floats, config(scale_fmt="ue8m0"))
    assert_reads(path, wanted, Quantization("fp8_block", BLOCK, scale_dtype=UE8M0))


def test_float32_scales_of_one_row_blocks_are_no_mxfp8(tmp_path: Path) -> None:
    shapes = {"weight_block_size": [1, 8]}
    path = folder(tmp_path, matrices(block=(1, 8)), config(**shapes))
    assert_reads(path, stacked(matrices(block=(1, 8))), Quantization("fp8_block", (1, 8)))


@pytest.mark.parametrize("place", ["block", "top", "both"])
@pytest.mark.parametrize("dtype", [UE8M0, torch.float32])
def test_fp4_declared_at_either_place(
    dtype: torch.dtype, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B47, and the style of DeepSeek V4: K is twice what is stored; the block size of the config is not FP4's."""
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, 64), "up_proj": (I, 64), "down_proj": (64, I)})
    tensors = matrices(dtype=dtype, is_fp4=True, suffix="scale", names=fp8.W_NAMES)
    said = {"expert_dtype": "fp4", "scale_fmt": "float" if dtype == torch.float32 else "ue8m0"}
    settings = config(**(said if place != "top" else {}))
    settings |= said if place == "top" else {"expert_dtype": "fp8", "scale_fmt": "float"} if place == "both" else {}
    path = folder(tmp_path, tensors, settings | {"model_type": "deepseek_v4"}, shards=3)
    wanted = stacked(matrices(dtype=dtype, is_fp4=True))
    assert wanted["gate_up_proj"].shape == (E, 2 * I, 32)
    assert_reads(path, wanted, Quantization("mxfp4", scale_dtype=dtype))


def test_packed_dtype_of_torch_is_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, 64), "up_proj": (I, 64), "down_proj": (64, I)})
    tensors = matrices(dtype=UE8M0, is_fp4=True)
    packed = {
        name: tensor.view(torch.float4_e2m1fn_x2) if tensor.dtype == torch.int8 else tensor
        for name, tensor in tensors.items()
    }
    path = folder(tmp_path / "matrices", packed, config(expert_dtype="fp4"))
    assert_reads(path, stacked(tensors), Quantization("mxfp4"))
    whole = {prefix(1) + role: tensor for role, tensor in stacked(tensors).items()}
    for role in ("gate_up_proj", "down_proj"):
        whole[prefix(1) + role] = whole[prefix(1) + role].view(torch.float4_e2m1fn_x2)
    path = folder(tmp_path / "stacks", whole, config(expert_dtype="fp4"))
    assert_reads(path, stacked(tensors), Quantization("mxfp4"))
    assert torch.equal(read_experts(path, 1, rank=1, world=4)["down_proj"], stacked(tensors)["down_proj"][4:8])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale_per_matrix(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """B45: (1, 1) under a null block size is no grid; gate and up keep a scale each."""
    tensors = matrices(block=None)
    tensors = {name: t.to(dtype).reshape(shape) if "scale" in name else t for name, t in tensors.items()}
    wanted = stacked(tensors)
    wanted |= {role: wanted[role].float() for role in SCALES}
    assert wanted["gate_up_proj_scale_inv"].shape == (E, 2, 1)
    assert_reads(folder(tmp_path, tensors, config(weight_block_size=None)), wanted, Quantization("fp8_tensor"))


def test_static_scales_of_inputs(tmp_path: Path) -> None:
    tensors = matrices(static=True)
    quantization = Quantization("fp8_block", BLOCK, "static")
    wanted = stacked(tensors)
    wanted["gate_up_proj_activation_scale"] = torch.arange(1, E + 1) * 0.25
    wanted["down_proj_activation_scale"] = torch.arange(1, E + 1) * 0.25 + 1
    path = folder(tmp_path / "matrices", tensors, config(activation_scheme="STATIC"))
    assert_reads(path, wanted, quantization)
    named = {prefix(1) + role: tensor for role, tensor in wanted.items()}
    assert_reads(folder(tmp_path / "stacks", named, config(activation_scheme="static")), wanted, quantization)


def test_defaults_of_the_block(tmp_path: Path) -> None:
    path = folder(tmp_path, matrices(block=(128, 128)), config(weight_block_size="absent", activation_scheme="absent"))
    assert_reads(path, stacked(matrices(block=(128, 128))), Quantization("fp8_block"))


def test_without_a_gate(tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in matrices().items() if "gate_proj" not in name}
    settings = config() | {"model_type": "nemotron_h", "mlp_hidden_act": "relu2"}
    read = read_experts(folder(tmp_path, tensors, settings), 1)
    assert (read["has_gate"], read["up_proj_scale_inv"].shape) == (False, (E, 2, 3))
    assert torch.equal(bits(read["up_proj"]), bits(stacked(matrices())["gate_up_proj"][:, I:]))


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    "pattern", ["model.layers.1.mlp.experts", "model.layers.1.mlp", "mlp.experts", r"model\.layers\.[12]\.mlp.*"]
)
def test_layers_that_were_not_converted_are_plain(key: str, pattern: str, tmp_path: Path) -> None:
    tensors = matrices((0,))
    plain = {name: t.bfloat16() for name, t in matrices((1,)).items() if "scale" not in name}
    skips = ["lm_head", "model.layers.10.mlp.experts", pattern]
    path = folder(tmp_path, tensors | plain, config(**{key: skips}))
    read = read_experts(path, 1)
    assert "quantization" not in read
    assert read["gate_up_proj"].dtype == torch.bfloat16
    if pattern != "mlp.experts":
        assert read_experts(path, 0)["quantization"] == Quantization("fp8_block", BLOCK)


@pytest.mark.parametrize("pattern", ["model.layers.1", "model.layers.1.mlp", "layers.10.mlp.experts.1", "mlp"])
def test_names_end_where_a_module_ends(pattern: str, tmp_path: Path) -> None:
    """Layer 1 is not layer 10."""
    path = folder(tmp_path, matrices((10,)), config(modules_to_not_convert=[pattern]))
    assert read_experts(path, 10)["quantization"] == Quantization("fp8_block", BLOCK)


def test_layers_of_which_every_matrix_was_skipped_are_plain(tmp_path: Path) -> None:
    plain = {name: t.bfloat16() for name, t in matrices().items() if "scale" not in name}
    each = [name.removesuffix(".weight") for name in plain]
    path = folder(tmp_path / "all", plain, config(modules_to_not_convert=each))
    assert read_experts(path, 1)["down_proj"].dtype == torch.bfloat16
    path = folder(tmp_path / "some", plain, config(modules_to_not_convert=each[:-1]))
    with pytest.raises(CheckpointError, match=r"wrong dtype|not complete"):
        read_experts(path, 1)


@pytest.mark.parametrize("stacks", [False, True])
def test_a_rank_reads_its_experts_and_their_scales_alone(
    stacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = matrices()
    wanted = stacked(tensors)
    if stacks:
        tensors = {prefix(1) + role: tensor for role, tensor in wanted.items()}
    path = folder(tmp_path, tensors, config(), shards=3)
    spy = Spy().install(monkeypatch)
    read = read_experts(path, 1, rank=1, world=8)
    assert (read["num_experts"], read["shard"]) == (2, (1, 8))
    for role, tensor in wanted.items():
        assert torch.equal(bits(read[role]), bits(tensor[2:4])), role
    if stacks:
        assert sorted(spy.read) == sorted(f"{name}[2:4]" for name in tensors)
    else:
        assert sorted(spy.read) == sorted(name for name in tensors if name.split(".")[5] in ("2", "3"))


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize("stacks", [False, True])
def test_every_byte_is_read_once_and_scales_first(
    stacks: bool, dequantize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = matrices()
    if stacks:
        tensors = {prefix(1) + role: tensor for role, tensor in stacked(tensors).items()}
    path = folder(tmp_path, tensors, config())
    spy = Spy().install(monkeypatch)
    read_experts(path, 1, dequantize=dequantize)
    assert len(spy.read) == len(set(spy.read))
    assert {name.partition("[")[0] for name in spy.read} == tensors.keys()
    first_weight = next(number for number, name in enumerate(spy.read) if "scale" not in name)
    assert not [name for name in spy.read[first_weight:] if "scale" in name]


FORMATS: dict[str, dict[str, Any]] = {
    "blocks": {"block": BLOCK},
    "blocks of powers of two": {"block": BLOCK, "dtype": UE8M0},
    "groups": {"block": (1, 32), "dtype": torch.uint8},
    "tensor": {"block": None},
    "fp4": {"dtype": UE8M0, "is_fp4": True},
}


@pytest.mark.parametrize("stacks", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_to_bfloat16(name: str, stacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in ("groups", "fp4"):
        monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, 64), "up_proj": (I, 64), "down_proj": (64, I)})
    made = FORMATS[name]
    tensors, block = matrices(static=not stacks, **made), made.get("block", BLOCK)
    wanted = stacked(tensors)
    if stacks:
        tensors = {prefix(1) + role: tensor for role, tensor in wanted.items()}
    settings = config(
        weight_block_size=None if block is None else list(block),
        expert_dtype="fp4" if "is_fp4" in made else "fp8",
        activation_scheme="dynamic" if stacks else "static",
    )
    read = read_experts(folder(tmp_path, tensors, settings), 1, dequantize=True, rank=1, world=2)
    assert not [key for key in read if "scale" in key or key == "quantization"]
    for role in ("gate_up_proj", "down_proj"):
        weight, scale = wanted[role][E // 2 :], wanted[role + "_scale_inv"][E // 2 :]
        if block is None and role == "gate_up_proj":
            halves = zip(weight.view(torch.uint8).chunk(2, dim=1), scale.split(1, dim=1), strict=True)
            exact = torch.cat([values(w.view(weight.dtype), s, None) for w, s in halves], dim=1)
        else:
            exact = values(weight, scale, block)
        assert torch.equal(read[role], exact.to(torch.bfloat16)), role


def test_blocks_are_those_of_the_config_and_end_short_in_each_half(tmp_path: Path) -> None:
    """With 48 rows and blocks of 32 the second has 16; a grid of two never means two blocks of 24."""
    roles = {"gate_proj": (48, 40), "up_proj": (48, 40), "down_proj": (40, 48)}
    generator, tensors = torch.Generator().manual_seed(1), {}
    for expert in range(E):
        for role, shape in roles.items():
            base = f"{prefix(1)}{expert}.{role}."
            tensors[base + "weight"] = fp8.fp8(shape, generator)
            tensors[base + "weight_scale_inv"] = fp8.scales((2, 2), torch.float32, generator)
    path = folder(tmp_path, tensors, config(weight_block_size=[32, 32]))
    read = read_experts(path, 1, dequantize=True)
    for half, role in enumerate(("gate_proj", "up_proj")):
        base = f"{prefix(1)}5.{role}.weight"
        exact = values(tensors[base], tensors[base + "_scale_inv"], (32, 32)).to(torch.bfloat16)
        assert torch.equal(read["gate_up_proj"][5, 48 * half : 48 * half + 48], exact)


def test_weights_and_scales_go_to_the_device(tmp_path: Path) -> None:
    read = read_experts(folder(tmp_path, matrices(static=True), config(activation_scheme="static")), 1, device="meta")
    tensors = {role: tensor for role, tensor in read.items() if isinstance(tensor, torch.Tensor)}
    assert len(tensors) == 6
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}


def test_memory_of_dequantizing_is_bounded(tmp_path: Path) -> None:
    """Beside the result there is never more than one expert in float32."""
    path = folder(tmp_path, matrices(), config())
    largest = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
                largest.append(result.numel())
            return result

    with Watch():
        read_experts(path, 1, dequantize=True)
    assert 0 < max(largest) <= 2 * I * H
