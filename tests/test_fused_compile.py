"""The fused kernels compile for architectures that are not here, and fit their shared memory (B66)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def has_gluon():
    """Of a process that compiles: this one may have Triton's interpreter, for which nothing is written in Gluon."""
    return tuple(map(int, version("triton").split(".")[:2])) >= (3, 6)


def compiled(script, capability, folder):
    """Names of the kernels that a script compiled, every one of which fits."""
    # Compiling needs Triton itself, and this process may have its interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script), str(capability)],
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert all(int(used) <= int(limit) for _, _, used, limit in lines), lines
    return {name for _, name, _, _ in lines}


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.timeout(400)
def test_kernels_compile_and_fit(capability, tmp_path):
    wanted = {"up_by_pair", "down_by_pair", "up_by_tile", "down_by_tile", "weigh", "sort_small", "place_chunks"}
    if capability >= 90:
        wanted |= {"up_large", "down_large"}
    assert wanted <= compiled("compile_kernels.py", capability, tmp_path)


@pytest.mark.parametrize("capability", [80, 90, 120])
@pytest.mark.timeout(400)
def test_kernels_of_gradients_compile_and_fit(capability, tmp_path):
    wanted = {"units_gradient", "expert_ranges", "weight_gradient", "bias_gradient", "routing_gradient"}
    wanted |= {"weigh_gradient", "up_by_tile", "down_by_tile", "weigh"}
    if capability >= 90:
        wanted |= {"up_large", "down_large", "gather_rows", "rows_through_gate", "weight_gradient_large"}
    assert wanted <= compiled("compile_gradients.py", capability, tmp_path)


@pytest.mark.parametrize("capability", [80, 89, 90, 120])
@pytest.mark.timeout(400)
def test_kernels_of_quantized_experts_compile_and_fit(capability, tmp_path):
    wanted = {"up_by_pair", "down_by_pair", "up_by_tile", "down_by_tile"}
    if capability >= 89:
        wanted |= {"quantize_rows", "up_e4m3", "down_e4m3"}
    if capability == 90 and has_gluon():
        wanted |= {"places_of_pairs", "quantize_to_rows", "up_hopper", "down_hopper"}
    assert wanted <= compiled("compile_quantized.py", capability, tmp_path)
