"""What selection and kernels ask of the file. It is read at the first choice of a process, and not again."""

from __future__ import annotations

import logging
from typing import Any

from routed_experts.facts import Facts
from routed_experts.problem import bucket
from routed_experts.tuning import store, tiles
from routed_experts.tuning.keys import canonical, key_of, tiles_key_of

_logger = logging.getLogger("routed_experts")
_entries: store.Contents | None = None


def measured(facts: Facts, problem: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the measured times of every row for this machine, layer and state, as the Rust core reads them."""
    entries = _read().times
    key = key_of(facts, problem) if entries else None
    if key is None:
        return []
    _, times = entries.get(canonical(key), (key, {}))
    return [_curve(backend, path, us) for (backend, path), us in times.items()]


def has_tiles() -> bool:
    """Whether tiles of any kernel were measured; says at once where none were."""
    return bool(_read().tiles)


def measured_tiles(facts: Facts, problem: dict[str, Any]) -> tiles.Tiles | None:
    """Return the tiles that were measured as the best for a call, None where the built-in ones are to be taken."""
    key = tiles_key_of(facts, problem) if has_tiles() else None
    if key is None:
        return None
    _, records = _read().tiles.get(canonical(key), (key, {}))
    return tiles.tiles_at(records, bucket(problem["num_tokens"]))


def forget_profile() -> None:
    """Read the file anew at the next choice; choices that experts keep are made anew too."""
    global _entries
    _entries = None
    # Imported here: the registry leads to the backends, which this module has no other use for.
    from routed_experts.backends.registry import REGISTRY

    REGISTRY.renew()


def _read() -> store.Contents:
    global _entries
    if _entries is None:
        file = store.find()
        try:
            _entries = store.Contents({}, {}) if file is None else store.read_all(file)
        except store.Unreadable as error:
            _logger.warning("%s: default figures are used; `routed-experts tune` makes a new one", error)
            _entries = store.Contents({}, {})
    return _entries


def _curve(backend: str, path: str, us: dict[int, float]) -> dict[str, Any]:
    counts = sorted(us)
    return {"backend": backend, "path": path, "tokens": counts, "us": [us[count] for count in counts]}
