"""run_experts under torch.compile.

``auto`` without gradients is one opaque operator that chooses at run time by the real number of tokens, so token
counts cause no recompiles. A backend asked for by name is traced: its row is pinned while tracing, its products are
opaque operators of their own. So is ``auto`` with gradients, or with a gate or norm of one's own: it is
``grouped_mm`` then, whose operators know their backward and whose shapes do not depend on the routing.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from routed_experts import selection
from routed_experts.problem import problem_fields
from routed_experts.quantization.formats import Quantization
from routed_experts.selection import Selection
from routed_experts.weights import ExpertWeights, named

if TYPE_CHECKING:
    from routed_experts.moe import Call

# A traced choice must not depend on the number of tokens, or every count would recompile: it assumes this many.
TRACED_TOKENS = 64
TRACED_AUTO = "grouped_mm"

_pinned: dict[str, Selection] = {}
_templates: dict[Any, ExpertWeights] = {}


def run(call: Call, weights_on: str, how: dict[str, Any]) -> Tensor:
    """Put a checked call into the graph that is being traced."""
    from routed_experts.moe import execute

    if _is_one_operator(call.experts, how):
        return torch.ops.routed_experts.run(
            call.x_TH,
            call.index_TK,
            call.weights_TK,
            call.experts.tensors(),
            declared(call.experts),
            call.dtype,
            weights_on,
            how["expert_parallel"],
        )
    backend = TRACED_AUTO if how["backend"] == "auto" else how["backend"]
    return execute(_traced_choice(call, {**how, "backend": backend}), call, weights_on)


def _is_one_operator(experts: ExpertWeights, how: dict[str, Any]) -> bool:
    known = experts.gate is None and experts.activation_name is not None and experts.post_expert_norm is None
    return how["backend"] == "auto" and known and not how["training"]


def _traced_choice(call: Call, how: dict[str, Any]) -> Selection:
    asked = (
        operator.index(call.index_TK.shape[1]),
        call.x_TH.dtype,
        how["backend"],
        how["training"],
        True,  # compiling
        False,  # capturing
        how["expert_parallel"],
        how["process_group"],
    )
    fields = {name: _constant(value) for name, value in problem_fields(call.experts).items()}
    device = call.experts.device.type
    return _pinned[_pin(f"{fields} {device} {asked}", fields, device, asked)]


def _constant(value: Any) -> Any:
    """The value that a symbolic number has while tracing: with ``dynamic=True`` sizes and limits are symbols too."""
    if isinstance(value, int) and not isinstance(value, bool):
        return operator.index(value)
    return float.fromhex(value.hex()) if isinstance(value, float) else value


@torch.compiler.assume_constant_result
def _pin(key: str, fields: dict[str, Any], device: str, asked: selection.Asked) -> str:
    """Choose while tracing, from constants alone.

    The row is read from ``_pinned`` afterwards: a function that is returned into a graph breaks it.
    """
    _pinned[key] = selection.choose_traced(fields, device, TRACED_TOKENS, asked)
    return key


def declared(experts: ExpertWeights) -> str:
    """The declared layout as text: operators take no objects, and text is the same in every process.

    A function of the user's own has no name: whoever declares such experts runs the function outside the operator.
    """
    return (
        f"{experts.activation_name or 'identity'};{_constant(experts.swiglu_limit)};{_constant(experts.swiglu_alpha)};"
        f"{experts.is_transposed};{experts.is_concatenated};{_scheme(experts)}"
    )


def _scheme(experts: ExpertWeights) -> str:
    scheme = experts.quantization
    if scheme is None:
        return ""
    block = "" if scheme.block is None else "x".join(str(_constant(size)) for size in scheme.block)
    return f"{scheme.fmt},{block},{scheme.activation_scheme},{str(scheme.scale_dtype).removeprefix('torch.')}"


def _quantization(scheme: str) -> Quantization | None:
    if not scheme:
        return None
    fmt, block, activation_scheme, scale_dtype = scheme.split(",")
    height, _, width = block.partition("x")
    return Quantization(
        fmt, (int(height), int(width)) if block else None, activation_scheme, getattr(torch, scale_dtype)
    )


def is_transposed(declared: str) -> bool:
    """What :func:`declared` said of the weights' layout."""
    return declared.split(";")[3] == "True"


def experts_of(tensors: list[Tensor | None], declared: str) -> ExpertWeights:
    """Weights of one operator call; the checks run once a layout."""
    by_name = named(tensors)
    signature = (
        declared,
        *(None if t is None else (t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16) for t in tensors),
    )
    template = _templates.get(signature)
    if template is None:
        activation, limit, alpha, transposed, concatenated, scheme = declared.split(";")
        template = ExpertWeights(
            **by_name,  # type: ignore[arg-type]
            quantization=_quantization(scheme),
            activation=activation,
            swiglu_limit=None if limit == "None" else float(limit),
            swiglu_alpha=None if alpha == "None" else float(alpha),
            is_transposed=transposed == "True",
            is_concatenated=concatenated == "True",
        )
        _templates[signature] = template.with_tensors({})  # the template must not keep weights alive
    return template.with_tensors(by_name)


@torch.library.custom_op("routed_experts::run", mutates_args=())
def _run(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    tensors: list[Tensor | None],
    declared: str,
    dtype: torch.dtype,
    weights_on: str,
    expert_parallel: bool,
) -> Tensor:
    from routed_experts.moe import Call, choose, execute

    call = Call(experts_of(tensors, declared), x, index, weights, dtype)
    how = {"backend": "auto", "training": False, "expert_parallel": expert_parallel, "process_group": False}
    return execute(choose(call, how), call, weights_on)


@_run.register_fake
def _(x: Tensor, *rest: Any) -> Tensor:
    _index, _weights, _tensors, _declared, dtype, *_ = rest
    return x.new_empty(x.shape, dtype=dtype)
