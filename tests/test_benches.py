"""bench: what it writes, and that nothing wrong or impossible gets a time."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import routed_experts as rx

BENCHES = Path(__file__).resolve().parent.parent / "benches"
SETTING = {"command", "date", "versions", "machine", "ceilings", "rows"}
ROW = {
    "shape", "sizes", "dtype", "quantization", "tokens", "routing", "sets", "experts_hit", "busiest_to_mean", "floor",
    "error", "failed", "us", "no_eager", "compiled_us", "no_compile", "graph_us", "no_graph", "auto_is", "x_floor",
    "published_x_floor", "x_published", "auto_to_best_peer",
}  # fmt: skip
RATES = {"matmul_tflops": {"float32": 10.0, "bfloat16": 800.0}, "copy_gb_s": 4000.0, "read_gb_s": 4500.0}


@pytest.fixture
def bench():
    names = ("candidates", "floor", "gate", "inputs", "measure", "report", "shapes", "timing")
    parts = {name: importlib.import_module(f"routed_experts.bench.{name}") for name in names}
    parts |= {name: getattr(parts["measure"], name) for name in ("Choice", "Layer", "ratios")}
    return SimpleNamespace(**parts)


@pytest.fixture
def layer(bench):
    shape = bench.shapes.Shape(4, 2, 32, 16)
    return bench.Layer("tiny", shape, "float32", "cpu", bench.floor.Ceilings(**RATES))


def measure(bench, layer, *backends):
    return layer.measure(3, "skewed", ["eager"], 0.02, bench.Choice(backends, True, 64))


@pytest.mark.parametrize(("most", "copies"), [(6, True), (5, False)])
def test_what_copies_weights_is_left_out_of_large_calls(bench, layer, most, copies):
    """Three tokens of two slots are six copies."""
    row = layer.measure(3, "skewed", ["eager"], 0.02, bench.Choice((), True, most))
    assert ("batched_mm" in row["us"]) is copies
    assert "eager" in row["us"]


def test_command_writes_every_row(tmp_path):
    file = tmp_path / "out.json"
    options = ["--shape", "6,2,32,16", "--tokens", "1,5", "--dtypes", "float32", "--seconds", "0.02"]
    options += ["--routing", "skewed,balanced"]
    command = [sys.executable, str(BENCHES / "bench_experts.py"), *options, "--skip-peers", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert set(report) == SETTING
    assert set(report["ceilings"]) == set(RATES)
    assert [(row["tokens"], row["routing"]) for row in report["rows"]] == [
        (1, "skewed"), (1, "balanced"), (5, "skewed"), (5, "balanced")
    ]  # fmt: skip
    for row in report["rows"]:
        assert set(row) == ROW
        assert set(row["us"]) == set(row["error"]) == set(row["x_floor"]) >= {"eager", "grouped_mm", "auto"}
        assert row["sizes"] == [6, 2, 32, 16]
        assert row["x_floor"]["auto"] == pytest.approx(row["us"]["auto"] / row["floor"]["us"])
        assert not row["failed"]
    assert "6,2,32,16 float32, T=5, balanced" in done.stdout


def test_transformers_functions_are_candidates(bench, layer):
    pytest.importorskip("transformers")
    sets = bench.inputs.draw(layer.shape, torch.float32, 3, "skewed", "cpu")
    found = bench.candidates.peers(layer.module, 6, bench.Choice((), False, 64))
    assert set(found) == {"transformers grouped_mm", "transformers batched_mm"}
    for function in found.values():
        torch.testing.assert_close(function(*sets[0]), bench.inputs.reference(layer.module, sets[0]))
    assert set(bench.candidates.peers(layer.module, 65, bench.Choice((), False, 64))) == {"transformers grouped_mm"}


def test_a_kernel_of_another_library_is_a_candidate_where_it_is(bench, layer, monkeypatch):
    def fused_experts(x, up, down, scores, index):
        assert (scores.dtype, index.dtype) == (torch.float32, torch.int32)
        return bench.inputs.reference(layer.module, bench.inputs.Inputs(x, index, scores))

    names = ["vllm", "vllm.model_executor", "vllm.model_executor.layers", "vllm.model_executor.layers.fused_moe"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].__spec__ = ModuleSpec("vllm", None)
    assert bench.candidates._vllm(layer.module) == {}
    on_device = SimpleNamespace(down_proj=SimpleNamespace(is_cuda=True), gate_up_proj=None)
    assert bench.candidates._vllm(on_device) == {}  # the package is there, the kernel is not
    sys.modules[names[-1]].fused_experts = fused_experts
    (function,) = bench.candidates._vllm(on_device).values()
    (one, *_) = bench.inputs.draw(layer.shape, torch.float32, 3, "skewed", "cpu")
    torch.testing.assert_close(function(*one), bench.inputs.reference(layer.module, one))


@pytest.mark.parametrize(
    "wrong",
    [lambda out: out * 1.001, lambda out: out.new_empty(out.shape), lambda out: out.double(), lambda out: 1 / 0],
)
def test_a_wrong_answer_has_no_time(bench, layer, wrong, poisoned):
    def run(experts, x, index, weights):
        return wrong(rx.run_experts(x, index, weights, experts, backend="eager"))

    layer.ours.function = lambda name: lambda *inputs: run(layer.ours.weights, *inputs)
    row = measure(bench, layer, "eager")
    assert set(row["failed"]) == {"eager"}
    assert row["us"] == row["error"] == row["x_floor"] == {}


def test_memory_is_poisoned_before_the_gate(bench, layer, monkeypatch):
    """A result that is wrong on its second input set only, where nobody wrote."""
    sizes, calls = [], []
    monkeypatch.setattr(bench.gate, "poison", lambda device, scratch: sizes.append(scratch))
    right = layer.ours.run

    def run(*inputs, backend):
        calls.append(backend)
        return right(*inputs, backend=backend) * (1 if len(calls) == 1 else float("nan"))

    monkeypatch.setattr(layer.ours, "run", run)
    row = measure(bench, layer, "grouped_mm")
    assert "nan from float32" in row["failed"]["grouped_mm"]
    assert sizes == [32 * 3 * 2 * 4] * 2


def test_what_cannot_run_says_why(bench, layer):
    row = measure(bench, layer, "auto", "deepgemm", "nonsense")
    assert row["failed"]["deepgemm"].startswith("cannot run: found float32")
    assert row["failed"]["nonsense"] == "no backend of this name"
    assert set(row["us"]) == {"auto"}


def test_our_gate_is_one_that_can_be_fused(layer):
    assert layer.ours.weights.gate is None
    assert layer.ours.weights.activation == "silu"
    assert layer.ours.weights.gate_up_proj is layer.module.gate_up_proj


def test_capture_is_asked_of_the_selection_first(bench, layer):
    reason = layer.ours.refuses_capture(3, "eager")
    assert reason.startswith("BackendUnavailable")
    assert layer.ours.refuses_capture(3, "batched_mm") is None
    replays, reasons = layer.capture(
        {"eager": None}, bench.inputs.draw(layer.shape, torch.float32, 3, "skewed", "cpu"), []
    )
    assert (replays, reasons) == ({}, {"eager": reason})


@pytest.fixture
def device(monkeypatch):
    """A device of its own clock: every call takes 25 us, and events note when they were recorded."""
    clock = SimpleNamespace(us=0.0, waits=0, stream="main", replays=0)

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = clock.us

        def elapsed_time(self, after):
            return (after.at - self.at) / 1e3

    class Graph:
        def replay(self):
            clock.replays += 1

    @contextlib.contextmanager
    def on(stream):
        before, clock.stream = clock.stream, stream
        yield  # what fails under capture leaves the stream behind, as torch does
        clock.stream = before

    wait = SimpleNamespace(wait_stream=lambda other: None)
    fakes = {"Event": Event, "CUDAGraph": Graph, "Stream": lambda: wait, "stream": on, "graph": on}
    fakes |= {"current_stream": lambda: wait, "set_stream": lambda stream: setattr(clock, "stream", "main")}
    fakes["synchronize"] = lambda: setattr(clock, "waits", clock.waits + 1)
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)

    def call(x, index, weights):
        clock.us += 25
        return x

    clock.call = call
    return clock


def test_time_on_a_device_is_what_lies_between_events(bench, device):
    sets = [bench.inputs.Inputs(i, None, None) for i in range(4)]
    run = bench.timing.eager_pass(device.call, sets)
    found = bench.timing.medians({"a": run, "b": lambda: (run(), run())}, 4, "cuda", 1e-4)
    assert found == {"a": pytest.approx(25), "b": pytest.approx(50)}
    assert device.waits == 2 * 3 * 3


def test_a_graph_holds_a_call_for_every_set(bench, device):
    sets = [bench.inputs.Inputs(i, None, None) for i in range(4)]
    replay, outputs = bench.timing.captured_pass(device.call, sets)
    replay()
    assert (outputs, device.replays, device.us) == ([0, 1, 2, 3], 1, 2 * 4 * 25)

    def waits_under_capture(x, index, weights):
        if isinstance(device.stream, captures):
            raise RuntimeError("operation not permitted when stream is capturing")

    captures = type(torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="capturing"):
        bench.timing.captured_pass(waits_under_capture, sets)
    assert device.stream == "main"


def test_floor_is_the_larger_of_two(bench):
    ceilings = bench.floor.Ceilings(**RATES)
    shape = bench.shapes.Shape(8, 2, 4096, 14336)
    few = bench.floor.floor(shape, 1, "bfloat16", 2, ceilings)
    many = bench.floor.floor(shape, 4096, "bfloat16", 8, ceilings)
    weights = 3 * 4096 * 14336 * 2 * 2
    assert few.bound == "bytes"
    assert few.us == pytest.approx((weights + 2 * 4096 * 2) / 4000e3)
    assert few.read_us == pytest.approx((weights + 2 * 4096 * 2) / 4500e3)
    assert many.bound == "flops"
    assert many.us == many.read_us == pytest.approx(6 * 4096 * 2 * 4096 * 14336 / 800e6)


def test_floor_of_quantized_weights_is_at_the_rate_of_their_products(bench, monkeypatch):
    shape = bench.shapes.Shape(8, 2, 4096, 14336)
    tflops = {**RATES["matmul_tflops"], bench.floor.E4M3: 1400.0}
    ceilings = bench.floor.Ceilings(**{**RATES, "matmul_tflops": tflops})
    plain = bench.floor.floor(shape, 65536, "bfloat16", 8, ceilings)
    quantized = bench.floor.floor(shape, 65536, "bfloat16", 8, ceilings, 1.0)
    older = bench.floor.floor(shape, 65536, "bfloat16", 8, bench.floor.Ceilings(**RATES), 1.0)
    assert quantized.us == pytest.approx(plain.us * 800 / 1400)
    assert older.us == plain.us
    capability = iter([(9, 0), (8, 6)])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: next(capability))
    ask = bench.floor.products
    assert ask("cuda", ["bfloat16"], is_quantized=True) == ["bfloat16", bench.floor.E4M3]
    assert ask("cuda", ["bfloat16"], is_quantized=True) == ["bfloat16"]
    assert ask("cuda", ["bfloat16"], is_quantized=False) == ask("cpu", ["bfloat16"], is_quantized=True) == ["bfloat16"]


def test_ratios_take_the_smaller_mode(bench):
    row = {"floor": {"us": 10.0}, "us": {"auto": 40.0, "eager": 90.0, "transformers grouped_mm": 50.0}}
    row["graph_us"] = {"auto": 15.0, "transformers grouped_mm": 30.0}
    found = bench.ratios(row, 1.2)
    assert found["x_floor"] == {"auto": 1.5, "eager": 9.0, "transformers grouped_mm": 3.0}
    assert found["x_published"]["auto"] == pytest.approx(1.25)
    assert found["auto_to_best_peer"] == pytest.approx(0.5)
    assert bench.ratios(row, None)["x_published"] == {}


def test_published_figures_are_of_one_device_dtype_and_routing(bench):
    ask = bench.shapes.published
    assert ask("deepseek-v3", "cuda", "bfloat16", 64, "skewed") == 0.97
    others = [
        ("cpu", "bfloat16", 64, "skewed"),
        ("cuda", "float16", 64, "skewed"),
        ("cuda", "bfloat16", 64, "balanced"),
    ]
    assert [ask("deepseek-v3", *other) for other in [*others, ("cuda", "bfloat16", 65, "skewed")]] == [None] * 4
    assert ask("deepseek-v3", "cuda", "bfloat16", 64, "skewed", "fp8_block") == 1.02
    assert ask("mixtral", "cuda", "bfloat16", 64, "skewed", "fp8_block") is None
    assert ask("deepseek-v3", "cuda", "bfloat16", 64, "skewed", "mxfp4") is None


def test_routing_is_skewed_or_balanced(bench):
    shape = bench.shapes.Shape(64, 4, 8, 8)
    drawn = {kind: bench.inputs.draw(shape, torch.float32, 2048, kind, "cpu") for kind in ("skewed", "balanced")}
    busiest = {kind: bench.inputs.load(sets, 64)[1] for kind, sets in drawn.items()}
    assert busiest["skewed"] > 2 > 1.5 > busiest["balanced"]
    assert not torch.equal(drawn["skewed"][0].index, drawn["skewed"][1].index)
    assert not torch.equal(drawn["skewed"][0].x, drawn["skewed"][1].x)


def test_card_is_the_line_of_its_device(bench):
    line = "GPU-{}, 580.1, P0, 1980 MHz, 3201 MHz, 1980 MHz, 3201 MHz, 70.1 W, 700.00 W, 30, Enabled"
    found = bench.report.parse_card(f"{line.format('aa')}\n{line.format('bb').replace('580.1', '580.2')}\n", "bb")
    assert found["driver"] == "580.2"
    assert found["clocks.sm"] == "1980 MHz"
    assert bench.report.parse_card("no devices were found\n", "bb") == {}


@pytest.mark.parametrize("file", sorted(BENCHES.glob("bench_*.py")), ids=lambda file: file.stem)
def test_every_benchmark_starts(file):
    done = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "--help" in done.stdout


def test_formats_of_a_layer_take_turns_on_a_cpu(tmp_path):
    file = tmp_path / "cpu.json"
    options = ["--shape", "4,2,128,128", "--tokens", "1", "--seconds", "0.1", "--formats", "bfloat16,mxfp4"]
    command = [sys.executable, BENCHES / "bench_cpu.py", *options, "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    plain, packed = json.loads(file.read_text())["rows"]
    assert (plain["format"], packed["format"]) == ("bfloat16", "mxfp4")
    assert packed["us"]["fused"] > 0 < plain["times_faster_than_peers"]
    assert max(packed["error"].values()) < 2e-2
