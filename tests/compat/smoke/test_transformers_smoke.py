"""What must hold beside every transformers 5: our names load, switch, answer as eager does, generate and go away."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import routed_experts as rx

OURS = ["routed_experts", "routed_experts_eager", "routed_experts_batched_mm", "routed_experts_grouped_mm"]
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
IDS = torch.arange(1, 17).reshape(2, 8)


def save(model: Any, folder: Path) -> Path:
    """Save the model with experts' weights at unit gain, so that what experts give counts in the logits."""
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TEXT))
    return save(model, tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def composite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    # 5.0 reads the padding token of the text model without having a default for it.
    text = TEXT | {"rope_parameters": MROPE, "pad_token_id": 0}
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=VISION, image_token_id=60, video_token_id=61)
    model = transformers.Qwen3VLMoeForConditionalGeneration(config)
    return save(model, tmp_path_factory.mktemp("composite"))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    # A hook that does not fit this release is left out with a RuntimeWarning; here that is a failure.
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        rx.register_with_transformers()
    yield
    rx.unregister_from_transformers()


def load(folder: Path, implementation: Any = "eager") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, experts_implementation=implementation).eval()


def load_composite(folder: Path, implementation: Any) -> Any:
    auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(folder, experts_implementation=implementation).eval()


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_importing_does_not_import_transformers() -> None:
    code = "import sys, routed_experts; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", OURS)
def test_loads_and_answers_as_eager(checkpoint: Path, name: str) -> None:
    model = load(checkpoint, name)
    assert model.get_experts_implementation() == {"": name}
    assert rx.get_experts_implementation(model) == {"": name.removeprefix("routed_experts").lstrip("_") or "auto"}
    with torch.no_grad():
        assert apart(model(IDS).logits, load(checkpoint)(IDS).logits) < 1e-4


@pytest.mark.parametrize("name", OURS)
def test_gradients_are_eagers(checkpoint: Path, name: str) -> None:
    gradients = []
    for model in (load(checkpoint, name), load(checkpoint)):
        model(IDS, labels=IDS).loss.backward()
        gradients.append({key: parameter.grad for key, parameter in model.named_parameters()})
    ours, theirs = gradients
    assert sum(".experts." in key for key in theirs) == 4
    assert all(apart(ours[key], theirs[key]) < 1e-4 for key in theirs)


