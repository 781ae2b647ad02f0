"""Checkpoints built by hand: what their layouts are read as, and that only what is needed is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    CONFIG,
    PREFIX,
    E,
    H,
    I,
    Spy,
    gate_up,
    matrices,
    save,
    save_sharded,
    save_shifted,
    stack,
)
from routed_experts.checkpoint import read_experts
from routed_experts.errors import CheckpointError
from safetensors.torch import save_file


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy().install(monkeypatch)


@pytest.mark.parametrize("place", [save, save_sharded])
def test_one_matrix_per_expert_is_stacked_gate_above_up(place: Any, tmp_path: Path) -> None:
    tensors = matrices()
    read = read_experts(place(tmp_path, tensors), 1)
    assert torch.equal(read.pop("gate_up_proj"), gate_up(tensors))
    assert torch.equal(read.pop("down_proj"), stack(tensors, "down_proj"))
    assert read == {
        "activation": "silu",
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "has_gate": True,
        "is_transposed": False,
        "is_concatenated": True,
        "num_experts": E,
    }


@pytest.mark.parametrize(
    "prefix",
    ["layers.1.experts.", "backbone.layers.1.mixer.experts.", "a.language_model.layers.1.ffn.experts."],
)
def test_prefixes_differ_and_shared_or_mtp_experts_are_not_taken(prefix: str, tmp_path: Path) -> None:
    tensors = matrices(prefix=prefix)
    others = {prefix.replace("experts.", "shared_experts.") + "up_proj.weight": torch.ones(I, H)}
    others |= {f"mtp.{name.replace('layers.1.', 'layers.7.')}": tensor for name, tensor in tensors.items()}
    others |= {prefix + "e_score_correction_bias": torch.ones(E)}
    folder = save(tmp_path, tensors | {name: tensor.clone() for name, tensor in others.items()})
    read = read_experts(folder, 1)
    assert torch.equal(read["down_proj"][3], tensors[f"{prefix}3.down_proj.weight"])
    with pytest.raises(CheckpointError) as caught:
        read_experts(folder, 7)
    assert caught.value.found == "experts in layers 1"


def test_w1_is_gate_w3_is_up_w2_is_down(tmp_path: Path) -> None:
    tensors = matrices()
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = {
        name.replace(long, short): t
        for name, t in tensors.items()
        for long, short in names.items()
        if long in name
    }
    read = read_experts(save(tmp_path, renamed, CONFIG | {"model_type": "mixtral"}), 1)
    assert torch.equal(read["gate_up_proj"], gate_up(tensors))
    assert torch.equal(read["down_proj"], stack(tensors, "down_proj"))


def test_biases_per_expert(tmp_path: Path) -> None:
    tensors = matrices()
    for name, tensor in list(tensors.items()):
        tensors[name.replace(".weight", ".bias")] = tensor[:, 0].clone()
    read = read_experts(save(tmp_path, tensors), 1)
    assert torch.equal(read["gate_up_proj_bias"], gate_up(tensors)[..., 0])
    assert torch.equal(read["down_proj_bias"], stack(tensors, "down_proj")[..., 0])


def test_matrices_of_a_family_with_odd_stacks_are_plain_linears(tmp_path: Path) -> None:
    """The family's transposed, interleaved stacks are no matter where each expert has matrices of its own."""
    tensors = matrices()
    biases = {name.replace(".weight", ".bias"): tensor[:, 0].clone() for name, tensor in tensors.items()}
    read = read_experts(save(tmp_path, tensors | biases, CONFIG | {"model_type": "gpt_oss"}), 1)
    assert (read["is_transposed"], read["is_concatenated"]) == (False, True)
    assert (read["swiglu_limit"], read["swiglu_alpha"]) == (7.0, 1.702)
    assert torch.equal(read["gate_up_proj"], gate_up(tensors))


def test_the_text_model_of_a_composite_speaks_first(tmp_path: Path) -> None:
    text = {"model_type": "gemma4_text", "hidden_activation": "gelu_pytorch_tanh", "num_experts": E}
    config = {"model_type": "gemma4", "hidden_act": "relu", "num_experts": 99, "text_config": text}
    assert read_experts(save(tmp_path, matrices(), config), 1)["activation"] == "gelu_pytorch_tanh"


def test_stacked_up_proj_without_gate_is_not_gated(tmp_path: Path) -> None:
    tensors = {PREFIX + "up_proj": torch.randn(E, I, H), PREFIX + "down_proj": torch.randn(E, H, I)}
    read = read_experts(save(tmp_path, tensors, CONFIG | {"hidden_act": "relu2"}), 1)
    assert (read["has_gate"], read["activation"]) == (False, "relu2")
    assert torch.equal(read["up_proj"], tensors[PREFIX + "up_proj"])


