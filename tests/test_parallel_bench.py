"""benches/bench_parallel.py starts its ranks, opens its gate and writes its figures, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "benches" / "bench_parallel.py"


def test_figures_of_two_ranks(tmp_path):
    out = tmp_path / "parallel.json"
    options = ["--device", "cpu", "--shape", "tiny", "--fmt", "float32", "--tokens", "3", "--seconds", "0.02"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(BENCH), *options, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert (found["ranks"], [row["dispatch"] for row in found["rows"]]) == (2, ["all_reduce", "all_to_all"])
    assert found["bytes_per_us"] > 0
    for row in found["rows"]:
        assert row["error"] < 1e-5
        assert all(row[name] > 0 for name in ("time", "one device", "compute", "transfer"))
        assert row["ratio"] == row["time"] / max(row["compute"], row["transfer"])
