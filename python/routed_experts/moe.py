"""run_experts: one call of an experts layer, from the router's output to the weighted sum.

Shape suffixes: T tokens, K slots a token, S = T*K pairs, R rows of a layout, E experts, H hidden size, I
intermediate size. The way of a token: checked here, laid out in layout.py, gathered in combine.py, run in
backends/NAME.py, and back through combine.py. A call whose like has gone this way is short: see prepared.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from routed_experts import compiled, selection
from routed_experts.checks import check_call, check_ids, compute_dtype, is_checked
from routed_experts.combine import (
    Routes,
    attach,
    combine,
    dispatch,
    padded_routes,
    pair_routes,
    sorted_routes,
    wants_grad,
)
from routed_experts.errors import LayoutError
from routed_experts.layout import build_layout
from routed_experts.module_weights import bind, resolve
from routed_experts.prepared import Prepared, call_key, keep
from routed_experts.selection import Selection
from routed_experts.weights import ExpertWeights


class Call(NamedTuple):
    """One checked call: what a row of the backend table is run on."""

    experts: ExpertWeights
    x_TH: Tensor  # in the dtype the products run in
    index_TK: Tensor
    weights_TK: Tensor
    dtype: torch.dtype  # of the result
    group: Any = None  # the ranks that share the experts


def run_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: ExpertWeights | nn.Module,
    *,
    backend: str | None = "auto",
    expert_parallel: bool = False,
    checked: bool | None = None,
    allow_cast: bool = False,
    weights_on: str = "output",
    process_group: Any = None,
) -> Tensor:
    """Run every token through its experts and return the weighted sum, (T, H) in the dtype of hidden_states.

    Args:
        hidden_states: (T, H), any strides.
        top_k_index: (T, K) expert ids of any integer dtype; never changed. An id outside 0..E-1 is a sentinel:
            its pair contributes exactly 0, and so do its gradients.
        top_k_weights: (T, K) routing weights, any floating dtype, kept in it up to the sum over K, which runs in
            float32 in slot order.
        experts: ExpertWeights, or a module that follows the experts protocol.
        backend: a registered name, or ``auto`` (None means the same) for the cheapest that can run the call.
        expert_parallel: ids outside the range belong to other ranks, and are no mistake in checked mode.
        checked: raise ExpertIndexError for ids out of range (waits for the device); None reads
            ROUTED_EXPERTS_CHECKED.
        allow_cast: run hidden_states of another dtype than the weights' by casting them.
        weights_on: ``output`` weights what experts give, ``input`` what they get.
        process_group: the ranks that share the experts, for the backends that ask for it.

    Raises:
        LayoutError, DtypeError, DeviceError: input that does not fit the experts.
        UnknownBackend, BackendUnavailable, UnsupportedExperts, GradientUnsupported: a backend asked for by name
            that cannot run this call; it is never replaced by another one.
    """
    if torch.compiler.is_compiling():
        bound, key = resolve(experts), None
    else:
        bound = bind(experts)
        key = call_key(
            hidden_states,
            top_k_index,
            top_k_weights,
            bound,
            backend,
            expert_parallel,
            checked,
            allow_cast,
            weights_on,
            process_group,
        )
        prepared = bound._prepared.get(key)
        if prepared is not None:
            return run_prepared(prepared, bound, hidden_states, top_k_index, top_k_weights, weights_on, process_group)
    call = check(hidden_states, top_k_index, top_k_weights, bound, expert_parallel, checked, allow_cast, weights_on)
    how = {
        "backend": selection.backend_name(backend),
        "training": wants_grad(hidden_states, top_k_weights, *bound.tensors()),
        "expert_parallel": expert_parallel,
        "process_group": process_group is not None,
    }
    if torch.compiler.is_compiling():
        return compiled.run(call, weights_on, how)
    call = call._replace(group=process_group)
    row = choose(call, how)
    keep(row, call, weights_on, key)
    return execute(row, call, weights_on)


def check(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    experts: ExpertWeights,
    expert_parallel: bool,
    checked: bool | None,
    allow_cast: bool,
    weights_on: str,
) -> Call:
    """Refuse what does not fit the experts, and bring the rest to the dtype that the products run in."""
    check_call(hidden_states, top_k_index, top_k_weights, experts)
    dtype = compute_dtype(hidden_states, experts, allow_cast)
    if weights_on not in ("output", "input"):
        raise LayoutError(
            "unknown weights_on",
            found=repr(weights_on),
            needed="'output' or 'input'",
            hint="'output' is what nearly every model means",
        )
    if is_checked(checked) and not expert_parallel:
        top_k_index = check_ids(top_k_index, experts.num_experts)
    return Call(experts, hidden_states.to(dtype), top_k_index, top_k_weights, hidden_states.dtype)


def run_prepared(
    prepared: Prepared,
    experts: ExpertWeights,
    x_TH: Tensor,
    index_TK: Tensor,
    weights_TK: Tensor,
    weights_on: str,
    process_group: Any = None,
) -> Tensor:
    """Run a call that an equal one has prepared: nothing is left to check but what the backend gives."""
    row, run, shape, given, computed = prepared
    x = x_TH if given is computed else x_TH.to(computed)
    if run is None:
        return execute(row, Call(experts, x, index_TK, weights_TK, given, process_group), weights_on)
    out = run(experts, x, index_TK, weights_TK)
    if type(out) is not Tensor or out.shape != shape:
        out = _checked_result(row, out, *shape)
    return out if out.dtype is given else out.to(given)


def choose(call: Call, how: dict[str, Any]) -> Selection:
    """Pick the row of the backend table for this call; cached per weights and bucket of tokens."""
    tokens, slots = call.index_TK.shape
    capturing = call.x_TH.is_cuda and torch.cuda.is_current_stream_capturing()
    return selection.choose(
        call.experts, num_tokens=tokens, num_top_k=slots, dtype=call.x_TH.dtype, capturing=capturing, **how
    )


def execute(row: Selection, call: Call, weights_on: str) -> Tensor:
    """Run a call on a row of the backend table."""
    return run_on_input(row, call) if weights_on == "input" else run_row(row, call)


def run_row(row: Selection, call: Call) -> Tensor:
    """Hand the call to one row of the backend table, in the form its spec takes."""
    # A kernel that all ranks take part in waits for those that have no token, too.
    if call.index_TK.numel() == 0 and not row.spec.takes_group:
        zeros = call.x_TH.new_zeros(call.x_TH.shape, dtype=call.dtype)
        return attach(zeros, call.x_TH, call.weights_TK, *call.experts.tensors())
    return _FLOWS[row.spec.takes](row, call)


def run_on_input(row: Selection, call: Call) -> Tensor:
    """Weight the tokens instead of the results: every pair becomes a token of its own with weight 1."""
    routes = pair_routes(call.index_TK, call.experts.num_experts)
    weights_TK = call.weights_TK.masked_fill(~routes.valid_TK, 0)
    x_SH = (dispatch(call.x_TH, routes) * weights_TK.reshape(-1, 1)).to(call.x_TH.dtype)
    ones_TK = torch.ones_like(weights_TK)
    pairs = Call(call.experts, x_SH, call.index_TK.reshape(-1, 1), ones_TK.reshape(-1, 1), x_SH.dtype, call.group)
    return combine(run_row(row, pairs), ones_TK, routes, call.dtype)


def _run_routing(row: Selection, call: Call) -> Tensor:
    group = {"process_group": call.group} if row.spec.takes_group else {}
    out = row.run(call.experts, call.x_TH, call.index_TK, call.weights_TK, **group)
    if row.spec.gives == "tokens":
        return _checked_result(row, out, *call.x_TH.shape).to(call.dtype)
    return _combine_result(row, out, call, pair_routes(call.index_TK, call.experts.num_experts))


def _run_slots(row: Selection, call: Call) -> Tensor:
    routes = pair_routes(call.index_TK, call.experts.num_experts)
    expert_S = call.index_TK.long().masked_fill(~routes.valid_TK, -1).reshape(-1)
    out_SH = row.run(call.experts, dispatch(call.x_TH, routes), expert_S)
    return _combine_result(row, out_SH, call, routes)


def _run_grouped(row: Selection, call: Call) -> Tensor:
    layout = build_layout(call.index_TK, call.experts.num_experts)
    routes = sorted_routes(layout, call.index_TK.shape)
    out_SH = row.run(call.experts, dispatch(call.x_TH, routes), layout)
    return _combine_result(row, out_SH, call, routes)


def _run_padded(row: Selection, call: Call) -> Tensor:
    layout = build_layout(call.index_TK, call.experts.num_experts, alignment=row.spec.alignment)
    routes = padded_routes(layout, call.index_TK.shape)
    out_RH = row.run(call.experts, dispatch(call.x_TH, routes), layout)
    return _combine_result(row, out_RH, call, routes)


def _combine_result(row: Selection, out: Tensor, call: Call, routes: Routes) -> Tensor:
    """Weight and sum what a backend gave, in the order that its spec declares."""
    if row.spec.gives == "slots":
        routes = routes._replace(source_R=None, position_TK=None, exclusive=True)
    rows = routes.valid_TK.numel() if routes.source_R is None else routes.source_R.shape[0]
    return combine(_checked_result(row, out, rows, call.x_TH.shape[1]), call.weights_TK, routes, call.dtype)


def _checked_result(row: Selection, out: Any, rows: int, hidden: int) -> Tensor:
    wanted = (rows, hidden)
    if isinstance(out, Tensor) and out.shape == wanted:
        return out
    raise LayoutError(
        f"backend {row.name!r} gave something else than its spec declares",
        found=f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__,
        needed=f"{row.spec.gives} of shape {wanted}",
        hint="Spec says what a run function takes and gives",
    )


_FLOWS = {"routing": _run_routing, "slots": _run_slots, "grouped": _run_grouped, "padded": _run_padded}
