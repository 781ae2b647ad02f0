"""write_experts: whatever the flags, read_experts gives back the same; what cannot be stored is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoint_files import CONFIG, matrices, save
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routed_experts.checkpoint import read_experts, write, write_experts
from routed_experts.errors import CheckpointError, UnsupportedExperts, UnsupportedScheme

_FLAGS: dict[str, Any] = {
    "activation": "silu",
    "swiglu_limit": None,
    "swiglu_alpha": None,
    "has_gate": True,
    "is_transposed": False,
    "is_concatenated": True,
}


def _experts(
    count: int = 3,
    hidden: int = 4,
    inner: int = 5,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    **flags: Any,
) -> SimpleNamespace:
    """Attributes of ExpertWeights for random experts of any layout."""
    flags = _FLAGS | flags
    up, width = ("gate_up_proj", 2 * inner) if flags["has_gate"] else ("up_proj", inner)
    shapes = {up: (count, width, hidden), "down_proj": (count, hidden, inner)}
    if flags["is_transposed"]:
        shapes = {name: (count, columns, rows) for name, (_, rows, columns) in shapes.items()}
    if bias:
        shapes |= {f"{up}_bias": (count, width), "down_proj_bias": (count, hidden)}
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    return SimpleNamespace(**tensors, **flags, gate=None, post_expert_norm=None, num_experts=count)


def _by_name(weights: SimpleNamespace) -> dict[str, torch.Tensor]:
    """Tensors under the names they have on disk."""
    tensors = {name: value for name, value in vars(weights).items() if isinstance(value, torch.Tensor)}
    return {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in tensors.items()}


def _assert_round_trip(weights: SimpleNamespace, folder: Path) -> None:
    write_experts(weights, folder)
    read = read_experts(folder)
    stored = {key: value for key, value in vars(weights).items() if key not in ("gate", "post_expert_norm")}
    assert read.keys() == stored.keys()
    for key, value in stored.items():
        if isinstance(value, torch.Tensor):
            assert read[key].dtype == value.dtype
            assert torch.equal(read[key], value), key
        else:
            assert read[key] == value, key


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("is_concatenated", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_round_trip_of_every_layout(
    has_gate: bool, is_transposed: bool, is_concatenated: bool, bias: bool, tmp_path: Path
) -> None:
    flags = {"has_gate": has_gate, "is_transposed": is_transposed, "is_concatenated": is_concatenated}
    _assert_round_trip(_experts(bias=bias, **flags), tmp_path / "experts")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 3),
    limit=st.none() | st.floats(0, 100),
    alpha=st.none() | st.floats(0, 3),
    activation=st.sampled_from(["silu", "gelu_pytorch_tanh", "relu2"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    bias=st.booleans(),
    is_transposed=st.booleans(),
)
def test_round_trip_of_any_size_and_gate(
    sizes: tuple[int, int, int],
    limit: float | None,
    alpha: float | None,
    activation: str,
    dtype: torch.dtype,
    bias: bool,
    is_transposed: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    flags = {"swiglu_limit": limit, "swiglu_alpha": alpha, "activation": activation}
    weights = _experts(*sizes, bias, dtype, is_transposed=is_transposed, **flags)
    _assert_round_trip(weights, tmp_path_factory.mktemp("experts"))


def test_strided_expanded_and_aliased_tensors_are_written_densely(tmp_path: Path) -> None:
    weights = _experts(hidden=5, is_transposed=True, has_gate=False)
    weights.up_proj = torch.randn(5, 5).expand(3, 5, 5)
    weights.down_proj = weights.up_proj.mT
    _assert_round_trip(weights, tmp_path / "a")
    weights.up_proj = weights.down_proj = torch.randn(3, 5, 5)
    _assert_round_trip(weights, tmp_path / "b")
    assert (tmp_path / "b" / "model.safetensors").stat().st_size > 2 * 3 * 5 * 5 * 4


def test_parameters_are_written_without_their_graph(tmp_path: Path) -> None:
    weights = _experts()
    weights.down_proj = torch.nn.Parameter(weights.down_proj)
    _assert_round_trip(weights, tmp_path)
    assert not read_experts(tmp_path)["down_proj"].requires_grad


def test_only_one_of_two_biases(tmp_path: Path) -> None:
    weights = _experts(bias=True)
    del weights.down_proj_bias
    _assert_round_trip(weights, tmp_path)


def test_the_file_alone_is_enough_and_so_are_its_tensors_with_the_config(tmp_path: Path) -> None:
    weights = _experts(is_concatenated=False, swiglu_limit=7.0)
    write_experts(weights, tmp_path)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.unlink()
    assert read_experts(tmp_path / "model.safetensors")["is_concatenated"] is False
    config.write_text(text)
    tensors = _by_name(weights)
    save(tmp_path, tensors, json.loads(text))
    assert read_experts(tmp_path)["swiglu_limit"] == 7.0


def test_a_share_is_written_and_read_as_a_share(tmp_path: Path) -> None:
    weights = _experts()
    weights.shard = (1, 4)
    write_experts(weights, tmp_path)
    assert read_experts(tmp_path)["shard"] == (1, 4)
    with pytest.raises(CheckpointError, match="one rank's share"):
        read_experts(tmp_path, rank=0, world=3)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"gate": torch.nn.GLU()}, UnsupportedExperts),
        ({"post_expert_norm": torch.nn.LayerNorm(4)}, UnsupportedExperts),
        ({"activation": torch.nn.functional.silu}, UnsupportedExperts),
        ({"down_proj": torch.empty(3, 4, 5, device="meta")}, UnsupportedExperts),
        ({"down_proj": torch.zeros(3, 4, 5, dtype=torch.float8_e4m3fn)}, UnsupportedScheme),
    ],
)
def test_what_cannot_be_stored_is_refused_before_writing(
    change: dict[str, Any], error: type[Exception], tmp_path: Path
) -> None:
    weights = _experts()
    vars(weights).update(change)
    with pytest.raises(error) as caught:
        write_experts(weights, tmp_path / "experts")
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint
    assert not (tmp_path / "experts").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    save(tmp_path, matrices())
    before = {file: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(CheckpointError, match="already holds a checkpoint") as caught:
        write_experts(_experts(), tmp_path)
    assert caught.value.found == "model.safetensors, config.json"
    assert {file: file.read_bytes() for file in tmp_path.iterdir()} == before
    with pytest.raises(CheckpointError, match="not a folder"):
        write_experts(_experts(), tmp_path / "config.json")


def test_a_failure_midway_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def _disk_full(tensors: dict[str, torch.Tensor], file: Path, metadata: dict[str, str]) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(write, "save_file", _disk_full)
    with pytest.raises(OSError, match="no space left"):
        write_experts(_experts(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"activation": None},
        {"is_transposed": "yes"},
        {"tensors": None},
        {"more": 1},
        {"tensors": ["up_proj", "down_proj"]},
        {"counts": [4]},
        {"is_transposed": True},
    ],
)
def test_a_block_that_does_not_fit_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    weights = _experts()
    write_experts(weights, tmp_path)
    block = json.loads((tmp_path / "config.json").read_text())["routed_experts"]
    tensors = _by_name(weights)
    with pytest.raises(CheckpointError) as caught:
        read_experts(save(tmp_path, tensors, CONFIG | {"routed_experts": block | change}))
    assert caught.value.found
