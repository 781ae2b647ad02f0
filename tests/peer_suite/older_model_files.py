"""pytest plugin: model test files that are older than the shared tests find the tiny sizes they import.

Since 5.24 the library keeps them in its tests, which the source distribution does not carry for models.
"""

from __future__ import annotations

import transformers.testing_utils as testing_utils

SIZES = {
    "batch_size": 13,
    "seq_length": 7,
    "is_training": True,
    "use_input_mask": True,
    "use_labels": True,
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "expert_interval": 1,
    "moe_layer_start_index": 0,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 36,
    "shared_expert_gate": True,
    "moe_num_shared_experts": 2,
    "num_experts_per_tok": 2,
    "num_experts": 8,
}

if not hasattr(testing_utils, "_TEXT_MODEL_TESTER_DEFAULTS"):
    testing_utils._TEXT_MODEL_TESTER_DEFAULTS = SIZES
