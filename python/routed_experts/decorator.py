"""A decorator that puts an experts class of one's own on this package's backends."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import nn

from routed_experts.calling import argument_names, call_experts
from routed_experts.errors import DtypeError
from routed_experts.names import DEFAULT, strip_prefix

logger = logging.getLogger("routed_experts")

ModuleClass = TypeVar("ModuleClass", bound=type[nn.Module])


@overload
def use_experts_implementation(cls: ModuleClass) -> ModuleClass: ...
@overload
def use_experts_implementation(
    cls: None = None,
    *,
    is_concatenated: bool = True,
    is_transposed: bool = False,
    has_bias: bool = False,
    has_gate: bool = True,
    has_post_expert_norm: bool = False,
) -> Callable[[ModuleClass], ModuleClass]: ...
def use_experts_implementation(
    cls: ModuleClass | None = None,
    *,
    is_concatenated: bool = True,
    is_transposed: bool = False,
    has_bias: bool = False,
    has_gate: bool = True,
    has_post_expert_norm: bool = False,
) -> ModuleClass | Callable[[ModuleClass], ModuleClass]:
    """Class decorator: run an experts class of one's own through this package's backends.

    The class needs ``num_experts``, ``down_proj`` and ``gate_up_proj`` (or ``up_proj``), ``act_fn`` or a
    method ``_apply_gate`` ((rows, 2I) -> (rows, I)), and a forward of hidden states (T, H), expert ids (T, K)
    and routing weights (T, K), under any names. The flags say how its weights lie; they become attributes
    after its ``__init__`` and win over attributes of those names that it set itself. Its own forward stays
    callable as ``forward_reference``; "eager" means this package's eager.

    Which backend runs: the attribute ``experts_implementation`` (what ``set_experts_implementation`` sets),
    else ``self.config._experts_implementation``, else "auto". A config handed to ``__init__`` first, or by
    the name ``config``, is kept as ``self.config`` unless the class keeps one itself.

    Raises:
        DtypeError: ``cls`` is not an ``nn.Module`` class.
    """
    flags = {
        "is_concatenated": is_concatenated,
        "is_transposed": is_transposed,
        "has_bias": has_bias,
        "has_gate": has_gate,
        "has_post_expert_norm": has_post_expert_norm,
    }
    decorate = functools.partial(_decorate, flags)
    return decorate if cls is None else decorate(cls)


def _decorate(flags: dict[str, bool], cls: ModuleClass) -> ModuleClass:
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise DtypeError(
            "only module classes can be decorated",
            found=repr(cls),
            needed="an nn.Module class",
            hint="decorate the class, not an instance or a function",
        )
    original_init = cls.__init__

    @functools.wraps(original_init)
    def __init__(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original_init(self, *args, **kwargs)
        for name, value in flags.items():
            setattr(self, name, value)
        config: Any = kwargs.get("config", args[0] if args else None)
        if hasattr(config, "_experts_implementation") and not hasattr(self, "config"):
            self.config = config

    cls.__init__ = __init__  # type: ignore[method-assign]
    # A subclass that inherits a forward that already dispatches only declares other flags.
    if "forward" in vars(cls) or not hasattr(cls, "forward_reference"):
        _dispatch_forward(cls)
    return cls


def _dispatch_forward(cls: type[nn.Module]) -> None:
    reference = cls.forward
    names = argument_names(reference)

    @functools.wraps(reference)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return call_experts(self, chosen_backend(self), names, args, kwargs)

    cls.forward_reference = reference  # type: ignore[attr-defined]
    cls.forward = forward


def chosen_backend(module: nn.Module) -> str:
    """Return the bare backend name that a RoutedExperts or a decorated module runs on."""
    name: str | None = getattr(module, "experts_implementation", None)
    config: Any = getattr(module, "config", None)
    if name is None and hasattr(config, "_experts_implementation"):
        name = config._experts_implementation
        if name is None and not torch.compiler.is_compiling():
            _warn_unset(type(module).__qualname__)
    return DEFAULT if name is None else strip_prefix(name)


@functools.cache
def _warn_unset(owner: str) -> None:
    logger.warning("%s: config._experts_implementation is None; running %r", owner, DEFAULT)
