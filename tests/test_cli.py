"""The command line: what it prints, as tables and as JSON, and how it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from routed_experts import machine
from routed_experts.cli import main, output
from routed_experts.cli.doctor import machine_facts
from routed_experts.errors import UnknownBackend
from safetensors.torch import save_file

SHAPE = ("--shape", "8,2,64,32")


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


class TestDoctor:
    def test_json_in_the_agreed_order(self):
        report = json.loads(invoke("doctor", "--json").stdout)
        assert list(report) == ["machine", "torch", "devices", "packages", "toolkit", "backends"]
        assert list(report["toolkit"]) == ["root", "nvcc", "version", "helpers", "candidates"]
        assert len(report["toolkit"]["candidates"]) >= 4
        for candidate in report["toolkit"]["candidates"]:
            assert list(candidate) == ["source", "path", "root", "accepted", "found", "needed", "hint"]
        assert report["machine"]["cores"] >= 1
        assert report["torch"]["version"] == torch.__version__
        assert report["devices"][0]["kind"] == "cpu"
        assert report["packages"]["sonicmoe"] is None or isinstance(report["packages"]["sonicmoe"], str)

    def test_every_backend_has_a_verdict_and_each_refusal_its_reason(self):
        backends = json.loads(invoke("doctor", "--json").stdout)["backends"]
        assert {"eager", "batched_mm", "grouped_mm", "deepgemm"} <= {one["backend"] for one in backends}
        for one in backends:
            assert list(one) == ["backend", "accepted", "found", "needed", "hint"]
            assert one["accepted"] or all(one[key] for key in ("found", "needed", "hint"))
        assert next(one for one in backends if one["backend"] == "eager")["accepted"]

    def test_toolkit_of_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_HOME", f" {tmp_path}")
        toolkit = json.loads(invoke("doctor", "--json").stdout)["toolkit"]
        assert toolkit["nvcc"] is None
        first = toolkit["candidates"][0]
        assert (first["source"], first["path"], first["accepted"]) == ("CUDA_HOME", f" {tmp_path}", False)

    def test_tables_say_all_of_it(self, monkeypatch, tmp_path):
        (tmp_path / "[red]bin:cuda:").mkdir()
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "[red]bin:cuda:"))
        result = invoke("doctor")
        assert result.exit_code == 0
        for word in ("Machine", "PyTorch", "transformers", "ptxas", "CUDA_HOME", "eager", "can", "hint:"):
            assert word in result.stdout
        # The path may be folded, but it is neither markup nor an emoji.
        assert "[red]bin:cuda:" in "".join(result.stdout.split())

    def test_piped_tables_are_plain_and_80_wide(self, monkeypatch):
        monkeypatch.delenv("COLUMNS", raising=False)
        text = invoke("doctor").stdout
        assert max(map(len, text.splitlines())) <= 80
        assert not any("─" <= letter <= "╿" or letter == "\x1b" for letter in text)

    def test_cuda_stays_untouched(self, tmp_path):
        script = (
            "import torch\n"
            "def refuse(*_): raise AssertionError('CUDA was initialised')\n"
            "torch.cuda._lazy_init = torch.cuda.init = refuse\n"
            "from routed_experts.cli import main\n"
            "main(['doctor', '--json'], standalone_mode=False)\n"
            "assert not torch.cuda.is_initialized()\n"
        )
        environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
        command = [sys.executable, "-W", "error", "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["backends"]


class TestCheckpointBytes:
    def test_bytes_of_each_dtype(self, checkpoint):
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

    def test_table(self, checkpoint):
        text = invoke("doctor", "--checkpoint", str(checkpoint)).stdout
        assert [line.split()[:4] for line in text.splitlines() if "F8_E4M3" in line] == [
            ["experts", "F8_E4M3", "1", "96"]
        ]

    def test_narrow_dtypes_count_their_bits(self, tmp_path):
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

    def test_index_decides_which_files_count(self, checkpoint):
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
            (
                "model.safetensors.index.json",
                b'{"weight_map": {"a": "gone.safetensors"}}',
                "no gone.safetensors",
            ),
        ],
    )
    def test_broken_folders(self, tmp_path, name, content, found):
        (tmp_path / name).write_bytes(content)
        result = invoke("doctor", "--json", "--checkpoint", str(tmp_path))
        error = json.loads(result.stdout)["error"]
        assert result.exit_code == 1
        assert error["type"] == "CheckpointError"
        assert found in error["found"]
        assert all(error[key] for key in ("message", "needed", "hint"))


class TestSelect:
    def test_json_is_the_selection(self):
        result = invoke("select", *SHAPE, "--tokens", "3", "--device", "cpu", "--json")
        assert result.exit_code == 0, result.output
        selection = json.loads(result.stdout)
        assert selection["name"] in {one["backend"] for one in selection["decisions"] if one["accepted"]}

    def test_table_names_the_choice_and_every_backend(self):
        result = invoke("select", *SHAPE, "--tokens", "3", "--device", "cpu")
        assert result.stdout.startswith("Selected: ")
        for backend in ("eager", "batched_mm", "grouped_mm", "deepgemm"):
            assert backend in result.stdout

    @pytest.mark.parametrize(
        "flags",
        [
            ("--no-gate",),
            ("--transposed", "--bias"),
            ("--interleaved", "--activation", "gelu"),
            ("--no-gate", "--bias", "--transposed", "--dtype", "float32"),
            ("--training", "--compiling"),
        ],
    )
    def test_layout_flags(self, flags):
        result = invoke(
            "select", *SHAPE, "--tokens", "5", "--device", "cpu", "--backend", "eager", "--json", *flags
        )
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["name"] == "eager"

    def test_a_named_backend_that_cannot_run_is_an_error(self):
        arguments = ("select", *SHAPE, "--tokens", "3", "--device", "cpu", "--backend", "deepgemm")
        result = invoke(*arguments)
        assert result.exit_code == 1
        assert result.stdout == ""
        for part in ("error: ", "found: ", "needed: ", "hint: "):
            assert part in result.stderr
        result = invoke(*arguments, "--json")
        assert result.exit_code == 1
        assert list(json.loads(result.stdout)["error"]) == ["type", "message", "found", "needed", "hint"]

    def test_unknown_backend(self):
        result = invoke("select", *SHAPE, "--tokens", "3", "--backend", "deepgem", "--json")
        assert (result.exit_code, json.loads(result.stdout)["error"]["type"]) == (1, UnknownBackend.__name__)

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), "--tokens"),
            (("--tokens", "3"), "--shape and --checkpoint"),
            ((*SHAPE, "--tokens", "3", "--checkpoint", "."), "--shape and --checkpoint"),
            (("--shape", "8,2,64", "--tokens", "3"), "E,K,H,I"),
            (("--shape", "8,2,64,-1", "--tokens", "3"), "E,K,H,I"),
            (("--shape", "8,2,64,9999999999999999999", "--tokens", "3"), "too large"),
            ((*SHAPE, "--tokens", "-1"), "--tokens"),
            ((*SHAPE, "--tokens", "1", "--dtype", "int8"), "--dtype"),
            ((*SHAPE, "--tokens", "1", "--layer", "2"), "--layer"),
            ((*SHAPE, "--tokens", "1", "--capability", "9"), "X.Y"),
            ((*SHAPE, "--tokens", "1", "--capability", "9.0", "--device", "cpu"), "--capability"),
            (("--checkpoint", ".", "--tokens", "1", "--bias"), "--bias"),
            (("--checkpoint", "/no/such/folder", "--tokens", "1"), "/no/such/folder"),
        ],
    )
    def test_usage_errors(self, arguments, words):
        result = invoke("select", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr

    def test_a_checkpoint_without_tensors_is_an_error_not_a_traceback(self, tmp_path):
        result = invoke("select", "--checkpoint", str(tmp_path), "--tokens", "1", "--json")
        assert (result.exit_code, json.loads(result.stdout)["error"]["type"]) == (1, "CheckpointError")


class TestDevices:
    GPUS = tuple({"kind": "cuda", "index": index} for index in range(4))

    @pytest.mark.parametrize(
        ("value", "indices"),
        [
            (None, [0, 1, 2, 3]),
            ("", []),
            ("2", [2]),
            ("3, 1", [3, 1]),
            ("-1", []),
            ("1,-1,2", [1]),
            ("0,9,1", [0]),
            ("GPU-8932f937", [0, 1, 2, 3]),
        ],
    )
    def test_visible_devices(self, value, indices):
        assert [gpu["index"] for gpu in machine.visible(list(self.GPUS), value)] == indices

    def test_gpus_are_the_drivers_words(self, monkeypatch, tmp_path):
        lines = ("0, 9.0, 143771, 580.95.05, NVIDIA H200", "1, [N/A], [N/A], 580.95.05, NVIDIA GB10, rev 2")
        self.fake_smi(monkeypatch, tmp_path, *(f"echo '{line}'" for line in lines))
        assert machine.describe_devices()[1:] == [
            {
                "kind": "cuda",
                "index": 0,
                "name": "NVIDIA H200",
                "capability": (9, 0),
                "memory_bytes": 143771 * 2**20,
                "driver": "580.95.05",
            },
            {
                "kind": "cuda",
                "index": 1,
                "name": "NVIDIA GB10, rev 2",
                "capability": None,
                "memory_bytes": None,
                "driver": "580.95.05",
            },
        ]

    @pytest.mark.parametrize("line", ["exit 9", "echo '0, 9.0, 1, it, failed'; exit 9", "echo"])
    def test_without_a_driver_there_is_the_cpu_only(self, monkeypatch, tmp_path, line):
        self.fake_smi(monkeypatch, tmp_path, line)
        assert [device["kind"] for device in machine.describe_devices()] == ["cpu"]

    def test_doctor_decides_for_the_gpu_it_lists(self, monkeypatch, tmp_path):
        self.fake_smi(monkeypatch, tmp_path, "echo '0, 9.0, 143771, 580.95.05, NVIDIA H200'")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        assert machine_facts(machine.describe_devices()).capability == (9, 0)
        result = invoke("doctor")
        assert "NVIDIA H200, SM90, 140.4 GiB, driver 580.95.05" in " ".join(result.stdout.split())

    @staticmethod
    def fake_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
        program = folder / "nvidia-smi"
        program.write_text("\n".join(("#!/bin/sh", *lines, "")))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, None),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**30, "3.0 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_sizes_for_reading(count, text):
    assert output.size(count) == text


def test_version_and_help():
    assert invoke("--version").stdout.startswith("routed-experts, version ")
    assert invoke("--help").stdout == invoke("-h").stdout
    assert {"doctor", "select"} <= set(main.commands)


def test_module_runs_as_a_program():
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-m", "routed_experts.cli", "select", "--tokens", "1"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
