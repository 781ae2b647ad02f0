"""How one experts module is read, checked and put on a backend, by what kind of module it is.

``SWITCHES`` lists the kinds; the first that accepts a module owns it. Modules that were built on this package
hold an attribute. Any other module gets a forward of its own on the instance, so that neither its class nor
a config shared with other models changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from routed_experts.calling import argument_names, call_experts
from routed_experts.decorator import chosen_backend
from routed_experts.errors import SwitchError, UnknownBackend, UnsupportedExperts
from routed_experts.modules import RoutedExperts
from routed_experts.names import LIBRARY, from_config, library_name
from routed_experts.weights import ExpertWeights

_HELD = "_routed_experts_forward"


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


class AttributeSwitch:
    """RoutedExperts and decorated classes: their forward reads ``experts_implementation``."""

    def accepts(self, module: nn.Module) -> bool:
        """Accept what was built on this package."""
        return isinstance(module, RoutedExperts) or hasattr(type(module), "forward_reference")

    def read(self, module: nn.Module) -> str:
        """Return the name that the forward would look up."""
        return chosen_backend(module)

    def check(self, experts: ExpertsModule, name: str) -> None:
        """Refuse library functions: such a module has none."""
        if library_name(name) is not None:
            raise UnsupportedExperts(
                f"{experts.path or 'the module'} has no function of its library's",
                found=f"{type(experts.module).__name__}, which runs on this package",
                needed="a backend name of this package",
                hint="'eager' is the plain reference",
            )
        _check_weights(experts)

    def write(self, module: nn.Module, name: str) -> None:
        """Set the attribute."""
        module.experts_implementation = name  # type: ignore[assignment]


class SwitchedForward:
    """The forward of one module instance that was put on a backend; ``backend`` None runs the class's own.

    An object rather than a closure, so that models that hold it can be pickled and deep-copied.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.names = argument_names(type(module).forward)
        self.backend: str | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run the experts on ``backend``; arguments as the module's own forward takes them."""
        if self.backend is None:
            return type(self.module).forward(self.module, *args, **kwargs)
        return call_experts(self.module, self.backend, self.names, args, kwargs)


class ForwardSwitch:
    """Any other module: a :class:`SwitchedForward` on the instance, until the library's function is back."""

    def accepts(self, module: nn.Module) -> bool:
        """Accept everything: the last of the kinds."""
        return True

    def read(self, module: nn.Module) -> str:
        """Return our backend, or the library's function that the module's config names."""
        held: SwitchedForward | None = module.__dict__.get(_HELD)
        if held is not None and held.backend is not None:
            return held.backend
        return from_config(getattr(getattr(module, "config", None), "_experts_implementation", None))

    def check(self, experts: ExpertsModule, name: str) -> None:
        """Refuse weights, flags and forwards that our backends cannot stand in for, and unknown functions."""
        library = library_name(name)
        if library is not None:
            return _check_library(experts, library)
        _check_forward(experts)
        _check_weights(experts)
        return None

    def write(self, module: nn.Module, name: str) -> None:
        """Install the forward, or take it away again and name the function in the module's config."""
        library = library_name(name)
        if library is not None:
            _remove_forward(module)
            config = getattr(module, "config", None)
            if getattr(config, "_experts_implementation", library) != library:
                # The internal attribute: the public setter would reach sub-configs that nobody named.
                config._experts_implementation_internal = library  # type: ignore[union-attr]
            return
        held = module.__dict__.get(_HELD)
        if held is None:
            held = SwitchedForward(module)
            setattr(module, _HELD, held)
            module.forward = held
        held.backend = name


def _remove_forward(module: nn.Module) -> None:
    held: SwitchedForward | None = module.__dict__.get(_HELD)
    if held is None:
        return
    held.backend = None
    # A hook may have wrapped the forward since; then it stays inside, and passes on to the class's own.
    if module.__dict__.get("forward") is held:
        del module.forward
        delattr(module, _HELD)


def _check_library(experts: ExpertsModule, library: str) -> None:
    current = from_config(getattr(getattr(experts.module, "config", None), "_experts_implementation", None))
    if f"{LIBRARY}{library}" == current:
        return
    refused = UnknownBackend(
        f"{experts.path or 'the module'} has no function {library!r} of its library's",
        found=f"{type(experts.module).__name__} on {current!r}",
        needed=current if experts.check_library_name is None else "a name that its model accepts",
        hint="get_experts_implementation says what the model runs on now",
    )
    if experts.check_library_name is None:
        raise refused
    try:
        experts.check_library_name(library)
    except (ValueError, ImportError) as error:
        refused.hint = str(error)
        raise refused from error


def _check_forward(experts: ExpertsModule) -> None:
    module, path = experts.module, experts.path or "the module"
    if "forward" in module.__dict__ and _HELD not in module.__dict__:
        raise SwitchError(
            f"the forward of {path} was already replaced on the instance",
            found=f"{module.__dict__['forward']!r:.80}",
            needed="the forward of its class",
            hint="choose the backend before hooks, offloading or expert parallelism are put on the model",
        )
    if len(argument_names(type(module).forward)) < 3:
        raise UnsupportedExperts(
            f"{path} is not called as routed experts",
            found=f"{type(module).__name__}.forward{inspect.signature(type(module).forward)}",
            needed="a forward of hidden states, expert ids and routing weights",
            hint="wrap it in a module whose forward takes the three, or leave it on its own function",
        )


def _check_weights(experts: ExpertsModule) -> None:
    try:
        ExpertWeights.from_module(experts.module)
    except ValueError as error:
        raise UnsupportedExperts(
            f"the weights of {experts.path or 'the module'} do not fit",
            found=f"{type(experts.module).__name__}: {error}",
            needed="experts of a layout that this package knows",
            hint="declare the layout with use_experts_implementation, or leave the model on its own function",
        ) from error


SWITCHES: list[Switch] = [AttributeSwitch(), ForwardSwitch()]


def switch_of(module: nn.Module) -> Switch:
    """Return the way in which ``module`` holds its choice."""
    return next(switch for switch in SWITCHES if switch.accepts(module))
