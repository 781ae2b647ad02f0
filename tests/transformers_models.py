"""Tiny transformers models whose experts have unit gain, for the tests of registration."""

from __future__ import annotations

import torch
from test_models_transformers import MOE, ROPE, SIZES, VISION, unit_gain
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

BACKENDS = ["auto", "eager", "batched_mm", "grouped_mm"]


def prefixed(name: str) -> str:
    return "routed_experts" if name == "auto" else f"routed_experts_{name}"


def text_config(**more) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(**(SIZES | MOE | more))


def build_text(**more) -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    return unit_gain(Qwen3MoeForCausalLM(text_config(**more)))


def composite_config(**more) -> Qwen3VLMoeConfig:
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return Qwen3VLMoeConfig(
        text_config=SIZES | MOE | {"rope_parameters": ROPE},
        vision_config=VISION,
        **{name: 60 + number for number, name in enumerate(tokens)},
        **more,
    )


def build_composite() -> Qwen3VLMoeForConditionalGeneration:
    torch.manual_seed(0)
    return unit_gain(Qwen3VLMoeForConditionalGeneration(composite_config()))


def build_gpt_oss() -> GptOssForCausalLM:
    torch.manual_seed(0)
    layers = ["full_attention"] * 2
    return unit_gain(GptOssForCausalLM(GptOssConfig(**SIZES, num_local_experts=4, layer_types=layers)))


BUILD = {"text": build_text, "composite": build_composite, "gpt_oss": build_gpt_oss}
