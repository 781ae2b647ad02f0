"""``routed-experts bench``: files, pictures, modes, checkpoints, interrupts and refusals."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from test_benches import ROW, SETTING

from routed_experts.bench import crossings, measure, page, picture, run
from routed_experts.bench.recorded import Recorded
from routed_experts.cli import main
from routed_experts.errors import LayoutError

SHAPE = ("--shape", "6,2,32,16")
QUICK = (*SHAPE, "--device", "cpu", "--tokens", "1,5", "--dtypes", "float32", "--seconds", "0.02", "--skip-peers")


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def test_two_backends_of_a_small_shape_in_well_under_a_minute():
    command = [sys.executable, "-m", "routed_experts.cli", "bench", "--shape", "8,2,256,128", "--device", "cpu"]
    start = time.perf_counter()
    done = subprocess.run([*command, "--backends", "eager,fused"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - start < 60
    assert len(re.findall(r"fused\s+│", done.stdout)) == 4
    assert "x floor" in done.stdout


def test_every_file_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    files = {name: tmp_path / f"out.{name}" for name in ("json", "csv", "png", "html")}
    result = invoke(*QUICK, *(part for name, file in files.items() for part in (f"--{name}", file)))
    assert result.exit_code == 0, result.output
    report = json.loads(files["json"].read_text())
    assert set(report) == SETTING
    assert [set(row) for row in report["rows"]] == [ROW] * 2
    lines = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert len(lines) == sum(len(row["us"]) for row in report["rows"])
    one = next(line for line in lines if line["candidate"] == "eager" and line["tokens"] == "5")
    assert float(one["us"]) == report["rows"][1]["us"]["eager"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    text = files["html"].read_text()
    assert "grouped_mm" in text
    # Nothing is loaded from elsewhere: the page works without a network.
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=", text)
    assert "Plotly.newPlot" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in files.values())


def test_json_on_stdout_is_all_there_is_on_stdout():
    result = invoke(*QUICK, "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["rows"]) == 2


def test_a_wrong_backend_prints_no_time(monkeypatch, tmp_path):
    def wrong(layer, functions, sets, wanted):
        return {}, {}, dict.fromkeys(functions, "WrongAnswer: far off")

    monkeypatch.setattr(measure.Layer, "gate", wrong)
    result = invoke(*QUICK, "--backends", "eager", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    assert "eager, failed: WrongAnswer" in result.stdout
    assert not re.search(r"│ eager\s+│", result.stdout)
    assert all(row["us"] == {} for row in json.loads((tmp_path / "out.json").read_text())["rows"])


def test_compiled_calls_are_a_mode(tmp_path):
    arguments = ("--backends", "grouped_mm", "--modes", "eager,compiled", "--tokens", "3", "--json", tmp_path / "a")
    result = invoke(*QUICK, *arguments)
    assert result.exit_code == 0, result.output
    row = json.loads((tmp_path / "a").read_text())["rows"][0]
    assert set(row["us"]) == set(row["compiled_us"]) == {"grouped_mm"}
    assert row["graph_us"] == row["no_compile"] == {}


def test_an_interrupt_keeps_the_rows_that_were_measured(tmp_path, monkeypatch):
    measured = measure.Layer.measure

    def stop(layer, tokens, *rest):
        if tokens == 5:
            raise KeyboardInterrupt
        return measured(layer, tokens, *rest)

    monkeypatch.setattr(measure.Layer, "measure", stop)
    result = invoke(*QUICK, "--json", tmp_path / "out.json")
    assert result.exit_code == 130
    assert "interrupted: 1 of 2 rows" in result.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["tokens"] for row in report["rows"]] == [1]
    assert report["ceilings"]["copy_gb_s"] > 0


def test_a_file_is_whole_or_as_it_was(tmp_path):
    file = tmp_path / "out.json"
    run.write(file, {"rows": [1]})
    with pytest.raises(TypeError):
        run.write(file, {"rows": [object()]})
    assert json.loads(file.read_text()) == {"rows": [1]}
    assert list(tmp_path.iterdir()) == [file]


def row(tokens, floor=10.0, **us):
    return {
        "shape": "s", "sizes": [8, 2, 16, 16], "dtype": "bfloat16", "quantization": "none", "tokens": tokens,
        "routing": "skewed", "floor": {"us": floor}, "us": us, "error": dict.fromkeys(us, 0.0),
    }  # fmt: skip


def test_crossings_lie_where_lines_meet():
    rows = [row(1, a=10.0, b=40.0, auto=1.0), row(4, a=40.0, b=40.0), row(16, a=160.0, b=40.0), row(64, b=40.0, c=39.0)]
    (group,) = crossings.groups(rows)
    first, second = group.crossings()
    assert first[1:] == ("a", "b")
    assert first[0] == pytest.approx(4.0)
    # c has no time below: the mean on the logarithmic axis.
    assert second == (pytest.approx(32.0), "b", "c")


def test_crossings_are_marked_on_the_page(tmp_path):
    pytest.importorskip("plotly")
    rows = [row(1, a=10.0, b=40.0), row(16, a=160.0, b=40.0)]
    report = {"rows": rows, "machine": {"device": "a <b> device"}, "versions": {}, "date": "", "command": "x"}
    page.write_html(tmp_path / "out.html", report)
    text = (tmp_path / "out.html").read_text()
    assert "b from T=4" in text
    assert "a &lt;b&gt; device" in text


def test_an_older_run_is_compared_row_by_row(tmp_path):
    old = {"rows": [row(1, a=10.0, b=5.0), row(2, a=1.0)]}
    new = {"rows": [row(1, floor=20.0, a=30.0, c=1.0), row(3, a=1.0)]}
    (line,) = crossings.compare(old, new)
    assert (line["name"], line["tokens"], line["ratio"], line["floor_ratio"]) == ("a", 1, 3.0, 1.5)
    file = tmp_path / "old.json"
    assert invoke(*QUICK, "--backends", "eager", "--json", file).exit_code == 0
    result = invoke(*QUICK, "--backends", "eager", "--compare", file)
    assert result.exit_code == 0, result.output
    assert "new / old" in result.stdout


def test_recorded_routing_is_used_in_order(tmp_path):
    ids = torch.tensor([[0, 1], [2, 3], [4, 5]])
    save_file({"top_k_index": ids}, tmp_path / "ids.safetensors")
    found, weights = Recorded(tmp_path / "ids.safetensors").take(2, 1, 6, 2)
    assert found.tolist() == [[4, 5], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5]] * 2
    result = invoke(*QUICK, "--backends", "eager", "--routing", tmp_path / "ids.safetensors", "--json")
    assert result.exit_code == 0, result.output
    assert [one["routing"] for one in json.loads(result.stdout)["rows"]] == ["ids.safetensors"] * 2
    with pytest.raises(LayoutError, match="another layer"):
        Recorded(tmp_path / "ids.safetensors").take(2, 1, 5, 2)
    (tmp_path / "broken.npy").write_bytes(b"nothing")
    with pytest.raises(LayoutError, match="cannot read"):
        Recorded(tmp_path / "broken.npy")


def test_a_layer_of_a_checkpoint_is_measured(tmp_path):
    shapes = {"gate_proj": (6, 8), "up_proj": (6, 8), "down_proj": (8, 6)}
    tensors = {
        f"model.layers.1.mlp.experts.{expert}.{name}.weight": torch.randn(shape) / 3
        for expert in range(4)
        for name, shape in shapes.items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "qwen3_moe", "num_experts": 4, "hidden_size": 8, "moe_intermediate_size": 6}
    config |= {"num_experts_per_tok": 3, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--checkpoint", tmp_path, "--layer", "1", "--device", "cpu", "--tokens", "3", "--seconds", "0.02")
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["rows"]
    assert (one["sizes"], one["dtype"], one["failed"]) == ([4, 3, 8, 6], "float32", {})
    assert {"eager", "grouped_mm", "fused", "auto"} <= set(one["us"])


def test_pictures_ask_for_what_they_need_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    result = invoke(*QUICK, "--png", tmp_path / "out.png")
    assert result.exit_code == 1
    assert "routed-experts[bench]" in result.stderr
    assert "candidate" not in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        ("--shapes", "nothing"),
        ("--shape", "1,2,3"),
        ("--shape", "1,2,8,8"),
        ("--device", "cpu", "--modes", "graph"),
        ("--tokens", "1,x"),
        ("--tokens", "0"),
        ("--tokens", ""),
        ("--routing", "nowhere"),
        ("--dtypes", "int8"),
        ("--json", "/no/such/folder/out.json"),
        ("--compare", __file__),
    ],
)
def test_options_that_make_no_sense_are_refused(options):
    result = invoke(*options)
    assert result.exit_code == 2, result.output
    assert "Usage" in result.stderr
