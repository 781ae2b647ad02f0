"""What the measuring commands refuse: options that would be ignored, devices and memory there are not, odd files."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file

from routed_experts.bench import run
from routed_experts.cli import main

SMALL = ("--shape", "6,2,32,16", "--tokens", "1", "--device", "cpu")
QUICK = (*SMALL, "--backends", "fused", "--skip-peers", "--seconds", "0.02")
MEASURING = pytest.mark.parametrize("command", ["bench", "tune", "warmup"])


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ROUTED_EXPERTS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    name = "model.layers.0.mlp.experts"
    weights = {f"{name}.gate_up_proj": torch.zeros(4, 32, 8), f"{name}.down_proj": torch.zeros(4, 8, 16)}
    save_file(weights, folder / "model.safetensors")
    return folder


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(part) for part in arguments])


def refused(*arguments: object) -> str:
    result = invoke(*arguments)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit), result.output
    return result.output


def test_the_package_itself_is_the_command():
    command = [sys.executable, "-m", "routed_experts", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("routed-experts, version ")


@MEASURING
@pytest.mark.parametrize(("option", "value"), [("--layer", 0), ("--layer", 3), ("--top-k", 2)])
def test_options_of_a_checkpoint_without_one(command, option, value):
    assert f"{option} cannot be given without --checkpoint" in refused(command, *SMALL, option, value)


@MEASURING
@pytest.mark.parametrize(("option", "value"), [("--shape", "6,2,32,16"), ("--shapes", "olmoe")])
def test_a_checkpoint_and_another_layer(command, option, value, checkpoint):
    text = refused(command, "--checkpoint", checkpoint, "--top-k", 1, option, value)
    assert f"{option} cannot be given with --checkpoint" in text


@MEASURING
def test_cuda_where_there_is_none(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in refused(command, "--shape", "6,2,32,16", "--tokens", "1", "--device", "cuda")


@MEASURING
@pytest.mark.parametrize("size", [10**20, 2**58])
def test_sizes_no_tensor_has(command, size):
    assert "too large for any tensor" in refused(command, "--shape", f"{size},1,16,16", "--tokens", "1")
    assert "--tokens takes at most" in refused(command, "--shape", "6,2,32,16", "--tokens", f"1,{size}")


@MEASURING
def test_more_than_the_memory_is_no_traceback(command):
    result = invoke(command, "--shape", "100000,1,100000,100000", "--tokens", "1", "--device", "cpu")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "error: not enough memory\n  found: no room for 4000000000000000 bytes" in result.output


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), MemoryError()])
def test_memory_that_ends_later_is_told_as_json(error, monkeypatch):
    def fails(*_args):
        raise error

    monkeypatch.setattr(run, "run", fails)
    result = invoke("bench", *QUICK, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "DeviceError"


def test_other_errors_of_torch_keep_their_traceback(monkeypatch):
    def fails(*_args):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(run, "run", fails)
    assert str(invoke("bench", *QUICK).exception) == "a fault of ours"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_seconds_that_measure_nothing(seconds):
    assert "--seconds" in refused("bench", *SMALL, "--seconds", seconds)


def test_a_backend_there_is_not():
    result = invoke("bench", *SMALL, "--backends", "fused,fussed")
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert 'found: "fussed"' in result.output


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"rows": 3}', '{"rows": [3]}', '{"rows": [{"a": 1}]}', '{"rows": [{"sizes": 1}]}']
)
def test_an_older_run_that_is_none(text, tmp_path):
    old = tmp_path / "old.json"
    old.write_text(text)
    assert "no JSON that bench wrote" in refused("bench", *QUICK, "--compare", old)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, "does not say it"),
        ({"num_experts_per_tok": True}, "does not say it"),
        ({"text_config": 5}, "does not say it"),
        ({"num_experts_per_tok": 7}, "7 is more than it has experts"),
    ],
)
def test_experts_a_token_that_the_configuration_does_not_say(config, reason, checkpoint):
    (checkpoint / "config.json").write_text(json.dumps({"hidden_act": "silu"} | config))
    assert reason in refused("bench", "--checkpoint", checkpoint, "--tokens", "1", "--device", "cpu")
