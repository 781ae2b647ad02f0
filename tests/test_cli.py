"""The command line: what it prints, as tables and as JSON, and how it fails."""

import json
import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner, Result
from routed_experts.cli import main, output
from routed_experts.errors import UnknownBackend
from safetensors.torch import save_file

SHAPE = ("--shape", "8,2,64,32")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.fixture(autouse=True)
def plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


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

    def test_piped_tables_are_plain_and_80_wide(self):
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

    def test_a_layer_of_a_checkpoint(self, tmp_path):
        shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
        prefix = "model.layers.1.mlp.experts"
        tensors = {
            f"{prefix}.{expert}.{name}.weight": torch.zeros(shape, dtype=torch.bfloat16)
            for expert in range(4)
            for name, shape in shapes.items()
        }
        save_file(tensors, tmp_path / "model.safetensors")
        config = {"model_type": "qwen3_moe", "num_experts": 4, "hidden_size": 8, "moe_intermediate_size": 6}
        (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "silu"}))
        options = ("--layer", "1", "--tokens", "7", "--top-k", "2", "--device", "cpu", "--json")
        result = invoke("select", "--checkpoint", str(tmp_path), *options)
        assert result.exit_code == 0, result.output
        selection = json.loads(result.stdout)
        assert selection["name"] in {one["backend"] for one in selection["decisions"] if one["accepted"]}

    def test_another_gpu_can_be_asked_about(self):
        result = invoke("select", *SHAPE, "--tokens", "3", "--capability", "10.0", "--json")
        decisions = json.loads(result.stdout)["decisions"]
        # On a CPU they would be declined for the device; the question was about a GPU.
        assert not any("device cpu" in (one["found"] or "") for one in decisions)

    def test_a_checkpoint_without_tensors_is_an_error_not_a_traceback(self, tmp_path):
        result = invoke("select", "--checkpoint", str(tmp_path), "--tokens", "1", "--json")
        assert (result.exit_code, json.loads(result.stdout)["error"]["type"]) == (1, "CheckpointError")


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


@pytest.mark.parametrize(
    ("us", "text"), [(None, "-"), (0.04, "0.0 us"), (999, "999.0 us"), (161376, "161.4 ms")]
)
def test_times_for_reading(us, text):
    assert output.duration(us) == text


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
