"""Models saved by transformers and read back: tensors, flags and gate equal those of the live module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from routed_experts.checkpoint import read_experts
from routed_experts.errors import CheckpointError
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.utils import logging as transformers_logging

transformers_logging.disable_progress_bar()

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "pad_token_id": 0,
}
_HEAD_DIM = {"head_dim": 8}
_MODELS: dict[str, dict[str, Any]] = {
    "aria_text": {"moe_num_experts": 6, "hidden_act": "gelu"},
    "deepseek_v3": {},
    "deepseek_v4": {"swiglu_limit": 3.0, **_HEAD_DIM},
    "glm4_moe": _HEAD_DIM,
    "gpt_oss": {"swiglu_limit": 3.0, **_HEAD_DIM},
    "granitemoe": {},
    "hy_v4": {"swiglu_limit": 3.0, **_HEAD_DIM},
    "llama4_text": _HEAD_DIM,
    "minimax_m2": _HEAD_DIM,
    "minimax_m3_vl_text": {"swiglu_limit": 2.0, "swiglu_alpha": 1.5, **_HEAD_DIM},
    "mixtral": {"hidden_act": "gelu", **_HEAD_DIM},
    "nemotron_h": {"moe_latent_size": 16, "layers_block_type": ["attention", "moe"], **_HEAD_DIM},
    "olmoe": {},
    "openai_privacy_filter": _HEAD_DIM,
    "phimoe": {},
    "qwen3_moe": _HEAD_DIM,
}
_NO_CAUSAL_LM = ("openai_privacy_filter",)


def _build(model_type: str, **changes: Any) -> PreTrainedModel:
    known = AutoConfig.for_model(model_type)
    sizes = {key: value for key, value in _SIZES.items() if hasattr(known, key)}
    config = AutoConfig.for_model(model_type, **{**sizes, **changes})
    torch.manual_seed(0)
    auto = AutoModel if model_type in _NO_CAUSAL_LM else AutoModelForCausalLM
    model = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.normal_()
    return model


def _experts(model: nn.Module, layer: int) -> nn.Module:
    (found,) = [m for n, m in model.named_modules() if f"layers.{layer}." in n and n.endswith(".experts")]
    return found


def _gate(read: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
    """The gate that the read flags describe, by the contract's formulas."""
    act, limit, alpha = ACT2FN[read["activation"]], read["swiglu_limit"], read["swiglu_alpha"]
    if not read["has_gate"]:
        return act(rows)
    gate, up = rows.chunk(2, dim=-1) if read["is_concatenated"] else (rows[..., ::2], rows[..., 1::2])
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return act(gate) * up if alpha is None else (up + 1) * gate * torch.sigmoid(alpha * gate)


def _assert_same(read: dict[str, Any], module: nn.Module) -> None:
    live = {name: parameter.detach() for name, parameter in module.named_parameters()}
    tensors = {name: value for name, value in read.items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == live.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, live[name]), name
    rows = 5 * torch.randn(7, 40)
    theirs = getattr(module, "_apply_gate", None) if read["has_gate"] else module.act_fn
    if theirs is not None:
        torch.testing.assert_close(_gate(read, rows), theirs(rows))


@pytest.mark.parametrize("model_type", sorted(_MODELS))
def test_every_family_reads_back_what_its_model_holds(model_type: str, tmp_path: Path) -> None:
    model = _build(model_type, **_MODELS[model_type])
    model.save_pretrained(tmp_path)
    module = _experts(model, 1)
    read = read_experts(tmp_path, 1)
    _assert_same(read, module)
    assert read["num_experts"] == 6
    assert read["has_gate"] == (model_type != "nemotron_h")
    assert read["is_concatenated"] == (model_type != "gpt_oss")
    transposed = ("aria_text", "gpt_oss", "llama4_text", "openai_privacy_filter")
    assert read["is_transposed"] == (model_type in transposed)


def test_activations_are_those_of_the_config_or_of_the_family(tmp_path: Path) -> None:
    wanted = {"mixtral": "gelu", "aria_text": "silu", "nemotron_h": "relu2", "gpt_oss": "silu"}
    for model_type, activation in wanted.items():
        _build(model_type, **_MODELS[model_type]).save_pretrained(tmp_path / model_type)
        assert read_experts(tmp_path / model_type, 1)["activation"] == activation


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_shards_of_save_pretrained_read_like_one_file(model_type: str, tmp_path: Path) -> None:
    model = _build(model_type, **_MODELS[model_type])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _assert_same(read_experts(tmp_path, 1), _experts(model, 1))


def test_bfloat16_is_kept(tmp_path: Path) -> None:
    model = _build("mixtral", **_MODELS["mixtral"]).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    read = read_experts(tmp_path, 0)
    assert read["gate_up_proj"].dtype == torch.bfloat16
    assert torch.equal(read["gate_up_proj"], _experts(model, 0).gate_up_proj)


def test_dense_first_layers_name_the_layers_with_experts(tmp_path: Path) -> None:
    _build("deepseek_v3").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="layer 0 has no routed experts") as caught:
        read_experts(tmp_path)
    assert caught.value.found == "experts in layers 1"


@pytest.mark.parametrize("as_released", [False, True])
def test_vision_language_composite(as_released: bool, tmp_path: Path) -> None:
    """transformers writes this family as its modules are; the released files are the other way round."""
    text = {key: value for key, value in _SIZES.items() if not key.startswith("n_")}
    text |= {"head_dim": 8, "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default"}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    model = AutoModel.from_config(
        AutoConfig.for_model("qwen3_vl_moe", text_config=text, vision_config=vision)
    )
    module = _experts(model, 1)
    if as_released:
        for parameter in module.parameters():
            parameter.data = parameter.detach().transpose(1, 2).contiguous()
    model.save_pretrained(tmp_path)
    read = read_experts(tmp_path, 1)
    assert read["is_transposed"] is as_released
    assert read["activation"] == "silu"
    assert torch.equal(read["down_proj"], module.down_proj)
    assert torch.equal(read["gate_up_proj"], module.gate_up_proj)


def test_a_gate_no_flag_describes_is_refused(tmp_path: Path) -> None:
    _build("qwen3_moe", **_HEAD_DIM).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"model_type": "inkling2_text"}, {"mlp_gate_softcap": 7.0}, {"swiglu_limit": 7.0}):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match="do not describe") as caught:
            read_experts(tmp_path, 1)
        assert "from_module" in str(caught.value.hint)
