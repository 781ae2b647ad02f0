"""The file of what was measured, times and tiles: one for each user, shared by all processes.

It is read without a lock, for it is always replaced as a whole; writers take turns under a lock and add to what is
there by then. A file that cannot be read is set aside, never repaired and never an error of the call that met it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from routed_experts.tuning import tiles
from routed_experts.tuning.keys import Key, canonical

CACHE = "ROUTED_EXPERTS_CACHE"
FORMAT = 1
FILE = "profile.json"

# Path of a row in the table ("fused", "triton") to microseconds by token count.
Times = dict[tuple[str, str], dict[int, float]]
# By the canonical text of a key.
Entries = dict[str, tuple[Key, Times]]


class Contents(NamedTuple):
    """All that a file holds: times of backends' rows, and trials of kernels' tiles."""

    times: Entries
    tiles: tiles.Found


class Unreadable(Exception):
    """A file that holds no measured times, and why."""


def folders() -> list[Path]:
    """Return the folders that may hold the file, best first: the variable's, the user's cache, a temporary one."""
    named = os.environ.get(CACHE, "").strip()
    home = os.environ.get("XDG_CACHE_HOME", "").strip() or os.path.expanduser("~/.cache")
    first = Path(named) if named else Path(home) / "routed-experts"
    return [first, Path(tempfile.gettempdir()) / f"routed-experts-{os.getuid()}"]


def find() -> Path | None:
    """Return the file that readers take, None where there is none, or where the variable names /dev/null."""
    for folder in () if os.environ.get(CACHE, "").strip() == os.devnull else folders():
        file = folder / FILE
        with contextlib.suppress(OSError):
            if file.is_file() and _is_ours(folder):
                return file
    return None


def writable_folder() -> tuple[Path, str | None]:
    """Return a folder to write in, and a line that says so where it is not the first choice.

    Raises:
        OSError: not even the temporary one can be written.
    """
    first, last = folders()
    try:
        return _prepared(first), None
    except OSError as error:
        reason = f"cannot write in {first} ({error.strerror or error}): figures are kept in {last}"
        return _prepared(last), f"{reason}; {CACHE} names another folder"


def _prepared(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder):
        raise PermissionError(13, "it belongs to another user", str(folder))
    with tempfile.TemporaryFile(dir=folder):
        return folder


def _is_ours(folder: Path) -> bool:
    # The temporary folder's name can be guessed: what somebody else put there is not believed.
    return folder != folders()[-1] or folder.stat().st_uid == os.getuid()


def read(file: Path) -> Entries:
    """Return the times of a file, as :func:`read_all` does."""
    return read_all(file).times


def read_all(file: Path) -> Contents:
    """Return what a file holds, nothing if it does not exist.

    Raises:
        Unreadable: the file is damaged, of another format, or may not be read.
    """
    try:
        data = json.loads(file.read_bytes())
        if data["format"] != FORMAT:
            raise Unreadable(f"{file} has format {data['format']!r}, not {FORMAT}")
        found = {canonical(one["key"]): (dict(one["key"]), tiles.from_plain(one["records"])) for one in _tiles(data)}
        return Contents(dict(map(_entry, data["entries"])), found)
    except FileNotFoundError:
        return Contents({}, {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{file} cannot be read ({type(error).__name__}: {error})") from error


def _tiles(data: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = data.get("tiles", [])  # files of before tiles were tuned have none
    return found


def _entry(plain: dict[str, Any]) -> tuple[str, tuple[Key, Times]]:
    times: Times = {}
    for row in plain["rows"]:
        us = {int(tokens): float(value) for tokens, value in row["us"].items()}
        if not all(tokens > 0 and value > 0 and math.isfinite(value) for tokens, value in us.items()):
            raise ValueError("a time that is none")
        times[str(row["backend"]), str(row["path"])] = us
    return canonical(plain["key"]), (dict(plain["key"]), times)


def merge(folder: Path, new: Entries, tried: tiles.Found | None = None) -> str | None:
    """Add times and trials of tiles to the folder's file; newer ones replace older ones of the same.

    Return a line about a damaged file that was set aside, if there was one.
    """
    file = folder / FILE
    with _lock(folder):
        contents, note = _present(file)
        for text, (key, times) in new.items():
            kept = contents.times.setdefault(text, (key, {}))[1]
            for row, us in times.items():
                kept[row] = {**kept.get(row, {}), **us}
        for text, (key, records) in (tried or {}).items():
            tiles.added(contents.tiles.setdefault(text, (key, {}))[1], records)
        write(file, *contents)
    return note


def _present(file: Path) -> tuple[Contents, str | None]:
    try:
        return read_all(file), None
    except Unreadable as error:
        aside = file.with_name(f"{file.name}.broken")
        os.replace(file, aside)
        return Contents({}, {}), f"{error}: it was set aside as {aside}, and a new one begun"


def write(file: Path, entries: Entries, tried: tiles.Found | None = None) -> None:
    """Replace a file by another that is complete before it gets the name."""
    data = {"format": FORMAT, "entries": [_plain(key, times) for key, times in entries.values()]}
    data["tiles"] = [{"key": key, "records": tiles.to_plain(records)} for key, records in (tried or {}).values()]
    handle, part = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "w") as opened:
            json.dump(data, opened, indent=1)
            opened.flush()
            os.fsync(opened.fileno())
        os.replace(part, file)
    except BaseException:
        os.unlink(part)
        raise


def _plain(key: Key, times: Times) -> dict[str, Any]:
    rows = [
        {"backend": backend, "path": path, "us": {str(tokens): us[tokens] for tokens in sorted(us)}}
        for (backend, path), us in sorted(times.items())
    ]
    return {"key": key, "rows": rows}


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    # Of a file beside it: the profile itself is replaced, and a lock on what was replaced holds nobody up.
    with (folder / f"{FILE}.lock").open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield
