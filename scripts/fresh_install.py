"""Install a wheel into an environment of its own and run a script with it, away from the repository.

``python scripts/fresh_install.py WHEEL SCRIPT``. The new environment borrows the dependencies of the one that
runs this file (torch alone is gigabytes), and nothing else: the package must come from the wheel.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

PROBE = """
import importlib.metadata, pathlib, sys
import routed_experts, routed_experts._core as core
home = pathlib.Path(sys.prefix).resolve()
for module in (routed_experts, core):
    place = pathlib.Path(module.__file__).resolve()
    assert home in place.parents, f"{module.__name__} came from {place}, not from {home}"
version = importlib.metadata.version("routed-experts")
assert core.__version__ == version, f"the module says {core.__version__}, the wheel {version}"
print(f"routed-experts {version} imported from the wheel")
"""


def main(wheel: str, script: str) -> int:
    """Run the probe, the command line's help and ``script``; return the first exit status that is not 0."""
    wheel, script = str(Path(wheel).resolve()), str(Path(script).resolve())
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        venv.create(environment, with_pip=False, symlinks=True)
        binaries = environment / "bin"
        paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
        # A path file adds the folder alone; path files inside it (ours is an editable install) stay unread.
        Path(paths["purelib"], "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        pip = [
            "-m",
            "pip",
            "--python",
            str(binaries / "python"),
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        commands: list[list[str]] = [
            [sys.executable, *pip, "--force-reinstall", "--ignore-installed", wheel],
            [str(binaries / "python"), "-c", PROBE],
            [str(binaries / "routed-experts"), "--help"],
            [str(binaries / "python"), script],
        ]
        for command in commands:
            done = subprocess.run(command, cwd=folder)
            if done.returncode:
                print(f"FAULT {' '.join(command)} ended with {done.returncode}")
                return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
