"""bench_deepgemm.py over a stand-in for DeepGEMM: its options, both paths over one kernel, and its gate."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from routed_experts import reset_kernels
from routed_experts.backends import deepgemm
from routed_experts.bench.candidates import Choice, Ours
from routed_experts.bench.shapes import Shape

integration = pytest.importorskip("transformers.integrations.deepgemm")
BENCHES = Path(__file__).resolve().parent.parent / "benches"
SHAPE = Shape(5, 3, 256, 128)
# A package whose entry points are the stand-in's.
PACKAGE = """
from external_fakes import FakeDeepGemm
_FAKE = FakeDeepGemm(9)
__version__ = "2.8.1"
def __getattr__(name):
    return getattr(_FAKE, name)
"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The script, and a folder that holds a `deep_gemm`; what asks a device for its capability is told 9."""
    monkeypatch.syspath_prepend(BENCHES)
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "deep_gemm").mkdir()
    (tmp_path / "deep_gemm" / "__init__.py").write_text(PACKAGE)
    monkeypatch.setattr(deepgemm, "capability_major", lambda device: 9)
    monkeypatch.setattr(integration, "is_sm100", lambda: False)
    monkeypatch.setattr(integration, "_DEEPGEMM", None)
    monkeypatch.setattr(Ours, "decisions", lambda self, tokens: {"deepgemm": None})
    monkeypatch.setattr(Ours, "run", lambda self, *call, backend: deepgemm.run(self.weights, *call))
    yield importlib.import_module("bench_deepgemm")
    for name in ("bench_deepgemm", "deep_gemm"):
        sys.modules.pop(name, None)
    reset_kernels()


@pytest.fixture
def rows_of(bench, tmp_path):
    """Measure the small shape in one format and return what the file holds of it."""

    def measure(fmt, skip_peers=False):
        kernel, file = bench.kernel_of(tmp_path), tmp_path / "out.json"
        bench.hand_over(kernel)
        choice = Choice(("deepgemm",), skip_peers, 0)
        bench.run_grid(kernel, [(("tiny", SHAPE), fmt)], [(7, "skewed")], ["eager"], 0.02, choice, file, "cpu")
        report = json.loads(file.read_text())
        assert report["versions"]["deep_gemm"] == "2.8.1"
        return report["rows"]

    return measure


@pytest.mark.parametrize("fmt", ["none", "fp8_block"])
def test_both_paths_run_over_the_kernel_of_the_folder(rows_of, fmt):
    (row,) = rows_of(fmt)
    assert row["failed"] == {}
    assert set(row["us"]) == {"deepgemm", "transformers deepgemm"}
    assert row["quantization"] == fmt
    times = row["us"]
    assert row["speedup"]["eager"] == {
        "deepgemm": pytest.approx(times["transformers deepgemm"] / times["deepgemm"]),
    }
    assert len(sys.modules["deep_gemm"]._FAKE.calls) >= 8  # two products, two input sets, two paths


def test_ours_alone(rows_of):
    (row,) = rows_of("none", skip_peers=True)
    assert set(row["us"]) == {"deepgemm"}
    assert row["speedup"] == {"eager": {}}


def test_a_wrong_answer_has_no_time(rows_of, monkeypatch):
    right = deepgemm.run
    monkeypatch.setattr(deepgemm, "run", lambda *call: right(*call) * 1.1)
    (row,) = rows_of("none")
    assert set(row["failed"]) == {"deepgemm"}
    assert set(row["us"]) == {"transformers deepgemm"}


def test_options(bench, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(bench, "run_grid", lambda *arguments: made.append(arguments))
    run = lambda *options: CliRunner().invoke(bench.main, ["--deep-gemm", str(tmp_path), *options])  # noqa: E731
    done = run("--shape", "5,3,256,128", "--tokens", "1,64", "--modes", "graph", "--quantizations", "fp8_block")
    assert done.exit_code == 0, done.output
    ((kernel, layers, grid, modes, _, choice, _),) = made
    assert kernel.module is sys.modules["deep_gemm"]
    assert layers == [(("5,3,256,128", SHAPE), "fp8_block")]
    assert grid == [(1, "skewed"), (64, "skewed")]
    assert modes == ["graph"]
    assert choice.backends == ("deepgemm",)
    assert integration._DEEPGEMM.m_alignment == 128
    for options in (
        ("--tokens", "0"),
        ("--modes", "compiled"),
        ("--backends", "nonsense"),
        ("--quantizations", "int4"),
    ):
        assert run(*options).exit_code == 2
    assert CliRunner().invoke(bench.main, ["--deep-gemm", str(tmp_path / "none")]).exit_code == 2
    assert len(made) == 1
