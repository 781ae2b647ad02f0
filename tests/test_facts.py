"""What is known of the machine, and machines made up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from routed_experts import errors, facts
from routed_experts.facts import Facts, batched_budget, current_facts, environment, list_devices

TOOLKIT = {"root": "/opt/cuda", "nvcc": None, "version": (12, 9), "helpers": {}, "candidates": []}
TWO_GPUS = "0, GPU-aa1, 9.0, 143771, 580.95, NVIDIA H200\n1, GPU-bb2, 8.9, 23034, 580.95, NVIDIA L4\n"


@pytest.fixture(autouse=True)
def _one_toolkit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    found = SimpleNamespace(to_dict=lambda: dict(TOOLKIT))
    monkeypatch.setitem(sys.modules, "routed_experts.toolkit", SimpleNamespace(find_toolkit=lambda: found))
    facts.forget_facts()
    yield
    facts.forget_facts()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver's tool that answers ``reply``, on a torch for CUDA without a context."""
    state = SimpleNamespace(reply=TWO_GPUS, calls=[])

    def run(command: list[str], **options: Any) -> Any:
        state.calls.append((command, options))
        if isinstance(state.reply, Exception):
            raise state.reply
        return SimpleNamespace(stdout=state.reply)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return state


def test_facts_of_a_cpu():
    found = current_facts("cpu")
    assert (found.device, found.capability) == ("cpu", None)
    assert found.torch == torch.__version__
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert set(facts.PACKAGES) == set(found.packages)
    assert found.packages["transformers"]
    assert found.toolkit == TOOLKIT
    assert found.to_dict()["packages"] == found.packages


def test_the_compiler_is_the_one_that_triton_takes(monkeypatch, tmp_path):
    for name in ("gcc", "clang"):
        (tmp_path / name).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert current_facts("cpu").c_compiler == str(tmp_path / "gcc")
    (tmp_path / "gcc").unlink()
    facts.forget_facts()
    assert current_facts("cpu").c_compiler == str(tmp_path / "clang")
    monkeypatch.setenv("CC", "/opt/cc")
    assert current_facts("cpu").c_compiler == "/opt/cc"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    assert current_facts("cpu").c_compiler is None


def test_headers_are_there_or_not(monkeypatch, tmp_path):
    monkeypatch.setattr(facts.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert current_facts("cpu").python_headers is None
    (tmp_path / "Python.h").touch()
    facts.forget_facts()
    assert current_facts("cpu").python_headers == str(tmp_path)


def test_facts_are_gathered_once_and_again_when_a_variable_changes(monkeypatch):
    first = current_facts("cpu")
    assert current_facts("cpu") is first
    monkeypatch.setenv("CUDA_HOME", "/somewhere/else")
    assert current_facts("cpu") is not first
    monkeypatch.delenv("CUDA_HOME")
    facts.forget_facts()
    assert current_facts("cpu") is not first


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_environment_is_compared_by_value(kind, monkeypatch):
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", "17")
    before = environment(kind)
    assert environment(kind) == before
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", "18")
    assert environment(kind) != before
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", "17")
    monkeypatch.setenv("CUDA_HOME", "/somewhere/else")
    assert (environment(kind) == before) == (kind == "cpu")


def test_gpus_are_read_from_the_driver_before_torch_has_a_context(driver):
    assert [tuple(device) for device in list_devices()] == [
        ("NVIDIA H200", (9, 0), 143771 << 20),
        ("NVIDIA L4", (8, 9), 23034 << 20),
    ]
    found = current_facts()
    assert (found.device, found.capability, found.device_name) == ("cuda", (9, 0), "NVIDIA H200")
    assert found.device_count == 2
    assert current_facts("cuda:1").capability == (8, 9)
    assert current_facts("cpu").capability is None
    assert len(driver.calls) == 1
    assert driver.calls[0][1]["timeout"] == 2.0


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("1", ["NVIDIA L4"]),
        ("1,0", ["NVIDIA L4", "NVIDIA H200"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["NVIDIA H200"]),
        ("GPU-bb", ["NVIDIA L4"]),
        ("GPU-", []),
    ],
)
def test_visible_devices_are_those_torch_would_see(driver, monkeypatch, variable, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
    assert [device.name for device in list_devices()] == names


@pytest.mark.parametrize(
    "reply",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.TimeoutExpired("nvidia-smi", 2),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        "No devices were found\n",
        "0, GPU-aa1, [N/A], 143771, 580.95, NVIDIA H200\n",
    ],
)
def test_a_driver_that_does_not_answer_means_a_cpu(driver, reply):
    driver.reply = reply
    found = current_facts()
    assert (found.device, found.device_count) == ("cpu", 0)
    with pytest.raises(errors.DeviceError) as caught:
        current_facts("cuda")
    assert "0 CUDA devices" in caught.value.found
    assert caught.value.needed
    assert caught.value.hint


def test_a_torch_without_cuda_asks_nobody(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert current_facts().device == "cpu"
    assert driver.calls == []


def test_with_a_context_torch_is_asked(driver, monkeypatch):
    properties = SimpleNamespace(name="a GPU", major=10, minor=3, total_memory=1 << 30)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert current_facts().capability == (10, 3)
    assert driver.calls == []


def test_the_cpu_of_a_call_asks_neither_for_gpus_nor_for_a_toolkit(driver):
    found = facts.facts_for(torch.device("cpu"))
    assert found.toolkit is None
    assert driver.calls == []


def test_replace_makes_up_machines():
    base = Facts(device="cpu", torch="2.13.0")
    fake = base.replace(capability=(12, 0))
    assert (fake.device, fake.capability) == ("cuda", (12, 0))
    assert fake.replace(device="cpu").capability is None
    assert fake.replace(torch="2.8.0").capability == (12, 0)
    assert base.replace(device="cuda").capability is None
    assert base.replace(device="xpu", capability=(1, 0)).device == "xpu"
    assert base == Facts(device="cpu", torch="2.13.0")


def test_replace_knows_its_fields():
    with pytest.raises(errors.LayoutError) as caught:
        Facts(device="cpu").replace(torch_version="2.8", cuda=1)
    assert caught.value.found == "cuda, torch_version"
    for name in ("device", "capability", "torch", "packages", "toolkit"):
        assert name in caught.value.needed


def test_budget(monkeypatch):
    monkeypatch.delenv("ROUTED_EXPERTS_BATCHED_BYTES", raising=False)
    assert batched_budget() == 1 << 30
    for text, number in (("0", 0), (" 4096 ", 4096), ("", 1 << 30)):
        monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", text)
        assert batched_budget() == number
    for text in ("1GB", "-1", "1e9"):
        monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", text)
        with pytest.raises(errors.LayoutError) as caught:
            batched_budget()
        assert text in caught.value.found
        assert caught.value.hint


def test_gathering_starts_no_cuda_context():
    code = (
        "import torch; from routed_experts.facts import current_facts;"
        "from routed_experts.selection import machine_decisions;"
        "assert machine_decisions(current_facts()); assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
