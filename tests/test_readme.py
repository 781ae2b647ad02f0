"""The front-door documents say what is so: code runs, tables agree with the specs, names and links exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import routed_experts as rx
from routed_experts import facts
from routed_experts.backends import BUILT_IN

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SECTIONS = [
    "routed-experts",
    "Install",
    "First call",
    "Backends",
    "How a choice is made",
    "Variables",
    "Benchmarks",
    "Adding a backend",
]


def code_blocks(language: str) -> list[tuple[int, str]]:
    """Return (line, text) of README's blocks in a language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README[: match.start(1)].count("\n"), match[1]) for match in found]


def section(title: str) -> str:
    """Return the text of one of README's sections."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_sections_stand_in_order() -> None:
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^##? (.+)$", prose, re.MULTILINE)
    assert headings[: len(SECTIONS)] == SECTIONS


def test_python_blocks_run_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = code_blocks("python")
    assert len(blocks) >= 5
    namespace: dict[str, Any] = {"__name__": "readme"}
    for line, text in blocks:
        # Leading newlines make a traceback point at README's own line.
        exec(compile("\n" * line + text, ROOT / "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "deepgemm" in printed
    assert namespace["selection"].name in namespace["rx"].backends()


def test_table_of_backends_agrees_with_the_specs() -> None:
    command = [sys.executable, ROOT / "scripts" / "backends_table.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"`make format` writes the table that should stand there:\n{done.stdout}{done.stderr}"
    assert {"eager", "fused", "sonicmoe"} <= set(BUILT_IN) <= set(rx.backends())
    assert set(BUILT_IN) == set(re.findall(r"^\| `(\w+)`", section("Backends"), re.MULTILINE))


def test_every_variable_in_the_code_is_documented() -> None:
    pattern = re.compile(r"\bROUTED_EXPERTS_[A-Z_]+\b")
    sources = [*ROOT.glob("python/**/*.py"), *ROOT.glob("rust/**/*.rs")]
    read = {name for source in sources for name in pattern.findall(source.read_text())}
    documented = set(pattern.findall((ROOT / "docs" / "variables.md").read_text()))
    assert {"ROUTED_EXPERTS_CHECKED", "ROUTED_EXPERTS_BATCHED_BYTES"} <= read
    assert documented == read
    assert set(pattern.findall(README)) == read


def test_the_default_budget_is_the_one_in_the_code() -> None:
    for document in (README, (ROOT / "docs" / "variables.md").read_text()):
        line = next(line for line in document.splitlines() if line.startswith(f"| `{facts.BATCHED_BYTES}`"))
        assert re.findall(r"\d{4,}", line) == [str(facts.DEFAULT_BYTES)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


def test_commands_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    documents = "\n".join(document.read_text() for document in DOCUMENTS)
    called = re.findall(r"^make ([a-z-]+)", documents, re.MULTILINE)
    called += re.findall(r"`make ([a-z-]+)", documents) + re.findall(r"entry: make ([a-z-]+)", hooks)
    called += re.findall(r"^make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert {"quickstart", "test", "lint-python", "check-wheel"} <= set(called)
    assert set(called) <= targets
    # Hooks come from this repository alone, so a commit needs no network.
    assert re.findall(r"- repo: (\S+)", hooks) == ["local"]
