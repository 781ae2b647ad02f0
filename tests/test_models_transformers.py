"""The switch on genuine, tiny transformers models: one config and a composite of two."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
from modules_oracle import draw_parameters
from routed_experts.errors import LayoutError, SwitchError, UnknownBackend, UnsupportedExperts
from routed_experts.models import decode_stage, get_experts_implementation, set_experts_implementation
from routed_experts.parts import parts_of
from torch.nn.utils import parametrize
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

BACKENDS = ["auto", "eager", "batched_mm", "grouped_mm"]
TOKENS = torch.arange(24).reshape(2, 12) % 59
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
MOE = {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}


def unit_gain(model: PreTrainedModel) -> PreTrainedModel:
    """Redraw the experts so that their outputs are as large as their inputs and errors in them show."""
    for number, experts in enumerate(parts_of(model).experts()):
        draw_parameters(experts.module, seed=number)
    return model.eval()


@pytest.fixture
def text_model():
    torch.manual_seed(0)
    return unit_gain(Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MOE)))


@pytest.fixture
def composite():
    torch.manual_seed(0)
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    config = Qwen3VLMoeConfig(
        text_config=SIZES | MOE | {"rope_parameters": ROPE},
        vision_config=VISION,
        **{name: 60 + number for number, name in enumerate(tokens)},
    )
    return unit_gain(Qwen3VLMoeForConditionalGeneration(config))


@pytest.fixture
def gpt_oss():
    torch.manual_seed(0)
    config = GptOssConfig(
        **SIZES, num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2
    )
    return unit_gain(GptOssForCausalLM(config))


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("name", ["text_model", "composite", "gpt_oss"])
def test_logits_equal_the_models_own_eager(name, request):
    model = request.getfixturevalue(name)
    model.set_experts_implementation("eager")
    wanted = logits(model)
    for backend in BACKENDS:
        set_experts_implementation(model, backend)
        assert set(get_experts_implementation(model).values()) == {backend}
        assert (logits(model) - wanted).abs().max().item() < 1e-4
        set_experts_implementation(model, "transformers:eager")
        assert torch.equal(logits(model), wanted)


def test_a_slightly_wrong_output_would_show(text_model):
    """The comparison above is worth something: experts off by a twentieth move the logits far beyond it."""
    wanted = logits(text_model)
    with torch.no_grad():
        for experts in parts_of(text_model).experts():
            experts.module.down_proj.mul_(1.05)
    assert (logits(text_model) - wanted).abs().max().item() > 50 * 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_reach_adapters_on_expert_weights(text_model, backend):
    """B74 inside a model: A and B of a parametrized gate_up_proj learn as under the model's own eager."""

    class LowRank(torch.nn.Module):
        def __init__(self, like: torch.Tensor) -> None:
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            self.a = torch.nn.Parameter(torch.randn(*like.shape[:2], 2, generator=generator) / 8)
            self.b = torch.nn.Parameter(torch.randn(like.shape[0], 2, like.shape[2], generator=generator) / 8)

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + self.a @ self.b

    experts = text_model.model.layers[0].mlp.experts
    adapter = LowRank(experts.gate_up_proj)
    parametrize.register_parametrization(experts, "gate_up_proj", adapter)
    grads = {}
    for name in ("transformers:eager", backend):
        set_experts_implementation(text_model, name)
        loss = text_model(input_ids=TOKENS, labels=TOKENS).loss
        grads[name] = torch.autograd.grad(loss, [adapter.a, adapter.b])
    for wanted, found in zip(*grads.values(), strict=True):
        assert wanted.abs().max().item() > 1e-4
        assert (found - wanted).abs().max().item() < 1e-4 * wanted.abs().max().item()


def test_get_and_set_round_trip_on_the_composite(composite):
    keys = ["", *composite.config.sub_configs]
    fresh = get_experts_implementation(composite)
    assert fresh == dict.fromkeys(keys, "transformers:grouped_mm")
    for asked in ("auto", {"": "batched_mm"}, {"text_config": "eager"}, {"vision_config": "grouped_mm"}):
        set_experts_implementation(composite, asked)
        found = get_experts_implementation(composite)
        assert next(iter(found)) == ""
        set_experts_implementation(composite, fresh)
        assert get_experts_implementation(composite) == fresh
        set_experts_implementation(composite, found)
        assert get_experts_implementation(composite) == found
    assert found == dict.fromkeys(keys, "batched_mm") | {
        "text_config": "eager",
        "vision_config": "grouped_mm",
    }


def test_empty_key_reaches_the_text_backbone(composite):
    set_experts_implementation(composite, {"": "batched_mm"})
    assert get_experts_implementation(composite)["text_config"] == "batched_mm"
    assert get_experts_implementation(composite.model.language_model) == {"": "batched_mm"}