def test_alternating_rows_by_name(tmp_path: Path) -> None:
    """One family stores w13_weight with gate and up rows in turn: the flag says so, the bytes stay (B13)."""
    tensors = {PREFIX + "w13_weight": torch.randn(E, 2 * I, H), PREFIX + "w2_weight": torch.randn(E, H, I)}
    read = read_experts(save(tmp_path, tensors, CONFIG | {"model_type": "inkling_mm_model"}), 1)
    assert read["is_concatenated"] is False
    assert torch.equal(read["gate_up_proj"], tensors[PREFIX + "w13_weight"])


def test_square_experts_keep_the_declared_orientation(tmp_path: Path) -> None:
    """H = I fits both ways without a gate: only the declaration speaks."""
    tensors = {PREFIX + "up_proj": torch.randn(E, H, H), PREFIX + "down_proj": torch.randn(E, H, H)}
    for model_type, transposed in (("my_moe", False), ("llama4", True)):
        folder = save(tmp_path / model_type, tensors, CONFIG | {"model_type": model_type})
        assert read_experts(folder, 1)["is_transposed"] is transposed


@pytest.mark.parametrize("shift", [1, 2, 8, 14])
@pytest.mark.parametrize("share", [{}, {"rank": 1, "world": 2}])
def test_data_at_any_byte_of_the_file(shift: int, share: dict[str, int], tmp_path: Path) -> None:
    """Mapped weights at an address that is no multiple of 16, or of their size, equal aligned ones (B10)."""
    tensors = {PREFIX + "gate_up_proj": torch.randn(E, 2 * I, H), PREFIX + "down_proj": torch.randn(E, H, I)}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    save_shifted(tmp_path / "model.safetensors", tensors, shift)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    read = read_experts(tmp_path, 1, **share)
    for name in ("gate_up_proj", "down_proj"):
        aligned = tensors[PREFIX + name][E // 2 if share else 0 :].clone()
        assert read[name].data_ptr() % read[name].element_size() == 0
        assert torch.equal(
            read[name] @ torch.ones(aligned.shape[2], 3).bfloat16(),
            aligned @ torch.ones(aligned.shape[2], 3).bfloat16(),
        )


def test_only_the_wanted_layer_is_read(spy: Spy, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted, other = matrices(), matrices(prefix="model.layers.0.mlp.experts.")
    folder = save_sharded(tmp_path, wanted | other | {"model.embed.weight": torch.ones(64, H)})
    with caplog.at_level(logging.DEBUG, logger="routed_experts"):
        read_experts(folder, 1)
    assert sorted(spy.read) == sorted(wanted)
    assert f"read {4 * E * 3 * I * H} bytes" in caplog.text


def test_shards_without_experts_of_the_layer_stay_closed(spy: Spy, tmp_path: Path) -> None:
    tensors = matrices()
    folder = save_sharded(tmp_path, tensors, shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    save_file({"model.norm.weight": torch.ones(H)}, folder / "model-norm.safetensors")
    index["weight_map"]["model.norm.weight"] = "model-norm.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read_experts(folder, 1)
    assert sorted(spy.opened) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize("rank", range(2))
def test_a_rank_reads_its_share(rank: int, spy: Spy, tmp_path: Path) -> None:
    tensors = matrices()
    full = {PREFIX + "gate_up_proj": gate_up(tensors), PREFIX + "down_proj": stack(tensors, "down_proj")}
    mine = slice(rank * E // 2, (rank + 1) * E // 2)
    for name, content in (("matrices", tensors), ("stacked", full)):
        spy.read.clear()
        read = read_experts(save(tmp_path / name, content), 1, rank=rank, world=2)
        assert (read["num_experts"], read["shard"]) == (E // 2, (rank, 2))
        assert torch.equal(read["gate_up_proj"], gate_up(tensors)[mine])
        assert torch.equal(read["down_proj"], stack(tensors, "down_proj")[mine])
        wanted = f"[{mine.start}:{mine.stop}]"
        if name == "stacked":
            assert sorted(spy.read) == [PREFIX + "down_proj" + wanted, PREFIX + "gate_up_proj" + wanted]
        else:
            assert {int(read_name.removeprefix(PREFIX)[0]) for read_name in spy.read} == set(range(E)[mine])


@pytest.mark.parametrize("content", ["matrices", "stacked"])
def test_device(content: str, tmp_path: Path) -> None:
    tensors = matrices()
    full = {PREFIX + "gate_up_proj": gate_up(tensors), PREFIX + "down_proj": stack(tensors, "down_proj")}
    read = read_experts(save(tmp_path, tensors if content == "matrices" else full), 1, device="meta")
    assert read["down_proj"].device.type == "meta"
