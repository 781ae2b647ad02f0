"""What deepgemm is predicted to take is what it took, in the file of its measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from selection_helpers import ask, machine, make_experts, quantized

from routed_experts import errors
from routed_experts.backends import deepgemm

RESULTS = Path(__file__).resolve().parent.parent / "benches" / "results" / "h200-deepgemm.json"
ROWS = json.loads(RESULTS.read_text())["rows"]
SPECS = [spec for spec, _ in deepgemm.BACKEND.rows]


def experts_of(row):
    count, _, hidden, inner = row["sizes"]
    fp8 = row["quantization"] == "fp8_block"
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    sizes = {"num_experts": count, "hidden_size": hidden, "intermediate_size": inner}
    up = torch.empty(count, 2 * inner, hidden, dtype=dtype, device="meta")
    down = torch.empty(count, hidden, inner, dtype=dtype, device="meta")
    scheme = quantized("fp8_block", torch.float32) if fp8 else None
    return make_experts(**sizes, gate_up_proj=up, down_proj=down, dtype=dtype, quantization=scheme)


@pytest.mark.parametrize("capturing", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['quantization']}-{row['tokens']}")
def test_predictions_are_near_what_was_measured(row, capturing):
    call = {"num_tokens": row["tokens"], "num_top_k": row["sizes"][1], "capturing": capturing}
    chosen = ask(SPECS, machine(), "deepgemm", experts_of(row), **call)
    assert chosen["path"] == ("bf16" if row["quantization"] == "none" else "quantized")
    (decision,) = chosen["decisions"]
    measured = row["graph_us" if capturing else "us"]["deepgemm"]
    assert decision["predicted_us"] == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize("row", ROWS[::3], ids=lambda row: row["quantization"])
@pytest.mark.parametrize(
    ("facts", "change"),
    [(machine((12, 0)), {}), (machine(nvcc="12.0"), {}), (machine(), {"training": True})],
    ids=["capability", "toolkit", "gradient"],
)
def test_a_refusal_never_speaks_of_the_other_row_s_weights(row, facts, change):
    with pytest.raises(errors.RoutedExpertsError) as caught:
        ask(SPECS, facts, "deepgemm", experts_of(row), **change)
    assert not isinstance(caught.value, errors.UnsupportedScheme)
    assert "quantiz" not in str(caught.value)
