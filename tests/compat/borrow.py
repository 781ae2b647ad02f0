"""Show another environment a few packages of this one, and nothing else.

``python tests/compat/borrow.py FOLDER PACKAGE...`` fills FOLDER with links to the files of the packages named and
of everything they require, as installed beside the Python that runs this file. On the path of the other
environment the packages then count as installed: torch alone is gigabytes. Their neighbours stay out, which
matters for kernels (old transformers fail at import beside a new one), tokenizers and huggingface_hub.

FOLDER must lie outside the other environment. pip removes what lies inside, and would follow the links.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement


def closure(names: list[str]) -> dict[str, Distribution]:
    """Return the distributions named, which must be installed, and all installed ones that they require."""
    found: dict[str, Distribution] = {}
    for name in names:
        _add(Requirement(name), found, needed=True)
    return found


def _add(wanted: Requirement, found: dict[str, Distribution], *, needed: bool) -> None:
    key = wanted.name.lower().replace("_", "-")
    if key in found:
        return
    try:
        found[key] = distribution(wanted.name)
    except PackageNotFoundError:
        if needed:
            raise
        return
    for line in found[key].requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            _add(requirement, found, needed=False)


def top_level(package: Distribution) -> Iterator[Path]:
    """Yield the entries of site-packages that hold the package's files; scripts and caches stay out."""
    site = Path(str(package.locate_file("")))
    for name in sorted({file.parts[0] for file in package.files or ()}):
        if name not in ("..", "__pycache__") and (site / name).exists():
            yield site / name


def main(folder: str, *names: str) -> int:
    """Make the links; print what was borrowed."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    borrowed = closure(list(names))
    for package in borrowed.values():
        for entry in top_level(package):
            link = target / entry.name
            if not link.exists():
                link.symlink_to(entry)
    print("borrowed", ", ".join(f"{name} {package.version}" for name, package in sorted(borrowed.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
