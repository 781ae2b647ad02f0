"""The released wheel is what its name says, and its checker catches each way in which it would not be."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
TAG = "manylinux_2_28_x86_64"

pytestmark = pytest.mark.packaging

# In C, because the checker reads machine code and not a language.
PLAIN = "int plain(int x) { return x + 1; }"
WIDE = """
#include <immintrin.h>
__attribute__((target("avx2"))) void NAME(int *x) {
    __m256i v = _mm256_loadu_si256((const __m256i *)x);
    _mm256_storeu_si256((__m256i *)x, _mm256_add_epi32(v, v));
}
"""
POPCOUNT = '__attribute__((target("popcnt"))) int count(unsigned x) { return __builtin_popcount(x); }'


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / "scripts" / "check_wheel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as `make wheel` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "maturin", "build", "--release", "--locked", "--zig"]
    command += ["--compatibility", TAG.removesuffix("_x86_64"), "--out", folder]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[[str], Path]:
    def compile_library(text: str) -> Path:
        (tmp_path / "library.c").write_text(text)
        command = ["cc", "-O1", "-shared", "-fPIC", "library.c", "-o", "library.so"]
        subprocess.run(command, cwd=tmp_path, check=True)
        return tmp_path / "library.so"

    return compile_library


@pytest.fixture
def repacked(wheel: Path, tmp_path: Path) -> Callable[..., Path]:
    def repack(*, tags: str = f"cp310-abi3-{TAG}", drop: str = "-") -> Path:
        """Return the wheel under other tags, without the files whose name ends in ``drop``."""
        target = tmp_path / f"routed_experts-0.1.0-{tags}.whl"
        with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as archive:
            for member in source.namelist():
                if not member.endswith(drop):
                    archive.writestr(member, source.read(member))
        return target

    return repack


@pytest.mark.timeout(900)
def test_released_wheel_is_true_to_its_name(check: ModuleType, wheel: Path) -> None:
    assert check.check(wheel, TAG) == []
    assert re.fullmatch(rf"routed_experts-[\d.]+-cp310-abi3-{TAG}\.whl", wheel.name)


@pytest.mark.parametrize("name", ["py.typed", "_core.pyi", "LICENSE", "_core.abi3.so"])
def test_a_missing_file_is_a_fault(check: ModuleType, repacked: Callable[..., Path], name: str) -> None:
    faults = check.check(repacked(drop=name), TAG)
    assert any("missing" in fault and name in fault for fault in faults)


@pytest.mark.parametrize(
    "name",
    ["tests/test_moe.py", "routed_experts/notes.txt", "routed_experts/_core.cpython-311-x86_64-linux-gnu.so"],
)
def test_a_stray_file_is_a_fault(check: ModuleType, wheel: Path, name: str) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert list(check.check_files([*names, name])) == [f"stray: {name}"]


def test_a_version_specific_wheel_is_refused(check: ModuleType, repacked: Callable[..., Path]) -> None:
    """Bug seen elsewhere: the stable ABI asked for, a wheel for one Python version built."""
    wheel = repacked(tags=f"cp311-cp311-{TAG}")
    assert check.check(wheel, TAG) == [f"{wheel.name}: not the cp310-abi3-{TAG} that was asked for"]
    faults = list(check.check_tag(wheel, f"Tag: cp311-cp311-{TAG}\n", TAG))
    assert faults[1:] == [f"the WHEEL file says ['cp311-cp311-{TAG}'], needed: cp310-abi3-{TAG}"]


def test_a_tag_older_than_the_symbols_is_refused(check: ModuleType, wheel: Path, tmp_path: Path) -> None:
    """Bug seen elsewhere: the tag promises an old glibc, and loading fails on it."""
    with zipfile.ZipFile(wheel) as archive:
        library = Path(archive.extract("routed_experts/_core.abi3.so", tmp_path))
    assert list(check.check_library(library, (2, 28))) == []
    (fault,) = check.check_library(library, (2, 5))
    assert "needs glibc (2, " in fault


def test_maturin_refuses_an_untrue_tag(tmp_path: Path) -> None:
    # Linked against this machine's glibc, whichever it is, the library cannot be manylinux2014.
    command = [sys.executable, "-m", "maturin", "build", "--release", "--compatibility", "manylinux_2_17"]
    done = subprocess.run([*command, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "too-recent versioned symbols" in done.stderr
    assert list(tmp_path.glob("*.whl")) == []


@pytest.mark.parametrize(
    ("source", "faulty"),
    [
        (PLAIN, ""),
        (WIDE.replace("NAME", "add"), "add"),
        (WIDE.replace("NAME", "kernels_avx2_add"), ""),
        (POPCOUNT, "count"),
    ],
    ids=["plain", "avx2", "avx2 chosen at run time", "popcnt"],
)
def test_instructions_past_the_baseline(
    check: ModuleType, compiled: Callable[[str], Path], source: str, faulty: str
) -> None:
    """Bug seen elsewhere: the build machine's instructions kill older CPUs."""
    functions = {function for function, _ in check.later_instructions(compiled(source))}
    assert functions == ({faulty} if faulty else set())


def test_the_module_declares_its_need_of_the_gil() -> None:
    source = (ROOT / "rust" / "bindings" / "src" / "lib.rs").read_text()
    assert re.findall(r"#\[pymodule\(gil_used = (\w+)\)\]", source) == ["false"]


def test_only_the_real_host_reaches_past_the_ban_list() -> None:
    sources = list(ROOT.glob("rust/**/*.rs"))
    allowing = [source.name for source in sources if "clippy::disallowed_methods" in source.read_text()]
    assert allowing == ["host.rs"]
    assert 'path = "std::process::Command::new"' in (ROOT / "clippy.toml").read_text()


@pytest.mark.timeout(900)
def test_the_checker_ends_as_it_finds(wheel: Path, repacked: Callable[..., Path]) -> None:
    script = ROOT / "scripts" / "check_wheel.py"
    good = subprocess.run([sys.executable, script, "--tag", TAG, wheel], capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run(
        [sys.executable, script, "--tag", TAG, repacked(drop="py.typed")], capture_output=True, text=True
    )
    assert bad.returncode == 1
    assert "FAULT missing: routed_experts/py.typed" in bad.stdout
