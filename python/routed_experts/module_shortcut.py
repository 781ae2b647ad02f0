"""The short way from a module to its weights, once module_weights.py has gone the long one.

``nn.Module`` finds a parameter only after a failed look-up in class and instance, and learns that an attribute is
missing after four. Here each name is read where it lay last time, and all that the layout depends on is compared
with what it was. Whatever differs, and every module that is not plain, goes the long way again.
"""

from __future__ import annotations

import inspect
import weakref
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from routed_experts.known_gates import branches, formula_of
from routed_experts.module_quantization import gives_no_gradients, without_gradients
from routed_experts.weights import SCALE_NAMES, TENSOR_NAMES, ExpertWeights, from_state

_FLAGS = (
    *("num_experts", "has_gate", "is_transposed", "is_concatenated", "has_post_expert_norm"),
    *("block_size", "activation_scheme"),
)
_GROUPS = ("_parameters", "_buffers", "_modules")
_NO_TENSORS: dict[str, Tensor | None] = dict.fromkeys(TENSOR_NAMES)

# Where a plain module may have each name, "" being the instance itself, and values of which types (None: any). A class
# may define nothing that computes a value: a property would win over all other places.
_PLAIN: dict[str, tuple[tuple[str, ...], tuple[type, ...] | None]] = {
    **dict.fromkeys(TENSOR_NAMES, (("_parameters",), (nn.Parameter, Tensor, type(None)))),
    **dict.fromkeys(_FLAGS, (("", "class"), (bool, int, type(None)))),
    "block_size": (("", "class"), (tuple, list, type(None))),
    "activation_scheme": (("", "class"), (str,)),
    "act_fn": (("", "_modules"), None),
    "_apply_gate": (("class",), (FunctionType,)),
}
_NUMBER = (("",), (float, int))  # what a known gate is made of
_BRANCH = (("",), (float, int, type(None)))  # what decides which gate it is


class Shortcut:
    """How one module was found: where its attributes lay, and what they looked like.

    It may live as long as the module, so of the module's own it holds plain data, and objects only weakly.
    """

    __slots__ = (
        "_act",
        "_bases",
        "_class",
        "_class_flags",
        "_flags",
        "_gate",
        "_gives_no_gradients",
        "_has_own_gate",
        "_layout",
        "_names",
        "_read",
        "_tensors",
    )

    def __init__(self, module: nn.Module, layout: ExpertWeights, bound: ExpertWeights) -> None:
        own, cls = module.__dict__, type(module)
        numbers = _numbers(cls)
        parameters, flags = own["_parameters"], [name for name in (*_FLAGS, *numbers) if name in own]
        self._layout = layout
        self._gives_no_gradients = layout.quantization is not None and gives_no_gradients(cls)
        self._class = weakref.ref(cls)
        self._bases = [(weakref.ref(base), len(vars(base))) for base in cls.__mro__ if base not in (nn.Module, object)]
        self._class_flags = [(name, getattr(cls, name)) for name in _FLAGS if hasattr(cls, name)]
        self._names = [*own, *(name for group in _GROUPS for name in own[group])]
        self._read = itemgetter(*_GROUPS, *flags)
        # A list of block sizes may change in place.
        self._flags = tuple([value[:] if type(value := own[name]) is list else value for name in flags])
        self._tensors = [(name, _look(parameters[name])) for name in TENSOR_NAMES if name in parameters]
        gate = getattr(cls, "_apply_gate", None)
        self._gate = None if gate is None else weakref.ref(gate)
        self._has_own_gate = bound.own_gate
        has_act = not (bound.own_gate or isinstance(bound.activation, str))  # else its gate has it inside
        self._act = weakref.ref(bound.activation) if has_act else None

    def bind(self, module: nn.Module) -> ExpertWeights | None:
        """Return what the long way would, or None if anything is not as it was."""
        own = module.__dict__
        try:
            values = self._read(own)
            parameters, buffers, modules = values[:3]
            if values[3:] != self._flags or [*own, *parameters, *buffers, *modules] != self._names:
                return None
            tensors = _NO_TENSORS.copy()
            for name, looked in self._tensors:
                tensor = tensors[name] = parameters[name]
                kind, shape, stride, dtype, device, address = looked
                # One by one, since a tuple to compare would cost more; and a subclass is asked nothing.
                if type(tensor) is not kind:
                    return None
                if tensor is not None and not (
                    tensor.shape == shape
                    and tensor.stride() == stride
                    and tensor.dtype is dtype
                    and tensor.device == device
                    and tensor.data_ptr() % 16 == address
                ):
                    return None
            act = None if self._act is None else own["act_fn"] if "act_fn" in own else modules["act_fn"]
        except KeyError:  # a flag has gone, or the last name of one group is now the first of the next
            return None
        except (RuntimeError, ValueError):  # where a number was, there is an array
            return None
        if not self._is_same_class(type(module)):
            return None
        state = self._layout.__dict__.copy()
        state["_tensors"] = without_gradients(type(module), tensors) if self._gives_no_gradients else tensors
        if self._act is None:
            if self._has_own_gate:
                state["gate"] = module._apply_gate
        elif act is None or self._act() is not act:  # None is also what is left of one that is gone
            return None
        else:
            state["activation"] = act
            if state["activation_name"] is None:
                state["act_fn"] = act
        return from_state(state)

    def _is_same_class(self, cls: type) -> bool:
        """Whether it is the class it was, and neither it nor a base has gained, lost or changed what concerns us."""
        if self._class() is not cls:
            return False
        for base, size in self._bases:
            if len(base().__dict__) != size:  # bases live as long as the class
                return False
        for name, value in self._class_flags:
            if getattr(cls, name) is not value:
                return False
        if self._gate is None:
            return True
        gate = cls._apply_gate  # type: ignore[attr-defined]
        return gate is not None and self._gate() is gate


