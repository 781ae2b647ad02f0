"""Choices that live in a transformers config, while this package is registered with transformers.

Nothing here imports transformers: ``STATE`` is filled in by ``register_with_transformers`` and empty otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

from torch import nn

from routed_experts.errors import SwitchError, UnknownBackend
from routed_experts.names import LIBRARY, PREFIX, from_config, is_ours, library_name, to_config

ATTRIBUTE = "_experts_implementation_internal"


@dataclass
class State:
    """What is registered with transformers at present.

    ``functions`` is its registry of experts functions, ``dispatchers`` the code of forwards that look their
    config's name up there, ``replaced`` the library's own names that run on our backends of the same name.
    """

    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    dispatchers: frozenset[CodeType] = frozenset()
    replaced: frozenset[str] = frozenset()

    def fill(
        self, functions: Mapping[str, Callable[..., Any]], dispatchers: frozenset[CodeType], replaced: frozenset[str]
    ) -> None:
        """Take over what was registered; ``functions`` last, for it is what ``registered`` asks."""
        self.dispatchers, self.replaced = dispatchers, replaced
        self.functions = functions

    def clear(self) -> None:
        """Nothing is registered any more."""
        self.functions, self.dispatchers, self.replaced = {}, frozenset(), frozenset()

    @property
    def registered(self) -> bool:
        """Tell whether names of ours mean anything in a config."""
        return PREFIX in self.functions


STATE = State()


def holds_choice(config: Any) -> bool:
    """Tell whether ``config`` is one that transformers reads a choice of ours from."""
    return STATE.registered and hasattr(config, ATTRIBUTE)


def functions_of(module: nn.Module) -> Mapping[str, Callable[..., Any]]:
    """Return the functions that the module's forward chooses from by its config; empty if it does not."""
    forward = type(module).forward
    code = getattr(forward, "__code__", None)
    if code not in STATE.dispatchers or not holds_choice(getattr(module, "config", None)):
        return {}
    # Quantized experts look in a registry of their own, which the decorator keeps in its closure.
    cells = dict(zip(code.co_freevars, forward.__closure__ or (), strict=True))
    cell = cells.get("experts_interface")
    return STATE.functions if cell is None else cell.cell_contents


def read_config(config: Any) -> str:
    """Return the name in ``config``, bare if it runs on this package."""
    value = config._experts_implementation
    return value if value in STATE.replaced else from_config(value)


def write_config(config: Any, name: str) -> None:
    """Put ``name`` (bare, or ``transformers:NAME``) into ``config`` alone, not into its sub-configs."""
    if read_config(config) != name:
        setattr(config, ATTRIBUTE, library_name(name) or to_config(name))


def keep_config(config: Any) -> Callable[[], None]:
    """Return what puts the present value back, letter by letter."""
    value = config._experts_implementation
    return lambda: setattr(config, ATTRIBUTE, value)


def check_library_function(where: str, library: str, functions: Mapping[str, Any]) -> None:
    """Refuse a function of the library's that it does not have, or that ours stands in front of."""
    if library in STATE.replaced:
        raise SwitchError(
            f"transformers' own {library!r} cannot be reached",
            found="register_with_transformers(replace=True): the name runs on this package",
            needed="the library's function behind its own name",
            hint="register_with_transformers(replace=False) first",
        )
    valid = ["eager", *sorted(name for name in functions if not is_ours(name))]
    if library not in valid:
        raise UnknownBackend(
            f"{where or 'the top level'} has no function {library!r} of its library's",
            found=f"{LIBRARY}{library}",
            needed="one of " + ", ".join(f"{LIBRARY}{name}" for name in valid),
        )
