"""Gates of transformers' own families that are ours under another name.

A family's method ``_apply_gate`` is run once on a symbol in place of a tensor, with symbols for the attributes that
it reads, and so is our gate. Where both are the same expression, operation by operation, our gate gives the same
bits and gradients in every dtype, and kernels can fuse it. No tensor is made: that holds while tracing, too. Whatever
cannot be followed, and every difference, leaves the module its gate.
"""

from __future__ import annotations

import dis
import itertools
import re
import sys
import weakref
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from routed_experts.gate_symbols import Attributes, Symbol, attribute, is_number
from routed_experts.gates import activation_name, apply_gate

METHOD = "_apply_gate"
ACT = "act_fn"
_HOME = re.compile(r"transformers\.models\.(\w+)\.modeling_\1")
# One class for the experts of all quantized models, whose gate has a branch for each attribute that is None.
_QUANTIZED_HOME = "transformers.integrations.finegrained_fp8"


class Formula(NamedTuple):
    """What a method computes, for all values of the attributes whose names stand here; None: it has no such part."""

    act: str | None  # None: silu
    limit: str | None
    alpha: str | None
    is_concatenated: bool

    def numbers(self) -> list[str]:
        """Names of the attributes that hold numbers."""
        return [name for name in (self.limit, self.alpha) if name is not None]


class KnownGate(NamedTuple):
    """The arguments of ExpertWeights that describe a module's gate as it is now."""

    activation: str | Callable[[Tensor], Tensor]
    swiglu_limit: float | None
    swiglu_alpha: float | None
    is_concatenated: bool


_Formulas = dict[tuple[str, ...], Formula | None]  # by the attributes that are None
_formulas: weakref.WeakKeyDictionary[FunctionType, _Formulas] = weakref.WeakKeyDictionary()


def known_gate(module: nn.Module) -> KnownGate | None:
    """Describe a module's method ``_apply_gate``, or None if it is no gate that we have or its numbers are none.

    Attributes are read as they are now; what the method does with them is found out once.
    """
    # torch.compile watches the first for a gate that the instance gets later, and not the second.
    if not hasattr(module, METHOD) or METHOD in module.__dict__:
        return None
    formula = formula_of(type(module), tuple([name for name in branches(type(module)) if _is_none(module, name)]))
    if formula is None:
        return None
    limit = None if formula.limit is None else getattr(module, formula.limit, None)
    alpha = None if formula.alpha is None else getattr(module, formula.alpha, None)
    act = "silu" if formula.act is None else getattr(module, formula.act, None)
    if (formula.limit is not None and not is_number(limit)) or (formula.alpha is not None and not is_number(alpha)):
        return None
    if (limit is not None and limit < 0) or act is None or activation_name(act) is None:
        return None
    return KnownGate(
        act,
        None if limit is None else float(limit),
        None if alpha is None else float(alpha),
        formula.is_concatenated,
    )


def _is_none(module: nn.Module, name: str) -> bool:
    return getattr(module, name, None) is None


@torch.compiler.assume_constant_result
def branches(cls: type) -> tuple[str, ...]:
    """Names of the attributes that decide, by being None, what the method ``_apply_gate`` of a class computes."""
    method = _method(cls)
    if method is None or method.__module__ != _QUANTIZED_HOME:
        return ()
    return tuple([name for name in method.__code__.co_names if not hasattr(torch, name)])


@torch.compiler.assume_constant_result
def formula_of(cls: type, absent: tuple[str, ...] = ()) -> Formula | None:
    """Return what the method ``_apply_gate`` of a class computes, if it is a family's own and a gate that we have.

    ``absent`` are those of its ``branches`` that are None.
    """
    method = _method(cls)
    if method is None:
        return None
    formulas = _formulas.setdefault(method, {})
    if absent not in formulas:
        formulas[absent] = _formula(method, absent)
    return formulas[absent]


def _method(cls: type) -> FunctionType | None:
    """The method, if it stands in a class of a family's modeling file as it was written there."""
    owner = next((base for base in cls.__mro__ if METHOD in base.__dict__), None)
    if owner is None:
        return None
    method, home_name = owner.__dict__[METHOD], owner.__module__
    if type(method) is not FunctionType or not (_HOME.fullmatch(home_name) or home_name == _QUANTIZED_HOME):
        return None
    home = getattr(sys.modules.get(home_name), "__dict__", {})
    as_written = (
        method.__globals__ is home
        and method.__qualname__ == f"{owner.__qualname__}.{METHOD}"
        and not method.__code__.co_freevars
        and home.get(owner.__name__) is owner
    )
    return method if as_written else None


def _formula(method: FunctionType, absent: tuple[str, ...]) -> Formula | None:
    if not _shows_all_in_one_run(method):
        return None
    module = Attributes(absent)
    try:
        theirs = method(module, Symbol("input")).tree
    except Exception:  # whatever it does, it is not one of ours
        return None
    numbers = (None, *(name for name in module.read if name != ACT))
    for formula in itertools.starmap(Formula, itertools.product((None, ACT), numbers, numbers, (True, False))):
        if _ours(formula) == theirs:
            return formula
    return None


def _shows_all_in_one_run(method: FunctionType) -> bool:
    """Whether it has no branch but the known ones and runs no code but torch's, which could have some."""
    code = method.__code__
    steps = list(dis.get_instructions(code))
    names = [method.__globals__[name] for name in code.co_names if name in method.__globals__]
    return (
        not any(step.opname == "IMPORT_NAME" for step in steps)
        and (method.__module__ == _QUANTIZED_HOME or not any(step.is_jump_target for step in steps))
        and not any(isinstance(constant, CodeType) for constant in code.co_consts)
        and all(isinstance(value, ModuleType) and value.__name__.partition(".")[0] == "torch" for value in names)
    )


def _ours(formula: Formula) -> tuple[Any, ...]:
    """Our gate as an expression."""
    experts: Any = SimpleNamespace(
        gate=None,
        has_gate=True,
        is_concatenated=formula.is_concatenated,
        act_fn=F.silu if formula.act is None else attribute(formula.act),
        swiglu_limit=None if formula.limit is None else attribute(formula.limit),
        swiglu_alpha=None if formula.alpha is None else attribute(formula.alpha),
    )
    up: Any = Symbol("input")
    gated: Any = apply_gate(experts, up)
    tree: tuple[Any, ...] = gated.tree
    return tree
