"""The table of backends: the built-in files and what users register, behind one lock.

Every change makes a new :class:`Table` with a new generation, so cached choices of an old table are not found
again. The choice itself is made in Rust, over the table's rows as plain data.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias

from routed_experts import _core
from routed_experts.backends import BUILT_IN
from routed_experts.backends.spec import Backend, Spec
from routed_experts.errors import DtypeError, LayoutError, UnknownBackend

Run: TypeAlias = Callable[..., Any]


class Table(NamedTuple):
    """One state of the registry: rows in order, and the same rows parsed by the Rust core."""

    generation: int
    rows: tuple[tuple[Spec, Run], ...]
    core: _core.Registry


class _Registry:
    """Names to backends; built-in files are imported on first use."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._backends: dict[str, Backend] = {}
        self._table: Table | None = None
        self.generation = 0
        # Called after every change, outside the lock: a watcher may take locks of its own.
        self.watchers: list[Callable[[], None]] = []

    def backends(self) -> dict[str, Backend]:
        """Return every backend by name, as a dict of the caller's own."""
        with self._lock:
            if not self._backends:
                files = (import_module(f".{name}", __package__) for name in BUILT_IN)
                self._backends = {file.BACKEND.name: file.BACKEND for file in files}
            return dict(self._backends)

    def table(self) -> Table:
        """Return the present table."""
        with self._lock:
            if self._table is None:
                rows = tuple(row for backend in self.backends().values() for row in backend.rows)
                self._table = Table(self.generation, rows, _parse(*(spec for spec, _ in rows)))
            return self._table

    def add(self, backend: Backend) -> None:
        """Add a backend; the very same one again changes nothing."""
        with self._lock:
            present = self.backends().get(backend.name)
            if present == backend:
                return
            if present is not None:
                raise LayoutError(
                    f"backend {backend.name!r} is registered already",
                    found=f"another backend of the name {backend.name!r}",
                    needed="a name that is free",
                    hint=_how_to_free(backend.name),
                )
            self._change({**self._backends, backend.name: backend})
        self._tell_watchers()

    def remove(self, name: str) -> None:
        """Remove a backend that was added."""
        with self._lock:
            rest = self.backends()
            if name in BUILT_IN or name == "auto":
                raise LayoutError(
                    f"backend {name!r} cannot be removed",
                    found=f"{name!r}, which comes with the package",
                    needed="a backend that was registered",
                    hint="ask for another backend by name instead",
                )
            check_name(name)
            del rest[name]
            self._change(rest)
        self._tell_watchers()

    def renew(self) -> None:
        """Have every choice made anew: what the machine has is another thing than when it was asked."""
        with self._lock:
            self._table = None
            self.generation += 1

    def _change(self, backends: dict[str, Backend]) -> None:
        self._backends, self._table = backends, None
        self.generation += 1

    def _tell_watchers(self) -> None:
        for watcher in tuple(self.watchers):
            watcher()


def _parse(*specs: Spec) -> _core.Registry:
    return _core.Registry([spec.to_dict() for spec in specs])


def _how_to_free(name: str) -> str:
    return "choose another name" if name in BUILT_IN else f"unregister_backend({name!r}) first"


REGISTRY = _Registry()


def register_backend(name: str, fn: Run, *, spec: Spec | None = None) -> None:
    """Add a backend of one's own under ``name``.

    ``fn`` takes and returns what ``spec`` declares (see :class:`Spec`). Without a spec it is
    ``fn(experts, hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K)) -> (T, H)`` and is run only
    when asked for by name; with ``auto=True`` and a ``cost``, ``auto`` may choose it.

    Raises:
        DtypeError: a spec of another type.
        LayoutError: the name is taken, empty or "auto", differs from ``spec.name``, or the spec is not in the
            vocabulary of requirements.
    """
    spec = Spec(name=name, auto=False) if spec is None else spec
    _check(name, fn, spec)
    _parse(spec)
    REGISTRY.add(Backend(rows=((spec, fn),)))


def _check(name: object, fn: object, spec: Spec) -> None:
    if not isinstance(name, str) or not name or name == "auto":
        raise LayoutError(
            "a backend needs a name",
            found=repr(name),
            needed='a string that is neither empty nor "auto"',
            hint="register it under another name",
        )
    if not isinstance(spec, Spec):
        raise DtypeError(
            f"the spec of backend {name!r} is none",
            found=type(spec).__name__,
            needed="Spec",
            hint=f"pass spec=Spec(name={name!r}, ...), or none",
        )
    if spec.name != name:
        raise LayoutError(
            "the spec is of another backend",
            found=f"name {name!r}, spec.name {spec.name!r}",
            needed="the same name in both",
            hint=f"pass spec=Spec(name={name!r}, ...)",
        )
    if not callable(fn):
        raise LayoutError(
            f"backend {name!r} cannot be called",
            found=f"fn of type {type(fn).__name__}",
            needed="a function",
            hint="pass fn(experts, hidden_states, top_k_index, top_k_weights)",
        )


def unregister_backend(name: str) -> None:
    """Remove a backend that was registered.

    Raises:
        UnknownBackend: there is none of that name.
        LayoutError: it comes with the package.
    """
    REGISTRY.remove(name)


def backends() -> dict[str, Spec]:
    """Return the spec of every backend by name, the first row's where there are several; a fresh dict."""
    return {name: backend.rows[0][0] for name, backend in REGISTRY.backends().items()}


def check_name(name: object) -> None:
    """Raise UnknownBackend, with the names there are, unless ``name`` is registered or "auto"."""
    REGISTRY.table().core.check_name(str(name))


def _run_named(name: str, experts: Any, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
    from routed_experts.moe import run_experts

    return run_experts(hidden_states, top_k_index, top_k_weights, experts, backend=name)


class _ExpertsInterface(MutableMapping[str, Run]):
    """The registry as a mapping: name to fn(experts, hidden_states, top_k_index, top_k_weights) -> (T, H).

    A value that was registered as such a function is given back as it is; the others are wrapped in
    ``run_experts``. Setting and deleting items registers and unregisters.
    """

    def __getitem__(self, name: str) -> Run:
        backend = REGISTRY.backends().get(name)
        if backend is None:
            check_name(name)
            raise UnknownBackend(
                '"auto" is a choice among backends, not one of them',
                found='"auto"',
                needed=", ".join(REGISTRY.backends()),
                hint='call run_experts(..., backend="auto")',
            )
        spec, run = backend.rows[0]
        own = name not in BUILT_IN and (spec.takes, spec.gives) == ("routing", "tokens")
        return run if own else functools.partial(_run_named, name)

    def __setitem__(self, name: str, fn: Run) -> None:
        register_backend(name, fn)

    def __delitem__(self, name: str) -> None:
        unregister_backend(name)

    def __iter__(self) -> Iterator[str]:
        return iter(REGISTRY.backends())

    def __len__(self) -> int:
        return len(REGISTRY.backends())

    def register(self, name: str, fn: Run, *, spec: Spec | None = None) -> None:
        """Register as :func:`register_backend` does."""
        register_backend(name, fn, spec=spec)


ExpertsInterface = _ExpertsInterface()
