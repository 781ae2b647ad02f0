"""The licence check sees the dependencies, reads SPDX expressions, and refuses what is not on its list."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_licenses", ROOT / "scripts" / "check_licenses.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def metadata(check: ModuleType) -> dict[str, Any]:
    # Only this step may use the network; where all crates are here already, it does not.
    subprocess.run(["cargo", "fetch", "--quiet", "--locked"], cwd=ROOT, check=True)
    return check.cargo_metadata()


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        ("MIT", True),
        ("MIT OR Apache-2.0", True),
        ("MIT/Apache-2.0", True),
        ("GPL-3.0-only OR MIT", True),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("BSD-3-Clause AND 0BSD AND MIT AND Zlib AND CC0-1.0", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-3.0-only", False),
        ("(MIT OR Apache-2.0) AND GPL-3.0-only", False),
        ("Apache-2.0 WITH GPL-exception", False),
        ("", False),
        ("MIT Apache-2.0", False),
        ("(MIT", False),
        ("MIT OR", False),
    ],
)
def test_spdx_expressions(check: ModuleType, expression: str, allowed: bool) -> None:
    assert check.is_allowed(expression) is allowed


@pytest.mark.packaging
def test_every_crate_is_seen_and_allowed(check: ModuleType, metadata: dict[str, Any]) -> None:
    packages = check.crates(metadata)
    assert len(packages) > 10
    assert {"pyo3", "serde", "routed-experts-core"} <= {package.name.split()[0] for package in packages}
    assert check.faults(packages) == []


@pytest.mark.packaging
def test_an_injected_gpl_crate_is_refused(check: ModuleType, metadata: dict[str, Any]) -> None:
    intruder = {"id": "intruder", "name": "intruder", "version": "1.0.0", "license": "GPL-3.0-only"}
    unstated = {"id": "unstated", "name": "unstated", "version": "1.0.0", "license": None}
    injected = {
        "packages": [*metadata["packages"], intruder, unstated],
        "resolve": {"nodes": [*metadata["resolve"]["nodes"], {"id": "intruder"}, {"id": "unstated"}]},
    }
    lines = check.faults(check.crates(injected))
    assert len(lines) == 2
    assert "intruder 1.0.0" in lines[0]
    assert "GPL-3.0-only" in lines[0]
    assert "not stated" in lines[1]


@pytest.mark.packaging
def test_every_hard_python_dependency_is_seen_and_allowed(check: ModuleType) -> None:
    packages = check.python_packages()
    assert {"torch", "numpy", "safetensors", "click", "rich"} == {package.name for package in packages}
    assert check.faults(packages) == []