def test_a_scaled_answer_would_be_noticed(checkpoint: Path) -> None:
    def scaled(experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> torch.Tensor:
        return 1.05 * rx.run_experts(hidden_states, top_k_index, top_k_weights, experts, backend="eager")

    rx.register_backend("scaled", scaled)
    try:
        with torch.no_grad():
            theirs, ours = load(checkpoint)(IDS).logits, load(checkpoint, "routed_experts_scaled")(IDS).logits
        assert apart(ours, theirs) > 1e-3
    finally:
        rx.unregister_backend("scaled")
    assert "routed_experts_scaled" not in ALL_EXPERTS_FUNCTIONS


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", OURS)
def test_generates_the_tokens_of_eager(checkpoint: Path, name: str, beams: int) -> None:
    settings = {"do_sample": False, "num_beams": beams, "min_new_tokens": 6, "max_new_tokens": 6, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    model = load(checkpoint, name)
    ours = model.generate(IDS, attention_mask=mask, **settings)
    assert ours.shape == (2, 14)
    assert ours.tolist() == load(checkpoint).generate(IDS, attention_mask=mask, **settings).tolist()
    assert model.get_experts_implementation() == {"": name}


def test_switches_between_ours_and_theirs(checkpoint: Path) -> None:
    model = load(checkpoint)
    with torch.no_grad():
        expected = model(IDS).logits
        for name in [*OURS, "grouped_mm", "batched_mm", *OURS, "eager"]:
            model.set_experts_implementation(name)
            assert model.get_experts_implementation() == {"": name}
            assert apart(model(IDS).logits, expected) < 1e-4


def test_rx_set_and_get_round_trip(checkpoint: Path) -> None:
    model = load(checkpoint, "routed_experts_grouped_mm")
    rx.set_experts_implementation(model, "batched_mm")
    assert rx.get_experts_implementation(model) == {"": "batched_mm"}
    rx.set_experts_implementation(model, "transformers:eager")
    before = rx.get_experts_implementation(model)
    assert before == {"": "transformers:eager"}
    rx.set_experts_implementation(model, "auto")
    rx.set_experts_implementation(model, before)
    assert rx.get_experts_implementation(model) == before


@pytest.mark.parametrize("name", ["routed_experts_grouped", "routed_expert", "nonsense"])
def test_unknown_names_are_refused(checkpoint: Path, name: str) -> None:
    with pytest.raises(ValueError):
        load(checkpoint, name)
    model = load(checkpoint, "routed_experts")
    with pytest.raises(ValueError):
        model.set_experts_implementation(name)
    with pytest.raises(ValueError):
        rx.set_experts_implementation(model, name)
    assert model.get_experts_implementation() == {"": "routed_experts"}


def test_the_empty_key_reaches_every_part_at_load(composite: Path) -> None:
    model = load_composite(composite, {"": "routed_experts_batched_mm"})
    name = "routed_experts_batched_mm"
    assert model.get_experts_implementation() == {"": name, "vision_config": name, "text_config": name}
    with torch.no_grad():
        assert apart(model(IDS).logits, load_composite(composite, "eager")(IDS).logits) < 1e-4


def test_one_part_switches_alone(composite: Path) -> None:
    model = load_composite(composite, {"": "eager", "text_config": "routed_experts_grouped_mm"})
    before = model.get_experts_implementation()
    assert (before[""], before["text_config"]) == ("eager", "routed_experts_grouped_mm")
    model.set_experts_implementation({"text_config": "routed_experts_batched_mm"})
    assert model.get_experts_implementation() == before | {"text_config": "routed_experts_batched_mm"}
    with pytest.raises(ValueError):
        rx.set_experts_implementation(model, {"audio_config": "eager"})


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_decode_stage_of_an_accelerator(checkpoint: Path, how: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(checkpoint, "routed_experts_grouped_mm")
    prompt = IDS[:1]
    seen: list[tuple[str, int]] = []

    def note(_: Any, arguments: tuple[torch.Tensor, ...]) -> None:
        seen.append((model.config._experts_implementation, len(arguments[0])))

    model.model.layers[0].mlp.experts.register_forward_pre_hook(note)
    monkeypatch.setattr("routed_experts.parts.weight_device", lambda _: torch.device("cuda"))
    model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=6, **how)
    (prefill, tokens), *decode = seen
    assert prefill == "routed_experts_grouped_mm"
    assert tokens >= prompt.numel()
    assert len(decode) >= 2
    assert {name for name, _ in decode} == {"routed_experts_batched_mm"}
    assert model.get_experts_implementation() == {"": "routed_experts_grouped_mm"}


@pytest.mark.parametrize("name", ["grouped_mm", "batched_mm"])
def test_replace_puts_ours_behind_their_names(checkpoint: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rx.register_with_transformers(replace=True)
    backends: list[str] = []
    run = rx.run_experts

    def note(*arguments: Any, **keywords: Any) -> torch.Tensor:
        backends.append(keywords["backend"])
        return run(*arguments, **keywords)

    monkeypatch.setattr("routed_experts.calling.run_experts", note)
    model = load(checkpoint, name)
    with torch.no_grad():
        logits = model(IDS).logits
        assert backends == [name, name]
        assert apart(logits, load(checkpoint)(IDS).logits) < 1e-4


def test_the_choice_is_not_saved(checkpoint: Path, tmp_path: Path) -> None:
    model = load(checkpoint, "routed_experts_grouped_mm")
    model.save_pretrained(tmp_path)
    assert "routed_experts" not in (tmp_path / "config.json").read_text()


def hooks() -> dict[str, Any]:
    """Return everything in transformers that registration may touch."""
    owners = (transformers.PreTrainedModel, transformers.GenerationMixin, transformers.PreTrainedConfig)
    found = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    return found | dict(ALL_EXPERTS_FUNCTIONS)


@pytest.mark.parametrize("replace", [False, True])
def test_unregister_restores(checkpoint: Path, replace: bool) -> None:
    rx.unregister_from_transformers()
    before = hooks()
    rx.register_with_transformers()
    rx.register_with_transformers(replace=replace)
    during = hooks()
    assert {key for key in during if during[key] is not before.get(key)} >= set(OURS)
    rx.unregister_from_transformers()
    rx.unregister_from_transformers()
    after = hooks()
    assert after.keys() == before.keys()
    assert [key for key in before if after[key] is not before[key]] == []
    with pytest.raises(ValueError):
        load(checkpoint, "routed_experts")