def _look(tensor: Tensor | None) -> tuple[Any, ...]:
    """Return all of a parameter that checks and choices depend on."""
    if tensor is None:
        return (type(None), None, None, None, None, None)
    return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.data_ptr() % 16


def shortcut_to(module: nn.Module, layout: ExpertWeights, bound: ExpertWeights) -> Shortcut | None:
    """Return the short way to a module that was bound the long way, or None if it must go that way every time."""
    cls = type(module)
    # The result of GELU depends on an attribute of its own; norms are rare.
    if bound.post_expert_norm is not None or type(bound.activation) is nn.GELU:
        return None
    if cls.__getattribute__ is not nn.Module.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        return None
    if any(t is not None and t.dtype is torch.uint8 for t in (getattr(module, name, None) for name in SCALE_NAMES)):
        return None  # they are bound by another view
    numbers = _numbers(cls)
    if not all(_is_plain(module, name, *where) for name, where in {**_PLAIN, **numbers}.items()):
        return None
    if (
        numbers or formula_of(cls) is not None
    ) and bound.own_gate:  # kept for its numbers or its activation, which may change
        return None
    try:
        return Shortcut(module, layout, bound)
    except TypeError:  # an activation that cannot be held weakly
        return None


def _numbers(cls: type) -> dict[str, tuple[tuple[str, ...], tuple[type, ...]]]:
    """Attributes that a gate known by its class depends on, and what they may be."""
    decisive = [name for name in branches(cls) if name not in ("act_fn", "to", "torch")]
    formula = None if decisive else formula_of(cls)
    return dict.fromkeys(decisive, _BRANCH) if formula is None else dict.fromkeys(formula.numbers(), _NUMBER)


def _is_plain(module: nn.Module, name: str, places: tuple[str, ...], types: tuple[type, ...] | None) -> bool:
    own, cls = module.__dict__, type(module)
    found = {group: own[group][name] for group in _GROUPS if name in own[group]}
    if name in own:
        found[""] = own[name]
    if hasattr(cls, name):
        found["class"] = inspect.getattr_static(cls, name)
    return all(place in places and (types is None or type(value) in types) for place, value in found.items())
