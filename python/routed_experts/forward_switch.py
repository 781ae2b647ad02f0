"""Modules of any origin: a forward on the instance, so that neither its class nor a shared config changes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from routed_experts import config_names
from routed_experts.calling import argument_names, call_experts
from routed_experts.errors import SwitchError, UnknownBackend, UnsupportedExperts
from routed_experts.names import LIBRARY, is_ours, library_name
from routed_experts.switch_protocol import ExpertsModule, check_weights

_HELD = "_routed_experts_forward"


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
        backend = held_backend(module)
        return _library_function(module) if backend is None else backend

    def check(self, experts: ExpertsModule, name: str) -> None:
        """Refuse weights, flags and forwards that our backends cannot stand in for, and unknown functions."""
        library = library_name(name)
        if library is not None:
            return _check_library(experts, library)
        _check_forward(experts)
        check_weights(experts)
        return None

    def write(self, module: nn.Module, name: str) -> None:
        """Install the forward, or take it away again and name the function in the module's config."""
        library = library_name(name)
        if library is not None:
            remove_forward(module)
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

    def keep(self, module: nn.Module) -> Callable[[], None]:
        """Write the present name again."""
        name = self.read(module)
        return lambda: self.write(module, name)


def held_backend(module: nn.Module) -> str | None:
    """Return the backend of the forward that was put on this instance, if one is at work."""
    held: SwitchedForward | None = module.__dict__.get(_HELD)
    return None if held is None else held.backend


def remove_forward(module: nn.Module) -> None:
    """Let the class's own forward run again."""
    held: SwitchedForward | None = module.__dict__.get(_HELD)
    if held is None:
        return
    held.backend = None
    # A hook may have wrapped the forward since; then it stays inside, and passes on to the class's own.
    if module.__dict__.get("forward") is held:
        del module.forward
        delattr(module, _HELD)


def _library_function(module: nn.Module) -> str:
    value = getattr(getattr(module, "config", None), "_experts_implementation", None)
    # A forward that looks nothing up runs its own code, whatever name of ours its config carries.
    if value is None or (is_ours(value) and config_names.STATE.registered):
        value = "eager"
    return f"{LIBRARY}{value}"


def _check_library(experts: ExpertsModule, library: str) -> None:
    current = _library_function(experts.module)
    if f"{LIBRARY}{library}" == current:
        return
    refused = UnknownBackend(
        f"{experts.path or 'the module'} has no function {library!r} of its library's",
        found=f"{type(experts.module).__name__} on {current!r}",
        needed=current if experts.check_library_name is None else "a name that its model accepts",
        hint="get_experts_implementation says what it runs on now",
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
            hint="leave the model on its own function: its routing lies outside the experts module",
        )
