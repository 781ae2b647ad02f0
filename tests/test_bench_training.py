"""bench_training.py: what it writes, and that a wrong gradient gets no time."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHES = Path(__file__).resolve().parent.parent / "benches"
ROW = {"shape", "sizes", "dtype", "tokens", "routing", "error", "us", "peak_bytes", "failed", "speedup"}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(BENCHES)
    yield importlib.import_module("bench_training")
    for name in [name for name in sys.modules if name.startswith("bench_")]:
        del sys.modules[name]


def test_command_writes_every_row(tmp_path):
    file = tmp_path / "out.json"
    options = ["--shape", "6,2,32,16", "--tokens", "3,9", "--dtypes", "float32,bfloat16", "--seconds", "0.02"]
    command = [sys.executable, str(BENCHES / "bench_training.py"), *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert set(report) == {"command", "date", "versions", "machine", "rows"}
    assert [(row["dtype"], row["tokens"]) for row in report["rows"]] == [
        ("float32", 3), ("float32", 9), ("bfloat16", 3), ("bfloat16", 9)
    ]  # fmt: skip
    for row in report["rows"]:
        assert set(row) == ROW
        assert not row["failed"]
        assert set(row["us"]) == set(row["error"]) >= {"grouped_mm"}


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("wrong", [1.001, float("nan")])
def test_one_wrong_tensor_is_enough(bench, place, wrong, monkeypatch):
    """The result, and the gradients of tokens, routing weights and both matrices."""
    layer = bench.Layer("tiny", bench.shapes.Shape(4, 2, 32, 16), "float32", "cpu", ("grouped_mm", "eager"))
    layer.functions = {name: layer.functions[name] for name in ("grouped_mm", "eager")}
    step, eager = layer.step, layer.functions["eager"]

    def spoiled(function, *given):
        out, grads = step(function, *given)
        found = [out, *grads]
        if function is eager:
            found[place] = found[place] * wrong
        return found[0], found[1:]

    monkeypatch.setattr(layer, "step", spoiled)
    row = layer.measure(5, "skewed", 0.02)
    assert set(row["us"]) == {"grouped_mm"}
    assert "WrongAnswer" in row["failed"]["eager"]
    assert row["error"]["grouped_mm"] < 1e-6
    assert torch.isfinite(torch.tensor(row["us"]["grouped_mm"]))
