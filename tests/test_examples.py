"""The examples run as a user runs them, with small settings, and fail when what they show is not so.

So does the code of the page about transformers, on checkpoints that two of them make.
"""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import routed_experts as rx
from routed_experts import calling

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
RUN_HERE = ("eager", "batched_mm", "grouped_mm")


def example(name: str, *arguments: str) -> str:
    """Run an example that must succeed; return what it printed."""
    # One thread: the models are small, and on a busy machine threads mostly wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def row(printed: str, title: str) -> list[str]:
    """Return the cells after ``title`` in a table."""
    found = re.search(rf"^│ {re.escape(title)} +│(.*)│$", printed, re.MULTILINE)
    assert found, f"no row {title!r} in\n{printed}"
    return [cell.strip() for cell in found[1].split("│")]


def test_every_example_is_run_here_or_by_make() -> None:
    here = set(re.findall(r'example\("(\w+\.py)"', Path(__file__).read_text()))
    by_make = set(re.findall(r"examples/(\w+\.py)", (EXAMPLES.parent / "Makefile").read_text()))
    under_torchrun = set(
        re.findall(r'"examples" / "(\w+\.py)"', Path(__file__).with_name("test_parallel_example.py").read_text())
    )
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert len(names) >= 4
    assert names == here | by_make | under_torchrun


def test_transformers_generate(tmp_path: Path) -> None:
    printed = example("transformers_generate.py", "--new-tokens", "8", "--repeats", "1", "--out", str(tmp_path))
    for name in ("eager", "grouped_mm", "routed_experts", *(f"routed_experts_{backend}" for backend in RUN_HERE)):
        rate, equal, apart = row(printed, name)
        assert float(rate) > 0
        assert equal == "yes"
        assert float(apart) < 1e-4
    assert rx.ExpertWeights.from_checkpoint(tmp_path, layer=1).num_experts == 16


def test_vlm_per_backbone() -> None:
    printed = example("vlm_per_backbone.py")
    top, _, text, _ = row(printed, "as loaded")
    assert (top, text) == ("transformers:eager", "grouped_mm")
    assert row(printed, "model.set_..., text_config")[2] == "batched_mm"
    assert row(printed, 'rx.set_..., ""')[:3] == ["auto", "auto", "auto"]
    assert row(printed, "rx.set_..., a part too many") == row(printed, "rx.set_..., both")
    assert "Refused: 'audio_config'" in printed


def test_train_tiny_moe(tmp_path: Path) -> None:
    out, record = tmp_path / "model", tmp_path / "routing.safetensors"
    options = ["--steps", "25", "--out", str(out), "--record", str(record), "--record-tokens", "256"]
    printed = example("train_tiny_moe.py", *options)
    for name in RUN_HERE:
        first, last, apart, _ = row(printed, name)
        assert float(last) < float(first) - 1
        assert float(apart) < 1e-5
    assert rx.ExpertWeights.from_checkpoint(out, layer=1).num_experts == 16
    with safe_open(record, "pt") as file:
        assert file.metadata() == {"num_experts": "16", "layer": "1", "steps": "25"}
        index, weights = file.get_tensor("top_k_index"), file.get_tensor("top_k_weights")
        assert index.shape == weights.shape == (256, 2)
        assert (index.dtype, weights.dtype) == (torch.int64, torch.float32)
        assert 0 <= index.min() <= index.max() < 16
        assert (index[:, 0] != index[:, 1]).all()
        assert file.get_tensor("hidden_states").shape == (256, 64)


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All our backends are off by a twentieth inside models, for an example that runs in this process."""
    run = rx.run_experts
    monkeypatch.setattr(calling, "run_experts", lambda *arguments, **keywords: 1.05 * run(*arguments, **keywords))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    rx.unregister_from_transformers()


@pytest.mark.usefixtures("scaled")
@pytest.mark.parametrize(
    ("name", "arguments", "complaint"),
    [
        ("transformers_generate.py", ["--repeats", "1", "--new-tokens", "8"], "> 1e-04"),
        ("vlm_per_backbone.py", [], "> 1e-04"),
        ("train_tiny_moe.py", ["--steps", "5", "--backends", "grouped_mm", "--record-tokens", "64"], "> 1e-05"),
    ],
)
def test_wrong_answers_fail(
    name: str, arguments: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as done:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert done.value.code == 1
    assert complaint in capsys.readouterr().out


@pytest.fixture
def unregistered() -> Iterator[None]:
    yield
    rx.unregister_from_transformers()


@pytest.mark.usefixtures("unregistered")
def test_code_in_docs_runs(tmp_path: Path) -> None:
    page = EXAMPLES.parent / "docs" / "transformers.md"
    text = page.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {"tokens": torch.arange(8).reshape(1, 8)}
    for variable, name in (("path", "transformers_generate.py"), ("vlm_path", "vlm_per_backbone.py")):
        namespace[variable] = tmp_path / variable
        runpy.run_path(str(EXAMPLES / name))["make_checkpoint"](namespace[variable])
    for block in blocks:
        # Leading newlines make a traceback point at the page's own line.
        source = "\n" * text[: block.start(1)].count("\n") + block[1]
        exec(compile(source, page, "exec"), namespace)
