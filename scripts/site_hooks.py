"""What the documentation site takes from outside of docs/: README as its home, the changelog, and files linked to.

A link to a file of the repository leads to a page that shows the file; one to a folder becomes plain text. So the same
links work on the site and where the repository is browsed.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "reference/python.md"
PAGES = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
_LANGUAGES = {".py": "python", ".rs": "rust", ".toml": "toml", ".json": "json", ".md": "markdown"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put pages of docs/ that the navigation does not name at the end of its section "How to"."""
    named = str(config.nav)
    guides = next(section["How to"] for section in config.nav or [] if "How to" in section)
    guides += [path.name for path in sorted((ROOT / "docs").glob("*.md")) if f"'{path.name}'" not in named]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand elsewhere, and a page for every file that one of them or of docs/ links to."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    documents = [ROOT / source for source in PAGES.values()] + list((ROOT / "docs").glob("**/*.md"))
    files.append(File.generated(config, REFERENCE, content=reference()))
    linked = {target for document in documents for target in _outside(document)}
    for target in sorted(linked):
        shown = (
            f"# {target}\n\n~~~~{_LANGUAGES.get(Path(target).suffix, 'text')}\n{(ROOT / target).read_text()}\n~~~~\n"
        )
        files.append(File.generated(config, _page(target), content=shown))
    return files


def reference() -> str:
    """The page of every public name: what it says is the docstrings', so a new name is there at once."""
    tree = ast.parse((ROOT / "python" / "routed_experts" / "__init__.py").read_text())
    lists = (node.value for node in tree.body if isinstance(node, ast.Assign))
    names = [name for value in lists for name in ast.literal_eval(value) if not name.startswith("_")]
    imported = [(node.module, one.name) for node in tree.body if isinstance(node, ast.ImportFrom) for one in node.names]
    # A function that a package of the same name hides is asked for where it stands.
    hidden = {
        name: f"{module}.{name}" for module, name in imported if f"{module}.".startswith(f"routed_experts.{name}.")
    }
    parts = [
        f"::: {hidden.get(name, f'routed_experts.{name}')}"
        for name in sorted(names, key=lambda name: (name[0].isupper(), name))
    ]
    return "# Python\n\n" + "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to their pages."""
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown
    base = posixpath.dirname(PAGES[here]) if here in PAGES else posixpath.join("docs", posixpath.dirname(here))
    start = posixpath.dirname(here) or "."

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match[1], posixpath.normpath(posixpath.join(base, match[2])), match[3] or ""
        if (ROOT / target).is_dir():
            return text
        return f"[{text}]({posixpath.relpath(_page(target), start)}{anchor})"

    return _LINK.sub(replace, markdown)


def _outside(document: Path) -> set[str]:
    """The files of the repository that a document links to and that are no pages already."""
    found = set()
    for _, link, _ in _LINK.findall(document.read_text()):
        target = posixpath.normpath(posixpath.join(document.parent.relative_to(ROOT).as_posix(), link))
        if (ROOT / target).is_file() and target not in PAGES.values() and not target.startswith("docs/"):
            found.add(target)
    return found


def _page(target: str) -> str:
    """The page that shows a file of the repository."""
    for page, source in PAGES.items():
        if target == source:
            return page
    return target.removeprefix("docs/") if target.startswith("docs/") else f"source/{target}.md"
