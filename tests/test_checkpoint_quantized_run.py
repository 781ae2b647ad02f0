"""Quantized folders end to end: written, read back bit for bit, and run, against float64 over the stored values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fp8_files as fp8
import pytest
import torch
from checkpoint_files import Spy
from fp8_files import BLOCK, UE8M0, E, H, I, config, folder, matrices, prefix, stacked, values
from moe_inputs import inputs
from oracle import experts_oracle, relative_error
from safetensors.torch import load_file, save_file
from test_checkpoint_quantized import bits

import routed_experts as rx
from routed_experts.errors import CheckpointError, UnsupportedExperts

SCHEMES: dict[str, dict[str, Any]] = {
    "fp8_block": {"fmt": "fp8_block", "block": BLOCK},
    "fp8_block, powers of two": {"fmt": "fp8_block", "block": BLOCK, "scale_dtype": UE8M0},
    "fp8_block, rows": {"fmt": "fp8_block", "block": (1, 32)},
    "fp8_block, rows, powers of two": {"fmt": "fp8_block", "block": (1, 32), "scale_dtype": UE8M0},
    "fp8_block, larger than the experts": {"fmt": "fp8_block"},
    "fp8_tensor": {"fmt": "fp8_tensor"},
    "fp8_tensor, powers of two": {"fmt": "fp8_tensor", "scale_dtype": UE8M0},
    "mxfp8": {"fmt": "mxfp8"},
    "mxfp4": {"fmt": "mxfp4"},
    "mxfp4, float scales": {"fmt": "mxfp4", "scale_dtype": torch.float32},
}
LAYOUTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "transposed": {"is_transposed": True},
    "interleaved": {"is_concatenated": False},
    "no gate": {"has_gate": False},
    "biases": {"has_bias": True},
}


def experts_of(scheme: str, layout: str, hidden: int = 64, inner: int = I) -> rx.ExpertWeights | None:
    """Random experts, or None where the format does not have the layout."""
    flags = dict(LAYOUTS[layout])
    has_bias, has_gate = flags.pop("has_bias", False), flags.pop("has_gate", True)
    rows_mix = SCHEMES[scheme].get("block", (128, 128))[0] > 1 and SCHEMES[scheme]["fmt"] == "fp8_block"
    if (layout == "transposed" and "fp4" in scheme) or (layout == "interleaved" and rows_mix):
        return None
    generator = torch.Generator().manual_seed(3)
    up, width = ("gate_up_proj", 2 * inner) if has_gate else ("up_proj", inner)
    shapes: dict[str, tuple[int, ...]] = {up: (4, width, hidden), "down_proj": (4, hidden, inner)}
    tensors = {name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    if flags.get("is_transposed"):
        tensors = {name: tensor.mT.contiguous() for name, tensor in tensors.items()}
    if has_bias:
        tensors |= {f"{up}_bias": torch.randn(4, width), "down_proj_bias": torch.randn(4, hidden)}
    plain = rx.ExpertWeights(**tensors, **flags, activation="silu" if has_gate else "relu2", has_gate=has_gate)
    return rx.quantize_experts(plain, **SCHEMES[scheme])


def assert_same(found: rx.ExpertWeights, wanted: rx.ExpertWeights) -> None:
    for flag in ("quantization", "has_gate", "is_transposed", "is_concatenated", "activation_name", "num_experts"):
        assert getattr(found, flag) == getattr(wanted, flag), flag
    for one, other in zip(found.tensors(), wanted.tensors(), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_round_trip(scheme: str, layout: str, tmp_path: Path) -> None:
    experts = experts_of(scheme, layout)
    if experts is None:
        with pytest.raises(rx.LayoutError):  # such experts cannot be made, so there is nothing to write
            _unmakeable(scheme, layout)
        return
    experts.save_checkpoint(tmp_path)
    assert_same(rx.ExpertWeights.from_checkpoint(tmp_path), experts)
    (tmp_path / "config.json").unlink()
    assert_same(rx.ExpertWeights.from_checkpoint(tmp_path / "model.safetensors"), experts)


def _unmakeable(scheme: str, layout: str) -> None:
    shapes = ((4, 64, 2 * I), (4, I, 64)) if layout == "transposed" else ((4, 2 * I, 64), (4, 64, I))
    plain = rx.ExpertWeights(gate_up_proj=torch.randn(shapes[0]), down_proj=torch.randn(shapes[1]), **LAYOUTS[layout])
    rx.quantize_experts(plain, **SCHEMES[scheme])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_tensors_with_the_config_alone_are_read_as_any_checkpoint(scheme: str, tmp_path: Path) -> None:
    """What others see: real names and a quantization_config; ours beyond it says how, never what."""
    experts = experts_of(scheme, "plain")
    assert experts is not None
    experts.save_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["quantization_config"]["quant_method"] == "fp8"
    del settings["routed_experts"]
    for file in tmp_path.iterdir():
        file.unlink()
    found = rx.ExpertWeights.from_checkpoint(folder(tmp_path, tensors, settings))
    for one, other in zip(found.tensors(), experts.tensors(), strict=True):
        assert one is None if other is None else torch.equal(bits(one), bits(other))
    if scheme != "fp8_block, rows, powers of two":  # for which mxfp8 is the other name
        assert found.quantization == experts.quantization


def test_a_folder_of_ours_without_its_block_of_ours_keeps_the_layout(tmp_path: Path) -> None:
    experts = experts_of("fp8_tensor", "interleaved")
    assert experts is not None
    experts.save_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(rx.ExpertWeights.from_checkpoint(tmp_path), experts)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantized_from_the_folder(scheme: str, layout: str, tmp_path: Path) -> None:
    experts = experts_of(scheme, layout)
    if experts is None:
        return
    experts.save_checkpoint(tmp_path)
    plain = rx.ExpertWeights.from_checkpoint(tmp_path, dequantize=True)
    assert (plain.quantization, plain.dtype) == (None, torch.bfloat16)
    x, index, weights = inputs(hidden=64)
    wanted = rx.run_experts(x, index, weights, experts, backend="eager")
    found = rx.run_experts(x.bfloat16(), index, weights, plain, backend="eager")
    assert relative_error(found, wanted.double()) < 2e-2


def test_shares_and_static_scales_round_trip(tmp_path: Path) -> None:
    tensors = matrices(static=True)
    path = folder(tmp_path / "all", tensors, config(activation_scheme="static"), shards=2)
    share = rx.ExpertWeights.from_checkpoint(path, 1, rank=1, world=4)
    assert share.shard == (1, 4)
    assert torch.equal(share.up_activation_scale, torch.arange(5, 9) * 0.25)
    share.save_checkpoint(tmp_path / "share")
    again = rx.ExpertWeights.from_checkpoint(tmp_path / "share")
    assert again.shard == (1, 4)
    assert_same(again, share)


def test_what_cannot_be_stored_is_still_refused(tmp_path: Path) -> None:
    experts = experts_of("fp8_block", "plain")
    assert experts is not None
    tensors = {name: tensor for name, tensor in experts._tensors.items() if tensor is not None}
    own = rx.ExpertWeights(**tensors, quantization=experts.quantization, gate=lambda u: u[:, :I])
    with pytest.raises(UnsupportedExperts):
        own.save_checkpoint(tmp_path / "gate")
    assert not (tmp_path / "gate").exists()


def written_by_us(path: Path) -> Path:
    """Two layers quantized and saved by this package, put together as a sharded folder with names per expert."""
    generator, where = torch.Generator().manual_seed(5), {}
    for layer in (0, 1):
        up = torch.randn(E, 2 * I, H, generator=generator) / H**0.5
        down = torch.randn(E, H, I, generator=generator) / I**0.5
        plain = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
        rx.quantize_experts(plain, "fp8_block", block=BLOCK).save_checkpoint(path / f"layer{layer}")
        held = load_file(path / f"layer{layer}" / "model.safetensors")
        stacks = {name.rpartition(".")[2]: tensor for name, tensor in held.items()}
        for shard, experts in enumerate((range(E // 2), range(E // 2, E))):
            file, tensors = f"model-{2 * layer + shard + 1:05d}-of-00004.safetensors", {}
            for expert in experts:
                gate, up = stacks["gate_up_proj"][expert].view(torch.uint8).chunk(2)
                scales = stacks["gate_up_proj_scale_inv"][expert].chunk(2)
                base = f"{prefix(layer)}{expert}."
                tensors |= {base + "gate_proj.weight": gate, base + "up_proj.weight": up}
                tensors[base + "down_proj.weight"] = stacks["down_proj"][expert].view(torch.uint8)
                tensors = {name: t.view(torch.float8_e4m3fn) if t.itemsize == 1 else t for name, t in tensors.items()}
                for role, scale in zip(("gate_proj", "up_proj"), scales, strict=True):
                    tensors[base + role + ".weight_scale_inv"] = scale
                tensors[base + "down_proj.weight_scale_inv"] = stacks["down_proj_scale_inv"][expert]
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
            where |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (path / "config.json").write_text(json.dumps(config()))
    return path


def written_by_hand(path: Path) -> Path:
    return folder(path, matrices((0, 1)), config(), shards=4)


@pytest.mark.parametrize("backend", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("make", [written_by_us, written_by_hand])
def test_folder_in_the_style_of_deepseek_v3_runs(make: Any, layer: int, backend: str, tmp_path: Path) -> None:
    path = make(tmp_path)
    experts = rx.ExpertWeights.from_checkpoint(path, layer)
    stored = {}
    for shard in path.glob("*.safetensors"):
        stored |= load_file(shard)
    tensors = stacked(stored, layer)
    exact = {role: values(tensors[role], tensors[role + "_scale_inv"], BLOCK) for role in ("gate_up_proj", "down_proj")}
    x, index, weights = inputs(tokens=9, top_k=3, experts=E, hidden=H)
    wanted = experts_oracle(x, index, weights, exact, {})
    found = rx.run_experts(x, index, weights, experts, backend=backend)
    assert relative_error(found, wanted) < 1e-5
    experts.save_checkpoint(path / "again")
    assert_same(rx.ExpertWeights.from_checkpoint(path / "again"), experts)


@pytest.mark.parametrize("block", [BLOCK, None])
@pytest.mark.parametrize("is_fp4", [False, True])
def test_other_formats_run(
    is_fp4: bool, block: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B45 and B47, to the end."""
    monkeypatch.setattr(fp8, "ROLES", {"gate_proj": (I, 64), "up_proj": (I, 64), "down_proj": (64, I)})
    tensors = matrices(block=block, dtype=UE8M0 if is_fp4 else torch.float32, is_fp4=is_fp4)
    settings = config(weight_block_size=block, expert_dtype="fp4" if is_fp4 else "fp8")
    experts = rx.ExpertWeights.from_checkpoint(folder(tmp_path, tensors, settings), 1)
    assert (experts.hidden_size, experts.intermediate_size) == (64, I)
    exact = {}
    for role in fp8.ROLES:
        names = [f"{prefix(1)}{expert}.{role}.weight" for expert in range(E)]
        exact[role] = torch.stack([values(tensors[name], tensors[name + "_scale_inv"], block) for name in names])
    exact["gate_up_proj"] = torch.cat([exact.pop("gate_proj"), exact.pop("up_proj")], dim=1)
    x, index, weights = inputs(experts=E, hidden=64)
    wanted = experts_oracle(x, index, weights, exact, {})
    assert relative_error(rx.run_experts(x, index, weights, experts, backend="eager"), wanted) < 1e-5


