"""examples/expert_parallel.py as a user runs it, under torchrun."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "expert_parallel.py"


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200, env=environment)


def test_expert_parallel_on_two_ranks():
    done = torchrun()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 experts over 2 ranks" in done.stdout
    for dispatch in ("all_reduce", "all_to_all"):
        row = re.search(rf"│ {dispatch} +│ 8 +│ 32 +│ (\d\.\d\d) +│ (\S+) ", done.stdout)
        assert row, done.stdout
        assert 1 <= float(row[1]) < 2
        assert float(row[2]) <= 1e-5


def test_experts_that_two_ranks_cannot_share_end_the_program():
    done = torchrun("--experts", "7", "--dispatch", "all_to_all")
    assert done.returncode != 0
    assert "7 experts, 2 ranks" in done.stderr
