"""What model families declare about their experts, as data. A family without a row has the default layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """Layout flags and gate of one family, as its checkpoints store them.

    ``is_transposed=None`` is for families whose files exist both ways round: the pair of shapes settles it,
    which for gated experts it always can. ``activation`` is set where the family ignores its config.
    ``swiglu_limit`` and ``swiglu_alpha`` hold where the config is silent; None: the gate has no such number.
    """

    is_transposed: bool | None = False
    is_concatenated: bool = True
    has_gate: bool | None = None
    has_bias: bool | None = None
    activation: str | None = None
    activation_keys: tuple[str, ...] = ("hidden_activation", "hidden_act")
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None


DEFAULT = Family()
_CLAMPED_SILU = Family(activation="silu", swiglu_limit=10.0)

# Keyed by model_type, less a trailing "_text".
FAMILIES = {
    "aria": Family(is_transposed=True, activation="silu"),
    "deepseek_v4": Family(swiglu_limit=10.0),
    "glm5_next": _CLAMPED_SILU,
    "gpt_oss": Family(
        is_transposed=True,
        is_concatenated=False,
        has_bias=True,
        activation="silu",
        swiglu_limit=7.0,
        swiglu_alpha=1.702,
    ),
    "hy_v4": _CLAMPED_SILU,
    "hy_v4_vl": _CLAMPED_SILU,
    "lfm2_moe": Family(activation="silu"),
    "llama4": Family(is_transposed=True),
    "minimax_m3_vl": Family(activation="silu", swiglu_limit=7.0, swiglu_alpha=1.702),
    "nemotron_h": Family(has_gate=False, activation_keys=("mlp_hidden_act",)),
    "openai_privacy_filter": Family(
        is_transposed=True, has_bias=True, activation="silu", swiglu_limit=7.0, swiglu_alpha=1.702
    ),
    "qwen3_vl_moe": Family(is_transposed=None),
}

# Reading these would give wrong numbers; each says which part of the family no flag describes.
REFUSED = {
    "beam": "a gate computed in float32 and then rounded",
    "dbrx": "experts flattened into one matrix",
    "ernie4_5_vl_moe": "text and vision experts of different sizes in one list",
    "inkling2": "a softcapped gate",
    "inkling2_loop": "a softcapped gate",
    "jetmoe": "experts inside the attention",
    "longcat_flash": "identity experts beside the stored ones",
    "muse_spark": "a norm after each expert",
    "nllb-moe": "experts with names of their own",
    "step3p5": "a gate clamped after its activation, with limits per layer",
    "step3p7": "a gate clamped after its activation, with limits per layer",
    "switch_transformers": "experts with names of their own",
}

# Config keys that change the gate. Met in a family without a row, what they mean is not known.
GATE_KEYS = ("mlp_gate_softcap", "mlp_up_softcap", "swiglu_alpha", "swiglu_limit", "swiglu_limits")
