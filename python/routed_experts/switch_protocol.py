"""What the kinds of switch share: the module they work on, what each must do, and the check of weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from routed_experts.errors import UnsupportedExperts
from routed_experts.module_weights import resolve


@dataclass(frozen=True)
class ExpertsModule:
    """An experts module in a model: its path, and the check its library has for names of its own, if any."""

    path: str
    module: nn.Module
    check_library_name: Callable[[str], Any] | None = None


class Switch(Protocol):
    """One way to hold a module's choice. Names are bare, or ``transformers:NAME``."""

    def accepts(self, module: nn.Module) -> bool:
        """Tell whether modules like this one hold their choice this way."""

    def read(self, module: nn.Module) -> str:
        """Return the name that the module runs on now."""

    def check(self, experts: ExpertsModule, name: str) -> None:
        """Raise if ``write`` with this name cannot work; change nothing."""

    def write(self, module: nn.Module, name: str) -> None:
        """Put the module on ``name``, which ``check`` has passed."""

    def keep(self, module: nn.Module) -> Callable[[], None]:
        """Return what puts the module back to where it is now."""


def check_weights(experts: ExpertsModule) -> None:
    """Refuse weights of a layout that our backends do not know."""
    try:
        resolve(experts.module)
    except ValueError as error:
        raise UnsupportedExperts(
            f"the weights of {experts.path or 'the module'} do not fit",
            found=f"{type(experts.module).__name__}: {error}",
            needed="experts of a layout that this package knows",
            hint="declare the layout with use_experts_implementation, or leave the model on its own function",
        ) from error
