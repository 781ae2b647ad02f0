"""The documentation: its code runs, its tables are what is so, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import behaviour
import pytest
from click.testing import CliRunner

import routed_experts as rx
from routed_experts.cli import main
from routed_experts.tuning import profile

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# Pages whose blocks run in their order; transformers.md stands on a checkpoint, and tests of its own hold it.
PAGES = ("tutorial.md", "measure.md", "tune.md", "own-backend.md")


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        spec.loader.exec_module(module)
    return module


def blocks(page: str) -> list[tuple[int, str, str]]:
    """(line, language, text) of every block of a page."""
    text = (DOCS / page).read_text()
    found = re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(2)].count("\n"), match[1], match[2]) for match in found]


def run_command(line: str) -> str:
    program, *arguments = shlex.split(line)
    assert program == "routed-experts"
    if "--device" not in arguments and "--export" not in arguments and "--import" not in arguments:
        arguments += ["--device", "cpu"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, f"{line}\n{result.output}"
    return result.output


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUTED_EXPERTS_CACHE", str(tmp_path / "cache"))
    profile.forget_profile()
    namespace: dict[str, Any] = {"__name__": page}
    try:
        found = blocks(page)
        assert found
        for line, language, text in found:
            if language == "python":
                exec(compile("\n" * line + text, DOCS / page, "exec"), namespace)
            else:
                assert language == "sh"
                assert all(run_command(one) for one in text.splitlines())
    finally:
        monkeypatch.setenv("ROUTED_EXPERTS_CACHE", os.devnull)
        profile.forget_profile()
    assert set(rx.backends()) == {name for name in rx.backends() if name != "loop"}


def test_every_command_is_in_the_documentation():
    text = "\n".join(page.read_text() for page in (ROOT / "README.md", *DOCS.glob("*.md")))
    assert {"bench", "doctor", "select", "tune", "warmup"} <= set(main.commands)
    for name in main.commands:
        assert f"`routed-experts {name}" in text or f"`{name}`" in text, name


def test_regret_of_default_figures_is_within_the_limit(monkeypatch):
    table = script("regret_table")
    command = [sys.executable, ROOT / "scripts" / "regret_table.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"`make format` writes the table that should stand there:\n{done.stdout}{done.stderr}"
    found = []
    for name in table.FILES:
        file = ROOT / "benches" / "results" / name
        report = json.loads(file.read_text()) if file.exists() else {"rows": []}
        for mode in table.MODES if report["rows"] else ():
            found += table.regrets(report, mode)
    known = [one for one in found if one.times is not None]
    assert len(known) >= 200
    assert len(known) >= 0.95 * len(found)
    assert max(known, key=lambda one: one.times).times <= table.LIMIT


def test_regret_is_that_of_the_choice(monkeypatch):
    table = script("regret_table")
    row = {"shape": "s", "sizes": [8, 2, 64, 32], "dtype": "float32", "tokens": 4}
    row["us"] = {"eager": 30.0, "fused": 20.0, "auto": 1.0, "transformers grouped_mm": 2.0}
    report = {"versions": {"torch": "2.13.0", "triton": None}, "machine": {}, "rows": [row]}
    monkeypatch.setattr(table, "choice", lambda *_: "eager")
    assert [one.times for one in table.regrets(report, "eager")] == [1.5]
    monkeypatch.setattr(table, "choice", lambda *_: "grouped_mm")
    assert [one.times for one in table.regrets(report, "eager")] == [None]
    assert list(table.regrets(report, "graph")) == []


class TestBehaviour:
    CELLS = json.loads((DOCS / "behaviour.json").read_text())

    def test_the_page_is_what_the_cells_say(self):
        assert (DOCS / "behaviour.md").read_text() == script("behaviour_tables").render(self.CELLS)
        keys = {f"{n} {m} {d}" for n in behaviour.names() for m in behaviour.MODES for d in behaviour.DTYPES}
        for one in self.CELLS.values():
            assert set(one["compile"]) == set(one["repeat"]) == keys

    @pytest.mark.parametrize("mode", behaviour.MODES)
    @pytest.mark.parametrize("name", behaviour.names())
    def test_cells_of_the_cpu(self, name, mode):
        kept = self.CELLS["cpu"]
        key = f"{name} {mode} float32"
        assert behaviour.compiled(name, "float32", "cpu", mode) == kept["compile"][key]
        for dtype in behaviour.DTYPES:
            assert behaviour.repeated(name, dtype, "cpu", mode) == kept["repeat"][f"{name} {mode} {dtype}"]

    def test_a_backend_that_breaks_graphs_and_differs_is_seen(self):
        calls = []

        def unsteady(experts, x, index, weights):
            calls.append(len(calls))
            print(end="")
            return x * (1 + len(calls))

        rx.register_backend("unsteady", unsteady)
        try:
            found = behaviour.compiled("unsteady", "float32", "cpu", "inference")
            assert set(found.values()) != {"yes"}
            assert behaviour.repeated("unsteady", "float32", "cpu", "inference") == "differ"
        finally:
            rx.unregister_backend("unsteady")


class TestTheSite:
    def test_it_builds_without_a_warning(self, tmp_path):
        for package in ("material", "mkdocstrings", "mkdocs_click"):
            pytest.importorskip(package, reason="the site is built with the extra [dev]")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
        environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "python")}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        page = (tmp_path / "site" / "reference" / "python.html").read_text()
        public = [name for name in rx.__all__ if not name.startswith("_")]
        assert [name for name in public if not re.search(rf'id="routed_experts\.(\w+\.)*{name}"', page)] == []
        assert 'id="routed_experts.backends.registry.backends"' in page  # the function, not the package of that name
        commands = (tmp_path / "site" / "reference" / "command-line.html").read_text()
        assert all(f"--{option}" in commands for option in ("compare", "budget", "explain"))
        assert "run_experts" in (tmp_path / "site" / "index.html").read_text()

    def test_a_new_page_is_in_the_navigation(self):
        pytest.importorskip("mkdocs", reason="the site is built with the extra [dev]")

        class Config:
            nav: ClassVar = [{"Home": "index.md"}, {"How to": [{"Measure": "measure.md"}]}, {"Auto": "auto.md"}]

        (_, guides, _) = script("site_hooks").on_config(Config()).nav
        assert {"tutorial.md", "variables.md"} < set(map(str, guides["How to"]))
        assert not {"measure.md", "auto.md"} & set(map(str, guides["How to"][1:]))

    def test_links_to_files_become_pages_and_folders_become_text(self):
        pytest.importorskip("mkdocs", reason="the site is built with the extra [dev]")
        hooks = script("site_hooks")

        class Page:
            class file:
                src_uri = "transformers.md"

        text = "[a](../examples/quickstart.py) [b](../benches) [c](auto.md#x) [d](https://x.org)"
        found = hooks.on_page_markdown(text, Page(), None, None)
        assert found == "[a](source/examples/quickstart.py.md) b [c](auto.md#x) [d](https://x.org)"
        Page.file.src_uri = "index.md"
        assert hooks.on_page_markdown("[p](docs/auto.md)", Page(), None, None) == "[p](auto.md)"
