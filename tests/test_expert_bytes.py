"""``doctor --checkpoint``: bytes per dtype of the expert tensors, read from headers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from routed_experts.cli import main
from safetensors.torch import save_file


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 6, 8, dtype=torch.bfloat16),
        "model.layers.0.mlp.experts.down_proj": torch.zeros(4, 8, 3, dtype=torch.float8_e4m3fn),
        "model.layers.0.mlp.experts.down_proj_scale_inv": torch.zeros(4, 1, 1),
        "model.layers.0.mlp.shared_experts.up_proj.weight": torch.zeros(5, 8, dtype=torch.bfloat16),
        "model.norm.weight": torch.zeros(8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_bytes_of_each_dtype(checkpoint):
    report = json.loads(invoke("doctor", "--json", "--checkpoint", str(checkpoint)).stdout)["checkpoint"]
    assert report["experts"] == [
        {"dtype": "BF16", "tensors": 1, "bytes": 4 * 6 * 8 * 2},
        {"dtype": "F8_E4M3", "tensors": 1, "bytes": 4 * 8 * 3},
        {"dtype": "F32", "tensors": 1, "bytes": 4 * 4},
    ]
    assert report["other"] == [
        {"dtype": "BF16", "tensors": 1, "bytes": 5 * 8 * 2},
        {"dtype": "F32", "tensors": 1, "bytes": 8 * 4},
    ]


def test_table(checkpoint):
    text = invoke("doctor", "--checkpoint", str(checkpoint)).stdout
    assert [line.split()[:4] for line in text.splitlines() if "F8_E4M3" in line] == [
        ["experts", "F8_E4M3", "1", "96"]
    ]


def test_narrow_dtypes_count_their_bits(tmp_path):
    header = json.dumps(
        {
            "experts.w": {"dtype": "F4", "shape": [2, 8], "data_offsets": [0, 8]},
            "experts.s": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [8, 10]},
            "experts.m": {"dtype": "BOOL", "shape": [3], "data_offsets": [10, 13]},
        }
    ).encode()
    content = np.uint64(len(header)).tobytes() + header + bytes(13)
    (tmp_path / "part.safetensors").write_bytes(content)
    report = json.loads(invoke("doctor", "--json", "--checkpoint", str(tmp_path)).stdout)["checkpoint"]
    assert {row["dtype"]: row["bytes"] for row in report["experts"]} == {"F4": 8, "F8_E8M0": 2, "BOOL": 3}


def test_index_decides_which_files_count(checkpoint):
    save_file({"experts.x": torch.zeros(3)}, checkpoint / "shard.safetensors")
    index = {"weight_map": {"experts.x": "shard.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    report = json.loads(invoke("doctor", "--json", "--checkpoint", str(checkpoint)).stdout)["checkpoint"]
    assert (report["experts"], report["other"]) == ([{"dtype": "F32", "tensors": 1, "bytes": 12}], [])


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("notes.txt", b"", "no *.safetensors file"),
        ("model.safetensors", b"short", "SafetensorError"),
        ("model.safetensors.index.json", b"{}", "KeyError"),
        ("model.safetensors.index.json", b"[1]", "TypeError"),
        ("model.safetensors.index.json", b"{", "JSONDecodeError"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 5}}', "TypeError"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "gone.safetensors"}}',
            "no gone.safetensors",
        ),
    ],
)
def test_broken_folders(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content)
    result = invoke("doctor", "--json", "--checkpoint", str(tmp_path))
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 1
    assert error["type"] == "CheckpointError"
    assert found in error["found"]
    assert all(error[key] for key in ("message", "needed", "hint"))
