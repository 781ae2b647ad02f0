"""Choosing the backend of a whole model, part by part, and switching it for the decode stage."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from routed_experts.errors import DtypeError, LayoutError, SwitchError, UnsupportedExperts
from routed_experts.names import decode_name, is_load_time_only, library_name, parse_name
from routed_experts.parts import Part, Parts, parts_of
from routed_experts.switch_protocol import ExpertsModule
from routed_experts.switching import switch_of

Implementation = str | Mapping[str, str | None] | None

Change = tuple[ExpertsModule, str]


def get_experts_implementation(model: nn.Module) -> dict[str, str]:
    """Return the backend of each part of ``model``: ``""`` (top level) first, then its sub-configs by name.

    Names of this package are bare; a part that runs its library's own function reads ``transformers:NAME``
    (a plain module's own forward: ``transformers:eager``). A model without experts reads ``eager``. The
    result is a valid argument of :func:`set_experts_implementation` and describes the same state.

    Raises:
        DtypeError: ``model`` is no ``nn.Module``.
        SwitchError: experts modules of one part were put on different backends one by one.
    """
    parts = parts_of(model)
    if not any(parts.experts()):
        return dict.fromkeys(parts.by_key, "eager")
    return {key: parts.current(key) for key in parts.by_key}


def set_experts_implementation(model: nn.Module, implementation: Implementation) -> None:
    """Put the experts of any torch or transformers model on a backend.

    ``implementation`` is one name for every part, or a dict of part to name: ``""`` is the value of the top
    level and of every sub-config that the dict does not name, and without ``""`` those stay as they are. None
    stands for the default, ``auto``. ``transformers:NAME`` puts back the model's own function. The choice is
    never saved with a model. Either all of it takes effect or, on error, nothing.

    A transformers model that was registered for (``register_with_transformers``) holds the choice in its
    config, with our prefix, where its own ``set_experts_implementation`` does: models that were built from one
    config object then share it. Any other model holds it in the model object.

    Raises:
        DtypeError: a model that is none, an implementation that is neither string nor dict nor None, or a value
            of the dict that is neither string nor None.
        UnknownBackend: a name that is not registered, or a function that the model's library does not have.
        LayoutError: a key that is no sub-config of the model.
        UnsupportedExperts: no experts here (unless ``eager`` or None is asked for), or of a layout unknown.
        SwitchError: into or out of a backend that is a load-time choice, a forward that was replaced, or a
            library function that ``register_with_transformers(replace=True)`` hides.
    """
    parts = parts_of(model)
    stated = _parse(implementation, parts)
    if not any(parts.experts()):
        _check_dense(parts, implementation, stated)
        return
    names = {key: stated.get(key, stated.get("")) for key in parts.by_key}
    wanted = {key: name for key, name in names.items() if name is not None}
    changes = [change for key, name in wanted.items() for change in _changes(parts.by_key[key], name)]
    empty = {key: name for key, name in wanted.items() if not parts.by_key[key].modules}
    _check_load_time(parts, changes, empty)
    for experts, name in changes:
        switch_of(experts.module).check(experts, name)
    for key, name in wanted.items():
        parts.check_statement(key, name)
    for experts, name in changes:
        switch_of(experts.module).write(experts.module, name)
    for key, name in wanted.items():
        parts.state(key, name)


@contextmanager
def decode_stage(model: nn.Module) -> Iterator[None]:
    """Run the decode iterations of a generation: what is slow at few tokens gives way, then comes back.

    In every part whose experts' weights lie on an accelerator, a backend that names another for decoding
    (``grouped_mm`` names ``batched_mm``) is switched to it; everything else stays. Leaving puts back what
    this call switched, on exceptions too. A nested use finds nothing left to switch, so the outermost one
    alone switches and restores.
    """
    undo: list[Callable[[], None]] = []
    try:
        enter_decode(model, undo)
        yield
    finally:
        leave_decode(undo)


def enter_decode(model: nn.Module, undo: list[Callable[[], None]], spare: Container[object] = ()) -> None:
    """Switch for the decode stage, appending to ``undo`` as it goes, so that a failure half-way is undone too.

    ``spare`` are values of a config that stay as they are.
    """
    parts = parts_of(model)
    on_accelerator = {key for key, part in parts.by_key.items() if part.runs_on_accelerator()}
    for key, part in parts.by_key.items():
        if key in on_accelerator:
            for experts in part.modules:
                if _stated(experts.module) not in spare:
                    _switch_module(experts.module, undo)
        elif on_accelerator and not part.modules and _stated(part) not in spare:
            _switch_remembered(parts, key, undo)


def leave_decode(undo: list[Callable[[], None]]) -> None:
    """Put back what was switched, last first."""
    while undo:
        undo.pop()()


def _parse(implementation: object, parts: Parts) -> dict[str, str]:
    if implementation is None or isinstance(implementation, str):
        return {"": _parse_entry(implementation)}
    if not isinstance(implementation, Mapping):
        raise DtypeError(
            "an implementation is a name or a dict of names",
            found=f"{implementation!r} of type {type(implementation).__name__}",
            needed='"NAME", {"": "NAME", "SUB_CONFIG": "NAME"} or None',
            hint="backends() has the names",
        )
    unknown = [key for key in implementation if key not in parts.by_key]
    if unknown:
        raise LayoutError(
            "unknown part of the model",
            found=", ".join(map(repr, unknown)),
            needed="keys among " + ", ".join(map(repr, parts.by_key)),
            hint='"" is the top level and every sub-config without a key of its own',
        )
    return {key: _parse_entry(name) for key, name in implementation.items()}


def _parse_entry(name: object) -> str:
    return name if isinstance(name, str) and library_name(name) is not None else parse_name(name)


def _check_dense(parts: Parts, implementation: Implementation, stated: dict[str, str]) -> None:
    values = implementation.values() if isinstance(implementation, Mapping) else [implementation]
    explicit = {name for value, name in zip(values, stated.values(), strict=True) if value is not None}
    if all((library_name(name) or name) == "eager" for name in explicit):
        return
    modules = parts.root.named_modules()
    near = {type(m).__name__: path for path, m in modules if "Experts" in type(m).__name__ or path.endswith(".experts")}
    raise UnsupportedExperts(
        f"{type(parts.root).__name__} has no experts that can be switched",
        found=", ".join(f"{path} ({name})" for name, path in near.items())
        or "no module with num_experts, down_proj and gate_up_proj or up_proj",
        needed="one module with num_experts, and down_proj and gate_up_proj (or up_proj) of 3 dimensions",
        hint="leave the model on 'eager', or build its experts as RoutedExperts",
    )


def _changes(part: Part, name: str) -> list[Change]:
    return [(experts, name) for experts in part.modules if switch_of(experts.module).read(experts.module) != name]


def _check_load_time(parts: Parts, changes: list[Change], empty: dict[str, str]) -> None:
    moves = [(e.path, switch_of(e.module).read(e.module), name) for e, name in changes]
    moves += [(key, parts.remembered(key), name) for key, name in empty.items()]
    for where, old, new in moves:
        if old != new and (is_load_time_only(old) or is_load_time_only(new)):
            raise SwitchError(
                f"{where or 'the top level'} cannot go from {old!r} to {new!r} after loading",
                found=f"{old!r} in use",
                needed="a backend that leaves the weights as they are, before and after",
                hint="choose it when the model is built or loaded",
            )


def _stated(owner: Any) -> object:
    return getattr(getattr(owner, "config", None), "_experts_implementation", None)


def _switch_module(module: nn.Module, undo: list[Callable[[], None]]) -> None:
    switch = switch_of(module)
    name = switch.read(module)
    if decode_name(name) != name:
        restore = switch.keep(module)
        switch.write(module, decode_name(name))
        undo.append(restore)


def _switch_remembered(parts: Parts, key: str, undo: list[Callable[[], None]]) -> None:
    name = parts.remembered(key)
    if decode_name(name) != name:
        restore = parts.keep(key)
        parts.remember(key, decode_name(name))
        undo.append(restore)