def test_e8m0_bytes_are_never_cast_as_numbers(tmp_path: Path) -> None:
    """B46: 0.5, 1 and 2 as bytes, as the dtype and as float32 are one and the same."""
    powers = torch.tensor([126, 127, 128], dtype=torch.uint8).repeat(2, 1)
    found = []
    for dtype in (torch.uint8, UE8M0, torch.float32):
        tensors = matrices(dtype=UE8M0)
        for name in [name for name in tensors if "scale" in name]:
            raw = powers.clone() if tensors[name].shape == powers.shape else tensors[name].view(torch.uint8)
            tensors[name] = raw if dtype == torch.uint8 else raw.view(UE8M0).to(dtype)
        path = folder(tmp_path / str(dtype), tensors, config(scale_fmt="ue8m0"))
        found.append(rx.ExpertWeights.from_checkpoint(path, 1).up_scale.float())
    assert torch.equal(found[0], torch.tensor([0.5, 1.0, 2.0]).expand(E, 4, 3))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_failed_check_leaves_nothing_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = matrices()
    tensors[f"{prefix(1)}3.down_proj.weight_scale_inv"][0, 0] = 0
    path = folder(tmp_path, tensors, config())
    spy = Spy().install(monkeypatch)
    with pytest.raises(CheckpointError, match=r"3\.down_proj\.weight_scale_inv"):
        rx.ExpertWeights.from_checkpoint(path, 1)
    assert all("scale" in name for name in spy.read)
    rx.ExpertWeights.from_checkpoint(path, 1, rank=1, world=4)  # whose share has nothing wrong
