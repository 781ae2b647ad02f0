"""Backend names as users, modules and transformers configs write them.

A bare name is one of this package's backends, or ``auto``. In a transformers config the same names carry a
prefix (``routed_experts`` alone is ``auto``), so that they never collide with the library's own;
``transformers:NAME`` speaks of the library's own function NAME.
"""

from __future__ import annotations

from routed_experts.backends.registry import backends
from routed_experts.errors import DtypeError, UnknownBackend

DEFAULT = "auto"
PREFIX = "routed_experts"
LIBRARY = "transformers:"


def valid_names() -> list[str]:
    """Return every bare name that can be asked for, ``auto`` first."""
    return [DEFAULT, *sorted(backends())]


def strip_prefix(name: str) -> str:
    """Return the bare form of a name of ours; any other name comes back unchanged."""
    if name == PREFIX:
        return DEFAULT
    return name.removeprefix(f"{PREFIX}_")


def is_ours(value: object) -> bool:
    """Tell whether a config's value speaks of this package."""
    return isinstance(value, str) and strip_prefix(value) != value


def to_config(name: str) -> str:
    """Return a bare name as a transformers config holds it."""
    return PREFIX if name == DEFAULT else f"{PREFIX}_{name}"


def library_name(name: str) -> str | None:
    """Return NAME of ``transformers:NAME``, None for a name of ours."""
    return name.removeprefix(LIBRARY) if name.startswith(LIBRARY) else None


def from_config(value: str | None) -> str:
    """Return what a transformers config's value means here: one of ours, or a function of the library's."""
    if value is not None and (bare := strip_prefix(value)) != value:
        return bare
    return f"{LIBRARY}{value or 'eager'}"


def parse_name(name: object) -> str:
    """Return the bare name behind a bare or prefixed one; None is the default.

    Raises:
        DtypeError: not a string.
        UnknownBackend: not registered.
    """
    if name is None:
        return DEFAULT
    if not isinstance(name, str):
        raise DtypeError(
            "a backend is chosen by name",
            found=f"{name!r} of type {type(name).__name__}",
            needed="a string or None",
            hint="backend names: " + ", ".join(valid_names()),
        )
    for candidate in (name, strip_prefix(name)):
        if candidate == DEFAULT or candidate in backends():
            return candidate
    raise UnknownBackend(
        "unknown backend",
        found=repr(name),
        needed="one of " + ", ".join(valid_names()),
        hint=f"register_backend adds one; the model's own function is {LIBRARY}NAME",
    )


def decode_name(name: str) -> str:
    """Return the backend that stands in for ``name`` in the decode stage on an accelerator."""
    spec = backends().get(name)
    return (spec.decode_as if spec else "") or name


def is_load_time_only(name: str) -> bool:
    """Tell whether ``name`` (ours or the library's) can be neither entered nor left after loading."""
    spec = backends().get(library_name(name) or name)
    return bool(spec and spec.load_time_only)
