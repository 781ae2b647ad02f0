"""Checkpoints that are refused: incomplete, contradictory, quantized or broken, before any data is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import CONFIG, PREFIX, E, H, I, Spy, gate_up, matrices, save, save_sharded
from safetensors.torch import save_file

from routed_experts.checkpoint import read_experts
from routed_experts.errors import CheckpointError, UnsupportedScheme


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy().install(monkeypatch)


def _refused(path: Path, layer: int = 1, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_experts(path, layer, **options)
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint
    return caught.value


def test_six_experts_on_four_ranks_name_both_numbers(tmp_path: Path) -> None:
    """B24."""
    tensors = {PREFIX + "gate_up_proj": torch.ones(6, 2 * I, H), PREFIX + "down_proj": torch.ones(6, H, I)}
    error = _refused(save(tmp_path, tensors, CONFIG | {"num_experts": 6}), rank=0, world=4)
    assert "6 experts" in str(error.found)
    assert "world=4" in str(error.found)


@pytest.mark.parametrize("share", [{"rank": 0}, {"world": 2}, {"rank": 2, "world": 2}, {"rank": -1, "world": 2}])
def test_rank_and_world_must_name_a_share(share: dict[str, int], tmp_path: Path) -> None:
    _refused(save(tmp_path, matrices()), **share)


def test_missing_experts_are_listed(spy: Spy, tmp_path: Path) -> None:
    """B43: an incomplete checkpoint is refused at load, by the number of the expert."""
    tensors = matrices()
    del tensors[PREFIX + "2.up_proj.weight"]
    assert _refused(save(tmp_path / "a", tensors)).found == "expert 2 has no up_proj"
    tensors = {name: tensor for name, tensor in matrices().items() if ".3." not in name}
    found = "expert 3 has no down_proj, expert 3 has no gate_proj, expert 3 has no up_proj"
    assert _refused(save(tmp_path / "b", tensors)).found == found
    tensors = {name: tensor for name, tensor in matrices().items() if "gate_proj" not in name}
    assert "expert 0 has no gate_proj" in str(_refused(save(tmp_path / "c", tensors)).found)
    assert not spy.read


def test_missing_stack_or_bias_is_named(tmp_path: Path) -> None:
    stacked = {"gate_up_proj": torch.ones(E, H, 2 * I), "down_proj": torch.ones(E, I, H)}
    tensors = {PREFIX + role: tensor for role, tensor in stacked.items()}
    oss = CONFIG | {"model_type": "gpt_oss"}
    assert "gate_up_proj_bias" in str(_refused(save(tmp_path / "a", tensors, oss)).needed)
    del tensors[PREFIX + "down_proj"]
    assert "(down_proj missing)" in str(_refused(save(tmp_path / "b", tensors)).needed)


@pytest.mark.parametrize("odd", [torch.ones(I, H, dtype=torch.bfloat16), torch.ones(I + 1, H), torch.ones(())])
def test_an_expert_unlike_the_others_is_named(odd: torch.Tensor, spy: Spy, tmp_path: Path) -> None:
    tensors = matrices() | {PREFIX + "1.up_proj.weight": odd}
    error = _refused(save(tmp_path, tensors))
    assert f"{PREFIX}1.up_proj.weight differs" in error.message
    assert not spy.read


def test_mixed_dtypes_between_stacks(tmp_path: Path) -> None:
    tensors = {
        PREFIX + "gate_up_proj": torch.ones(E, 2 * I, H),
        PREFIX + "down_proj": torch.ones(E, H, I).bfloat16(),
    }
    assert "down_proj torch.bfloat16" in str(_refused(save(tmp_path, tensors)).found)


@pytest.mark.parametrize(
    ("up", "down"),
    [
        ((E, H, 2 * I), (E, I, H)),
        ((E, 2 * I, H), (E, H, I + 1)),
        ((E, 2 * I - 1, H), (E, H, I)),
        ((E, 2 * I * H), (E, H, I)),
        ((E - 1, 2 * I, H), (E, H, I)),
        ((E, 0, H), (E, H, 0)),
        ((E,), (E,)),
    ],
)
def test_shapes_that_contradict_the_declared_layout(up: tuple[int, ...], down: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {PREFIX + "gate_up_proj": torch.ones(up), PREFIX + "down_proj": torch.ones(down)}
    assert "contradict the declared layout" in _refused(save(tmp_path, tensors)).message


def test_bias_of_the_wrong_width(tmp_path: Path) -> None:
    tensors = {PREFIX + "gate_up_proj": torch.ones(E, 2 * I, H), PREFIX + "down_proj": torch.ones(E, H, I)}
    tensors |= {PREFIX + "gate_up_proj_bias": torch.ones(E, I), PREFIX + "down_proj_bias": torch.ones(E, H)}
    assert "contradict" in _refused(save(tmp_path, tensors)).message


@pytest.mark.parametrize("declared", [E - 1, E + 1, 0])
def test_number_of_experts_is_that_of_the_config(declared: int, tmp_path: Path) -> None:
    _refused(save(tmp_path / "a", matrices(), CONFIG | {"num_experts": declared}))
    tensors = {PREFIX + "gate_up_proj": torch.ones(E, 2 * I, H), PREFIX + "down_proj": torch.ones(E, H, I)}
    error = _refused(save(tmp_path / "b", tensors, CONFIG | {"num_experts": declared}))
    assert error.found == f"{E} experts"


def test_no_experts_at_all(tmp_path: Path) -> None:
    assert "no tensor named" in str(_refused(save(tmp_path / "a", {"model.norm.weight": torch.ones(H)})).found)
    none = {PREFIX + "gate_up_proj": torch.ones(0, 2 * I, H), PREFIX + "down_proj": torch.ones(0, H, I)}
    assert _refused(save(tmp_path / "b", none, {"hidden_act": "silu"})).found == "0 experts"


def test_expert_numbers_from_a_hostile_file_are_not_counted_to(tmp_path: Path) -> None:
    tensors = {f"{PREFIX}999999.{role}.weight": torch.ones(2, 2) for role in ("gate_proj", "up_proj", "down_proj")}
    error = _refused(save(tmp_path, tensors, {"hidden_act": "silu"}))
    assert "expert 0 has no" in str(error.found)
    assert "of each of 2 experts" in str(error.needed)


def test_layer_out_of_range(tmp_path: Path) -> None:
    folder = save(tmp_path, matrices())
    assert _refused(folder, 2).found == "experts in layers 1"
    assert _refused(folder, -1).found == "experts in layers 1"


def test_two_stacks_in_a_layer(tmp_path: Path) -> None:
    tensors = {f"{part}.{name}": tensor for part in ("thinker", "talker") for name, tensor in matrices().items()}
    error = _refused(save(tmp_path, tensors))
    assert error.found == f"talker.{PREFIX}, thinker.{PREFIX}"


@pytest.mark.parametrize(
    "name", ["gate_up_proj.lora_A", "0.gate_proj.lora_A.weight", "gate_proj", "post_expert_norm.weight", "w1"]
)
def test_tensors_of_no_known_role_are_refused(name: str, tmp_path: Path) -> None:
    assert PREFIX + name in str(_refused(save(tmp_path, matrices() | {PREFIX + name: torch.ones(2)})).found)


def test_both_ways_of_storing_at_once(tmp_path: Path) -> None:
    tensors = matrices() | {PREFIX + "down_proj": torch.ones(E, H, I)}
    assert "beside" in str(_refused(save(tmp_path, tensors)).found)


@pytest.mark.parametrize("name", ["gate_up_proj_blocks", "0.up_proj.qweight", "0.gate_proj.weight_scale"])
@pytest.mark.parametrize("dequantize", [False, True])
def test_names_of_other_quantizations_are_refused(name: str, dequantize: bool, spy: Spy, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedScheme) as caught:
        read_experts(save(tmp_path, matrices() | {PREFIX + name: torch.ones(2)}), 1, dequantize=dequantize)
    assert name in str(caught.value.found)
    assert "in FP8" in str(caught.value.hint)
    assert not spy.read


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8])
def test_quantized_dtypes_are_refused(dtype: torch.dtype, spy: Spy, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedScheme):
        read_experts(save(tmp_path, matrices(dtype)), 1)
    assert not spy.read


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}},
        {"quantization_config": "fp8"},
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
    ],
)
def test_configs_of_other_quantizations_are_refused(config: dict[str, Any], spy: Spy, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedScheme):
        read_experts(save(tmp_path, matrices(), CONFIG | config), 1)
    assert not spy.read


def test_no_activation_in_the_config(tmp_path: Path) -> None:
    for number, config in enumerate(
        ({"model_type": "qwen3_moe"}, {"hidden_act": ["silu"]}, {"mlp_hidden_act": "relu2"})
    ):
        assert "hidden_act" in str(_refused(save(tmp_path / str(number), matrices(), config)).needed)


def test_constants_of_a_gate_are_numbers(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "deepseek_v4"}
    assert read_experts(save(tmp_path / "a", matrices(), config), 1)["swiglu_limit"] == 10.0
    assert read_experts(save(tmp_path / "b", matrices(), config | {"swiglu_limit": None}), 1)["swiglu_limit"] is None
    assert read_experts(save(tmp_path / "c", matrices(), config | {"swiglu_limit": 0}), 1)["swiglu_limit"] == 0
    assert _refused(save(tmp_path / "d", matrices(), config | {"swiglu_limit": [1.0, 2.0]})).found == "[1.0, 2.0]"


def test_path_that_is_not_there(tmp_path: Path) -> None:
    assert "no checkpoint" in _refused(tmp_path / "nowhere").message


def test_folder_without_safetensors_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert _refused(tmp_path).found == "pytorch_model.bin"
    assert "safetensors" in str(_refused(tmp_path / "pytorch_model.bin").hint)


def test_single_file_with_its_config(tmp_path: Path) -> None:
    tensors = matrices()
    save(tmp_path, tensors)
    read = read_experts(str(tmp_path / "model.safetensors"), 1)
    assert torch.equal(read["gate_up_proj"], gate_up(tensors))
    (tmp_path / "config.json").unlink()
    assert "config.json" in str(_refused(tmp_path).needed)


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
@pytest.mark.parametrize("place", [save, save_sharded])
def test_truncated_file(cut: int, place: Any, tmp_path: Path) -> None:
    place(tmp_path, matrices())
    file = sorted(tmp_path.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:cut])
    error = _refused(tmp_path)
    assert file.name in str(error)
    assert error.__cause__ is not None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_json_that_is_not(name: str, content: bytes, tmp_path: Path) -> None:
    save_sharded(tmp_path, matrices())
    (tmp_path / name).write_bytes(content)
    assert name in _refused(tmp_path).message


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, "b"])
def test_index_without_a_usable_weight_map(weight_map: object, tmp_path: Path) -> None:
    save_sharded(tmp_path, matrices())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert "weight_map" in _refused(tmp_path).message


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (save_sharded(tmp_path, matrices()) / "model-00002-of-00003.safetensors").unlink()
    error = _refused(tmp_path)
    assert (error.found, error.needed) == ("2 of 3 shards", "model-00002-of-00003.safetensors")


def test_index_that_leads_out_of_the_folder(tmp_path: Path) -> None:
    save(tmp_path, matrices())
    index = {"weight_map": dict.fromkeys(matrices(), "../model.safetensors")}
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    (inner / "config.json").write_text(json.dumps(CONFIG))
    assert "outside the folder" in _refused(inner).message


def test_shard_that_lacks_a_tensor_of_the_index(tmp_path: Path) -> None:
    tensors = matrices()
    save_sharded(tmp_path, tensors, shards=1)
    lost = PREFIX + "3.down_proj.weight"
    del tensors[lost]
    save_file(tensors, tmp_path / "model-00001-of-00001.safetensors")
    error = _refused(tmp_path)
    assert lost in error.message
    assert error.__cause__ is not None
