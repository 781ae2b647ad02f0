"""Check, offline, that every dependency's licence is one this project may be shipped with.

Rust: every crate that cargo resolves for the workspace, build and test crates included. Python: the packages
that ``pip install routed-experts`` always brings, by the metadata of the installed ones.
Prints one line a fault and exits 1; exits 0 with the counts otherwise. Needs ``cargo fetch --locked`` once.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent

# Permissive licences only; deny.toml says the same to cargo-deny.
ALLOWED = {
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "PSF-2.0",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
}
ALLOWED_EXCEPTIONS = {"LLVM-exception"}
# Packages older than SPDX expressions in metadata (PEP 639) name their licence in words.
SPDX_OF_CLASSIFIER = {
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: BSD License": "BSD-3-Clause",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Python Software Foundation License": "PSF-2.0",
}


class Package(NamedTuple):
    """A dependency and the SPDX expression of its licence ("" where it states none)."""

    name: str
    license: str


def is_allowed(expression: str) -> bool:
    """Whether an SPDX expression can be met with allowed licences alone; an unreadable one cannot."""
    # Crates of before 2018 write "MIT/Apache-2.0", which means OR.
    tokens = re.findall(r"[()]|[^\s()]+", expression.replace("/", " OR "))
    try:
        return _any_of(tokens) and not tokens
    except IndexError:
        return False


def _any_of(tokens: list[str]) -> bool:
    met = _all_of(tokens)
    while tokens[:1] == ["OR"]:
        tokens.pop(0)
        met = _all_of(tokens) or met
    return met


def _all_of(tokens: list[str]) -> bool:
    met = _one_of(tokens)
    while tokens[:1] == ["AND"]:
        tokens.pop(0)
        met = _one_of(tokens) and met
    return met


def _one_of(tokens: list[str]) -> bool:
    token = tokens.pop(0)
    if token == "(":
        met = _any_of(tokens)
        return tokens.pop(0) == ")" and met
    if tokens[:1] == ["WITH"]:
        tokens.pop(0)
        return tokens.pop(0) in ALLOWED_EXCEPTIONS and token in ALLOWED
    return token in ALLOWED


def crates(metadata: dict[str, Any]) -> list[Package]:
    """Return the resolved crates of ``cargo metadata``; a crate without a licence field gets ""."""
    resolved = {node["id"] for node in metadata["resolve"]["nodes"]}
    return [
        Package(f"{crate['name']} {crate['version']}", crate["license"] or "")
        for crate in metadata["packages"]
        if crate["id"] in resolved
    ]


def cargo_metadata() -> dict[str, Any]:
    """Return what cargo knows of the workspace's dependencies, without the network."""
    command = ["cargo", "metadata", "--format-version=1", "--offline", "--locked"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed; `cargo fetch --locked` brings missing crates\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def python_license(name: str) -> str:
    """Return the SPDX expression of an installed package, from its newest kind of metadata that has one."""
    metadata = importlib.metadata.metadata(name)
    classifiers = [SPDX_OF_CLASSIFIER.get(c, "") for c in metadata.get_all("Classifier") or []]
    stated = [metadata["License-Expression"], " AND ".join(filter(None, classifiers)), metadata["License"]]
    return next((text for text in stated if text), "")


def python_packages() -> list[Package]:
    """Return the hard Python dependencies of the installed package."""
    requirements = importlib.metadata.requires("routed-experts") or []
    hard = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requirements if "extra ==" not in line]
    return [Package(name, python_license(name)) for name in hard]


def faults(packages: Iterable[Package]) -> list[str]:
    """Return one line for every package whose licence is not allowed."""
    return [
        f"{package.name}: licence {package.license or 'not stated'!r} is not on the list of allowed ones"
        for package in packages
        if not is_allowed(package.license)
    ]


def main() -> int:
    """Check both languages; a check that saw nothing is a fault."""
    rust, python = crates(cargo_metadata()), python_packages()
    lines = faults([*rust, *python])
    if not rust or not python:
        lines.append(f"saw {len(rust)} crates and {len(python)} Python packages: neither can be 0")
    for line in lines:
        print(f"FAULT {line}")
    if not lines:
        print(f"{len(rust)} crates and {len(python)} Python packages: every licence is allowed")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