def test_absent_sub_config_is_no_part(composite):
    composite.config.vision_config = None
    assert list(get_experts_implementation(composite)) == ["", "text_config"]
    with pytest.raises(LayoutError, match="vision_config"):
        set_experts_implementation(composite, {"vision_config": "eager"})


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"": "eager", "bogus": "eager"}, LayoutError),
        ({"": "eager", "text_config": "group_mm"}, UnknownBackend),
        ({"": "eager", "text_config": "transformers:group_mm"}, UnknownBackend),
        ({"text_config": "deepgemm_megamoe"}, SwitchError),
    ],
)
def test_refusals_leave_the_composite_alone(composite, asked, error):
    before = get_experts_implementation(composite)
    with pytest.raises(error):
        set_experts_implementation(composite, asked)
    assert get_experts_implementation(composite) == before
    assert not any("forward" in module.__dict__ for module in composite.modules())


def test_unknown_key_lists_the_valid_ones(text_model):
    with pytest.raises(LayoutError, match="keys among ''"):
        set_experts_implementation(text_model, {"text_config": "eager"})


def test_library_function_by_name_runs_again(text_model):
    set_experts_implementation(text_model, "eager")
    assert text_model.get_experts_implementation() == {"": "grouped_mm"}
    set_experts_implementation(text_model, "transformers:batched_mm")
    assert get_experts_implementation(text_model) == {"": "transformers:batched_mm"}
    assert text_model.get_experts_implementation() == {"": "batched_mm"}
    assert not any("forward" in module.__dict__ for module in text_model.modules())


def test_models_of_one_config_are_set_apart(text_model):
    twin = Qwen3MoeForCausalLM(text_model.config)
    set_experts_implementation(text_model, "eager")
    assert get_experts_implementation(twin) == {"": "transformers:grouped_mm"}


@pytest.mark.parametrize("name", ["text_model", "composite"])
def test_saved_model_knows_nothing_of_the_choice(name, request, tmp_path):
    model = request.getfixturevalue(name)
    set_experts_implementation(model, "batched_mm")
    names = set(model.state_dict())
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert "experts_implementation" not in text
    assert "batched_mm" not in text
    assert "routed_experts" not in json.dumps(model.config.to_dict(), default=str)
    loaded = type(model).from_pretrained(tmp_path)
    assert set(loaded.state_dict()) == names
    assert set(get_experts_implementation(loaded).values()) == {"transformers:grouped_mm"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_switched_model(composite, duplicate):
    set_experts_implementation(composite, {"": "eager", "text_config": "batched_mm"})
    wanted = logits(composite)
    twin = duplicate(composite)
    assert get_experts_implementation(twin) == get_experts_implementation(composite)
    assert torch.equal(logits(twin), wanted)
    unit_gain(twin.double())
    assert torch.equal(logits(composite), wanted)
    assert not torch.allclose(logits(twin).float(), wanted)


def test_dense_model_takes_only_eager():
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    for name in ("auto", "grouped_mm", "deepgemm_megamoe"):
        with pytest.raises(ValueError, match="no experts"):
            set_experts_implementation(model, name)
    for name in (None, "eager", get_experts_implementation(model)):
        set_experts_implementation(model, name)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (
            lambda: Llama4ForCausalLM(
                Llama4TextConfig(
                    **SIZES, intermediate_size_mlp=24, num_local_experts=4, num_experts_per_tok=1
                )
            ),
            r"feed_forward\.experts is not called as routed experts",
        ),
        (
            lambda: DbrxForCausalLM(
                DbrxConfig(
                    d_model=32,
                    n_heads=4,
                    n_layers=1,
                    vocab_size=64,
                    max_seq_len=64,
                    attn_config={"kv_n_heads": 2, "clip_qkv": None, "rope_theta": 1e4},
                    ffn_config={
                        "hidden_size": 32,
                        "ffn_hidden_size": 16,
                        "moe_num_experts": 4,
                        "moe_top_k": 2,
                    },
                )
            ),
            r"ffn\.experts \(DbrxExperts\)",
        ),
    ],
    ids=["llama4", "dbrx"],
)
def test_families_of_another_layout_are_refused_with_the_reason(build, text):
    model = build()
    with pytest.raises(UnsupportedExperts, match=text):
        set_experts_implementation(model, "grouped_mm")
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_generation_with_a_decode_stage_switches_once(text_model, monkeypatch):
    """B70, on a device that is no CPU: 16 tokens, one switch and one restore."""
    model = text_model.to("meta")
    set_experts_implementation(model, "grouped_mm")
    seen = []
    with decode_stage(model):
        for _ in range(16):
            with decode_stage(model):
                seen.append(get_experts_implementation(model))
    assert seen == [{"": "batched_mm"}] * 16
    assert get_experts_implementation(model) == {"": "grouped_mm"}
