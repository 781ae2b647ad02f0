"""The devices of a machine in the driver's words, with a made-up driver."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from routed_experts import driver, machine
from routed_experts.cli import main
from routed_experts.driver import Gpu, visible

GPUS = tuple(Gpu(index, f"GPU-{index}a", "a GPU", (9, 0), 1 << 30, "580.95") for index in range(4))


@pytest.fixture(autouse=True)
def _ask_anew():
    driver.forget_gpus()
    yield
    driver.forget_gpus()


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2", [2]),
        ("3, 1", [3, 1]),
        ("-1", []),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("GPU-2a,GPU-0", [2, 0]),
        ("GPU-", []),
        ("GPU-8932f937", []),
    ],
)
def test_visible_devices(value, indices):
    assert [gpu.index for gpu in visible(GPUS, value)] == indices


def test_gpus_are_the_drivers_words(monkeypatch, tmp_path):
    lines = ("0, GPU-a, 9.0, 143771, 580.95.05, NVIDIA H200", "1, GPU-b, [N/A], [N/A], 580.95.05, NVIDIA GB10, rev 2")
    fake_smi(monkeypatch, tmp_path, *(f"echo '{line}'" for line in lines))
    assert machine.describe_devices()[1:] == [
        {
            "kind": "cuda",
            "index": 0,
            "name": "NVIDIA H200",
            "capability": (9, 0),
            "memory_bytes": 143771 * 2**20,
            "driver": "580.95.05",
        },
        {
            "kind": "cuda",
            "index": 1,
            "name": "NVIDIA GB10, rev 2",
            "capability": None,
            "memory_bytes": None,
            "driver": "580.95.05",
        },
    ]


@pytest.mark.parametrize("line", ["exit 9", "echo '0, GPU-a, 9.0, 1, it, failed'; exit 9", "echo"])
def test_without_a_driver_there_is_the_cpu_only(monkeypatch, tmp_path, line):
    fake_smi(monkeypatch, tmp_path, line)
    assert [device["kind"] for device in machine.describe_devices()] == ["cpu"]


def test_doctor_lists_a_gpu_even_if_torch_cannot_use_it(monkeypatch, tmp_path):
    fake_smi(monkeypatch, tmp_path, "echo '0, GPU-a, 9.0, 143771, 580.95.05, NVIDIA H200'")
    monkeypatch.setattr(torch.version, "cuda", None)
    result = CliRunner().invoke(main, ["doctor"])
    assert "NVIDIA H200, SM90, 140.4 GiB, driver 580.95.05" in " ".join(result.stdout.split())


def fake_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, *lines: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text("\n".join(("#!/bin/sh", *lines, "")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
