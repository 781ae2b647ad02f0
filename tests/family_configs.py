"""Tiny models of the model families whose experts follow the protocol, one entry a family.

A family is a folder of the library and the class that is built: a language model where there is one, else the
part that holds the experts. What its config does not know of ``SIZES`` is left out.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from routed_experts.parts import parts_of

SIZES = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "num_experts": 6,
    "num_local_experts": 6,
    "n_routed_experts": 6,
    "moe_num_experts": 6,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "mlp_layer_types": ["sparse"] * 2,
    "mlp_only_layers": [],
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "index_topk": 4,
    "index_head_dim": 8,
    "index_n_heads": 2,
    "index_kpool": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "router_hidden_size": 16,
    "shared_experts_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_hidden_size": 24,
    "moe_latent_size": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "unpadded_vocab_size": 64,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
    "enable_moe_block": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}


def mrope(*section: int) -> dict[str, Any]:
    """Rotary parameters of three axes that share ``sum(section)`` frequencies."""
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", {}),
    "aria": ("AriaTextForCausalLM", {}),
    "axk1": ("AXK1ForCausalLM", {}),
    "axk2": ("AXK2ForCausalLM", {}),
    "bailing_hybrid": ("BailingHybridForCausalLM", {}),
    "beam": ("BeamForCausalLM", {}),
    "cohere2_moe": ("Cohere2MoeForCausalLM", {}),
    "deepseek_ocr2": ("DeepseekOcr2TextModel", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {}),
    "deepseek_v32": ("DeepseekV32ForCausalLM", {}),
    "deepseek_v4": ("DeepseekV4ForCausalLM", {"mlp_layer_types": ["hash_moe", "moe"]}),
    "diffusion_gemma": ("DiffusionGemmaEncoderTextModel", {}),
    "dots1": ("Dots1ForCausalLM", {}),
    "dots3_note": ("Dots3NoteForCausalLM", {}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeTextModel",
        {"moe_intermediate_size": [16, 12], "rope_parameters": mrope(1, 1, 2)},
    ),
    "exaone_moe": ("ExaoneMoeForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "flint": ("FlintForCausalLM", {}),
    "gemma4": ("Gemma4ForCausalLM", {}),
    "glm4_moe": ("Glm4MoeForCausalLM", {}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {}),
    "glm4v_moe": ("Glm4vMoeTextModel", {"rope_parameters": mrope(1, 1, 0)}),
    "glm5_next": ("Glm5NextTextModel", {"qk_rope_head_dim": 0}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "granitemoe_swa": ("GraniteMoeSWAForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {}),
    "hy_v3": ("HYV3ForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", {}),
    "hy_v4_vl": ("HYV4VLTextModel", {"rope_parameters": mrope(2, 1, 1)}),
    "inkling": ("InklingForCausalLM", {}),
    "inkling2": ("Inkling2ForCausalLM", {}),
    "inkling2_loop": ("Inkling2LoopForCausalLM", {}),
    "jamba": ("JambaForCausalLM", {}),
    "kimi_linear": ("KimiLinearForCausalLM", {}),
    "kolibri1": ("Kolibri1ForCausalLM", {}),
    "laguna": ("LagunaForCausalLM", {}),
    "lara_mini": ("LaraMiniForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "mellum": ("MellumForCausalLM", {}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", {"head_dim": 12, "num_key_value_heads": 2}),
    "minimax": ("MiniMaxForCausalLM", {}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {}),
    "minimax_m3_vl": ("MiniMaxM3VLForCausalLM", {}),
    "mistral4": ("Mistral4ForCausalLM", {}),
    "mistral_large4": ("MistralLarge4TextModel", {}),
    "mixtral": ("MixtralForCausalLM", {}),
    "muse_spark": ("MuseSparkTextModel", {}),
    "nemotron_h": ("NemotronHForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "openai_privacy_filter": ("OpenAIPrivacyFilterForTokenClassification", {}),
    "phimoe": ("PhimoeForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", {}),
    "qwen3_omni_moe": ("Qwen3OmniMoeThinkerTextModel", {}),
    "qwen3_vl_moe": ("Qwen3VLMoeTextModel", {}),
    "qwen4_exp": ("Qwen4ExpForCausalLM", {}),
    "solar_open": ("SolarOpenForCausalLM", {}),
    "unlimited_ocr": ("UnlimitedOcrTextModel", {}),
    "zaya": ("ZayaForCausalLM", {"num_experts_per_tok": 1}),
}


UNDECORATED: dict[str, tuple[str, dict[str, Any]]] = {
    "dbrx": (
        "DbrxForCausalLM",
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
    "jetmoe": ("JetMoeForCausalLM", {"kv_channels": 8}),
    "llama4": ("Llama4ForCausalLM", {"intermediate_size_mlp": 24, "num_experts_per_tok": 1}),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        {"num_layers": 1, "zero_expert_num": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 24},
    ),
    "step3p7": ("Step3p7TextModel", {"swiglu_limits": [0.5, 0.25]}),
}


def installed() -> list[str]:
    """Families of the table that the installed version has."""
    return [name for name in FAMILIES if find_spec(f"transformers.models.{name}") is not None]


def has_own_gate(name: str) -> bool:
    """Whether some experts class of a family defines its own gate; beam's differs from the stock one in dtype alone."""
    classes = vars(family_module(name)).values()
    gates = {getattr(cls, "_apply_gate", None) for cls in classes if inspect.isclass(cls)} - {None}
    return name != "beam" and any(gate.__module__ == family_module(name).__name__ for gate in gates)


def family_module(name: str) -> ModuleType:
    """The module that defines a family's models."""
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def build(name: str) -> nn.Module:
    """A tiny float32 model of a family on its own eager experts, which are drawn at unit gain."""
    class_name, particular = FAMILIES.get(name) or UNDECORATED[name]
    cls = getattr(family_module(name), class_name)
    knows = {*getattr(cls.config_class, "__dataclass_fields__", ()), *inspect.signature(cls.config_class).parameters}
    config = cls.config_class(**{key: value for key, value in SIZES.items() if key in knows} | particular)
    torch.manual_seed(0)
    model = cls(config).eval()
    model.set_experts_implementation("eager")
    for number, experts in enumerate(parts_of(model).experts()):
        draw_unit_gain(experts.module, torch.Generator().manual_seed(number))
    return model


def draw_unit_gain(module: nn.Module, generator: torch.Generator) -> None:
    """Redraw experts so that errors in them show: weights as normal / sqrt(fan-in), biases as 0.1 * normal."""
    fan_in_axis = -2 if getattr(module, "is_transposed", False) else -1
    with torch.no_grad():
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if (weight := getattr(module, name, None)) is not None:
                weight.copy_(torch.randn(weight.shape, generator=generator) / weight.shape[fan_in_axis] ** 0.5)
            if (bias := getattr(module, f"{name}_bias", None)) is not None:
                bias.copy_(torch.randn(bias.shape, generator=generator) / 10)
