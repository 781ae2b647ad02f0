"""Toolkit discovery on real files, links and scripts; every rule on made-up machines is tested in Rust."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from routed_experts import _core
from routed_experts.toolkit import Candidate, Toolkit, find_toolkit, forget_toolkits

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="links and shell scripts")

RELEASE = "Cuda compilation tools, release 12.1, V12.1.66"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER"):
        monkeypatch.delenv(name, raising=False)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    forget_toolkits()


def write_script(path: Path, *lines: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return path


def make_toolkit(root: Path, version: str | None = "12.9.1") -> Path:
    """A toolkit whose compiler says 12.1, and whose version.json says ``version``."""
    write_script(root / "bin" / "nvcc", f"echo '{RELEASE}'")
    write_script(root / "bin" / "ptxas")
    (root / "include").mkdir()
    (root / "include" / "cuda.h").write_text("/* no version here */\n")
    if version is not None:
        components = {"cuda": {"version": "99.0"}, "cuda_nvcc": {"version": version}}
        (root / "version.json").write_text(json.dumps(components))
    return root


def by_source(toolkit: Toolkit, source: str) -> Candidate:
    return next(candidate for candidate in toolkit.candidates if candidate.source == source)


def test_cuda_home_with_version_file(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(root))
    toolkit = find_toolkit()
    assert toolkit.root == str(root)
    assert toolkit.nvcc == str(root / "bin" / "nvcc")
    assert toolkit.version == (12, 9)
    assert toolkit.include == str(root / "include")
    assert toolkit.helpers == {"cuobjdump": None, "nvdisasm": None, "ptxas": str(root / "bin" / "ptxas")}
    assert [one.source for one in toolkit.candidates] == [
        "CUDA_HOME",
        "CUDA_PATH",
        "nvcc on PATH",
        "/usr/local/cuda",
    ]
    assert [one.accepted for one in toolkit.candidates] == [True, False, False, False]


@pytest.mark.parametrize("torch_cuda", [None, "12.8", "13.0"])
def test_compiler_is_asked_last_and_torch_never(monkeypatch, tmp_path, torch_cuda):
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda", version=None)))
    assert find_toolkit().version == (12, 1)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"cuda_nvcc": 12}', b"\xff\xfe\x00"])
def test_broken_version_file_gives_way(monkeypatch, tmp_path, content):
    root = make_toolkit(tmp_path / "cuda")
    (root / "version.json").write_bytes(content)
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert find_toolkit().version == (12, 1)


def test_runtime_only_folder(monkeypatch, tmp_path):
    for name in ("include", "lib"):
        (tmp_path / "cu13" / name).mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cu13"))
    toolkit = find_toolkit()
    assert (toolkit.root, toolkit.nvcc, toolkit.version) == (str(tmp_path / "cu13"), None, None)
    assert by_source(toolkit, "CUDA_HOME").found == f"no nvcc under {tmp_path / 'cu13'}"


def test_stray_space_is_quoted_and_not_trimmed(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", f" {root}")
    toolkit = find_toolkit()
    verdict = by_source(toolkit, "CUDA_HOME")
    assert toolkit.nvcc is None
    assert not verdict.accepted
    assert verdict.path == f" {root}"
    assert f'" {root}"' in verdict.found
    assert "CUDA_HOME" in verdict.found


def test_wrong_cuda_home_is_not_skipped(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("CUDA_PATH", str(root))
    monkeypatch.setenv("PATH", str(root / "bin"))
    toolkit = find_toolkit()
    assert toolkit.nvcc is None
    assert not any(candidate.accepted for candidate in toolkit.candidates)
    assert by_source(toolkit, "CUDA_PATH").hint == "unset CUDA_HOME to have it looked at"


def test_empty_cuda_home_counts_as_unset(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", "")
    monkeypatch.setenv("CUDA_PATH", str(root))
    assert find_toolkit().root == str(root)


def test_linked_nvcc_on_path(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda-12.9")
    links = tmp_path / "usr" / "bin"
    links.mkdir(parents=True)
    (links / "nvcc-12").symlink_to(root / "bin" / "nvcc")
    (links / "nvcc").symlink_to("nvcc-12")
    monkeypatch.setenv("PATH", str(links))
    toolkit = find_toolkit()
    assert toolkit.root == str(root)
    verdict = by_source(toolkit, "nvcc on PATH")
    assert verdict.path == str(links / "nvcc")
    assert str(links / "nvcc") in verdict.found
    assert str(root / "bin" / "nvcc") in verdict.found


@pytest.mark.parametrize("stream", [1, 2])
def test_wrapper_nvcc_is_asked(monkeypatch, tmp_path, stream):
    root = make_toolkit(tmp_path / "cuda")
    top = f'[ "$1" = -dryrun ] && echo "#\\$ TOP={root}/bin/.." >&{stream}'
    wrapper = write_script(tmp_path / "hpc" / "bin" / "nvcc", top, "exit 1")
    monkeypatch.setenv("PATH", str(wrapper.parent))
    toolkit = find_toolkit()
    assert toolkit.root == str(root)
    assert f"wrapped by {wrapper}" in by_source(toolkit, "nvcc on PATH").found


def test_silent_wrapper_is_not_its_own_toolkit(monkeypatch, tmp_path):
    wrapper = write_script(tmp_path / "hpc" / "bin" / "nvcc", "echo hello")
    monkeypatch.setenv("PATH", str(wrapper.parent))
    verdict = by_source(find_toolkit(), "nvcc on PATH")
    assert not verdict.accepted
    assert verdict.root is None
    assert str(wrapper) in verdict.found


def test_hanging_wrapper_is_given_up(monkeypatch, tmp_path):
    # The sleeping grandchild keeps the pipes open after the shell is gone.
    wrapper = write_script(tmp_path / "hpc" / "bin" / "nvcc", "/bin/sleep 6", "true")
    monkeypatch.setenv("PATH", str(wrapper.parent))
    start = time.monotonic()
    assert not by_source(find_toolkit(), "nvcc on PATH").accepted
    assert 1.5 < time.monotonic() - start < 5


def test_output_larger_than_a_pipe_does_not_block(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda")
    noise = (
        "i=0; while [ $i -lt 3000 ]; do echo 0123456789012345678901234567890123456789 >&2; i=$((i+1)); done"
    )
    wrapper = write_script(tmp_path / "hpc" / "bin" / "nvcc", noise, f"echo 'TOP={root}'")
    monkeypatch.setenv("PATH", str(wrapper.parent))
    assert find_toolkit().root == str(root)


def test_compiler_variable_is_looked_at_first(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda")
    other = write_script(tmp_path / "nvcc-13", "echo 'release 13.1, V13.1.1'")
    monkeypatch.setenv("CUDA_HOME", str(root))
    monkeypatch.setenv("DG_JIT_NVCC_COMPILER", str(other))
    toolkit = find_toolkit()
    assert (toolkit.root, toolkit.nvcc, toolkit.version) == (str(root), str(other), (13, 1))
    assert toolkit.candidates[0].source == "DG_JIT_NVCC_COMPILER"


def test_remembered_for_each_environment(monkeypatch, tmp_path):
    root = make_toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(root))
    first = find_toolkit()
    (root / "bin" / "nvcc").unlink()
    assert find_toolkit() is first
    monkeypatch.setenv("CUDA_HOME", "")
    assert find_toolkit() != first
    monkeypatch.setenv("CUDA_HOME", str(root))
    assert find_toolkit() is first
    forget_toolkits()
    assert find_toolkit().nvcc is None


def test_result_is_frozen_and_plain_underneath(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(make_toolkit(tmp_path / "cuda")))
    toolkit = find_toolkit()
    with pytest.raises(dataclasses.FrozenInstanceError):
        toolkit.root = "elsewhere"
    assert toolkit.to_dict() == _core.find_toolkit()
    assert json.loads(json.dumps(toolkit.to_dict()))["version"] == [12, 9]


def test_importing_without_cuda_says_nothing(tmp_path):
    script = "import sys, routed_experts, routed_experts.toolkit; sys.exit(bool(sys.stdout.write('')))"
    environment = {
        "PATH": str(tmp_path),
        "PYTHONPATH": ":".join(filter(None, sys.path)),
        "HOME": str(tmp_path),
    }
    command = [sys.executable, "-W", "error", "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
