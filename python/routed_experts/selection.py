"""Which backend runs a call, and why: a thin layer over the pure choice in the Rust core.

:func:`choose` is on the path of every call: a choice is made once per experts, bucket of token counts and
state of the call, and found again by its key afterwards.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from routed_experts.backends.registry import REGISTRY, Table
from routed_experts.backends.spec import Spec
from routed_experts.errors import BackendUnavailable, DtypeError, LayoutError
from routed_experts.facts import Facts, batched_budget, environment, facts_for, parse_device
from routed_experts.problem import bucket, dtype_name, problem_fields
from routed_experts.tuning.profile import measured, measured_tiles

logger = logging.getLogger("routed_experts")
logger.addHandler(logging.NullHandler())

# Experts that see ever new shapes, backends or environments must not grow without end.
_MOST_CHOICES = 4096
_MOST_TOKENS = 2**63 - 1  # what the core counts in
_COMPUTE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# num_top_k, dtype, backend, training, compiling, capturing, expert_parallel, process_group
Asked: TypeAlias = tuple[int, torch.dtype, str, bool, bool, bool, bool, bool]


@dataclass(frozen=True)
class Decision:
    """What was decided about one backend.

    ``found``, ``needed`` and ``error`` (the name of an error class) are None when it is accepted; ``hint``
    then says why ``auto`` passes it over, if it does. ``predicted_us`` is None where no cost is known; ``tuned``
    says that it was measured on this machine, and is not the default. ``tiles`` is "tuned" or "default" for a backend
    whose kernels' tiles can be measured, by whether this call's were; None for others.
    """

    backend: str
    path: str
    accepted: bool
    found: str | None
    needed: str | None
    hint: str | None
    error: str | None
    predicted_us: float | None
    tuned: bool = False
    tiles: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        if not self.accepted:
            return f"cannot run: found {self.found}, needed {self.needed}; {self.hint}"
        figures = "tuned" if self.tuned else "default"
        us = "" if self.predicted_us is None else f", predicted {self.predicted_us:.1f} us ({figures} figures)"
        cost = f"can run{us}" + ("" if self.tiles is None else f", {self.tiles} tiles")
        return f"{cost}; {self.hint}" if self.hint else cost


@dataclass(frozen=True)
class Selection:
    """The chosen backend, one decision for every registered one, and the chosen row of the table.

    ``row`` counts the rows of that backend; ``spec`` is the row and ``run`` its function, which takes and
    returns what the spec declares. ``request`` describes the call that was asked about.
    """

    name: str
    path: str
    decisions: tuple[Decision, ...]
    row: int
    request: str
    spec: Spec = field(repr=False)
    run: Callable[..., Any] = field(repr=False, compare=False)

    def explain(self) -> str:
        """Return the choice and every backend's decision as text."""
        width = max(len(_label(decision.backend, decision.path)) for decision in self.decisions)
        lines = [f"{_label(self.name, self.path)} for {self.request}"]
        for decision in self.decisions:
            mark = ">" if decision.backend == self.name else " "
            lines.append(f" {mark} {_label(decision.backend, decision.path):{width}}  {decision}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the selection as plain data, without spec and function."""
        return {
            "name": self.name,
            "path": self.path,
            "row": self.row,
            "request": self.request,
            "decisions": [decision.to_dict() for decision in self.decisions],
        }


def select_backend(
    experts: Any,
    *,
    num_tokens: int,
    num_top_k: int | None = None,
    dtype: torch.dtype | None = None,
    backend: str | None = "auto",
    training: bool = False,
    compiling: bool = False,
    capturing: bool = False,
    expert_parallel: bool = False,
    device: str | torch.device | None = None,
    facts: Facts | None = None,
) -> Selection:
    """Return the backend that would run a call of this shape, and every backend's decision.

    Args:
        experts: ExpertWeights, or a module they can be made from.
        num_tokens: T. Predictions are for the next of a series of counts, at most 25% above.
        num_top_k: K; 2 when not given, or 1 with a single expert.
        dtype: what the experts compute in; theirs when not given, bfloat16 when they are quantized.
        backend: a name, or "auto" (None means the same).
        training: a gradient is wanted.
        compiling: the call is traced by torch.compile.
        capturing: the call is captured in a CUDA graph.
        expert_parallel: ids outside 0..E-1 belong to other ranks.
        device: where the call runs; else that of ``facts``; else that of the experts, meta counting as CPU.
        facts: another machine than this one, ``current_facts().replace(...)``.

    Raises:
        UnknownBackend: a name that is not registered.
        LayoutError, DtypeError: experts that are none, sizes that are no whole numbers, a dtype that no experts
            compute in, a backend that is no name.
        RoutedExpertsError: the backend asked for by name cannot run; the class says which kind of reason.
        BackendUnavailable: ``auto`` finds no backend that it may choose.
    """
    # Weights of from_module have no choices of their own: they are bound once, not at every attribute.
    if "_choices" not in getattr(experts, "__dict__", ()):
        experts = _resolve(experts)
    if num_top_k is None:
        num_top_k = min(2, experts.num_experts)
    if dtype is None:
        dtype = experts.dtype
        if dtype not in _COMPUTE_DTYPES:
            dtype = torch.bfloat16
    asked = (num_top_k, dtype, backend_name(backend), training, compiling, capturing, expert_parallel, False)
    if facts is not None:
        return _on_facts(facts, experts, num_tokens, asked, device)
    return _look_up(experts, num_tokens, asked, experts.device if device is None else parse_device(device))


def choose(
    experts: Any,
    num_tokens: int,
    num_top_k: int,
    dtype: torch.dtype,
    backend: str = "auto",
    training: bool = False,
    compiling: bool = False,
    capturing: bool = False,
    expert_parallel: bool = False,
    process_group: bool = False,
    device: torch.device | None = None,
) -> Selection:
    """Return the selection for a call on this machine, from ``experts._choices`` when it was made before.

    Arguments as :func:`select_backend`; ``process_group`` says whether one was handed over.

    Raises as :func:`select_backend` does; a refusal is not kept.
    """
    asked = (num_top_k, dtype, backend, training, compiling, capturing, expert_parallel, process_group)
    selection = _look_up(experts, num_tokens, asked, device or experts.device)
    # A row whose kernel fails is refused at the next look, so each backend is tried once at most.
    tries = len(selection.decisions) if backend == "auto" else 0
    while tries and not _loads(selection):
        tries -= 1
        selection = _look_up(experts, num_tokens, asked, device or experts.device)
    return selection


def _loads(selection: Selection) -> bool:
    """Whether what a row has to load first does load; what fails is from then on known of the machine."""
    load = getattr(selection.run, "load", None)
    if load is None:
        return True
    try:
        load()
    except BackendUnavailable:
        return False
    return True


def _look_up(experts: Any, num_tokens: int, asked: Asked, device: torch.device) -> Selection:
    call = (bucket(num_tokens), device, asked, environment(device.type))
    kept: Selection | None = experts._choices.get((REGISTRY.generation, call))
    if kept is not None:
        return kept
    table = REGISTRY.table()
    selection = _select(table, facts_for(device), _problem(problem_fields(experts), num_tokens, asked), asked[2])
    if len(experts._choices) >= _MOST_CHOICES:
        experts._choices.clear()
    # Of the table that was asked, should another thread have changed the registry since.
    experts._choices[(table.generation, call)] = selection
    if asked[2] == "auto":
        _log(selection)
    return selection


def backend_name(backend: object) -> str:
    """Return the name that was asked for, "auto" for None or ""; raise DtypeError for what is no name."""
    if backend is None:
        return "auto"
    if isinstance(backend, str):
        return backend or "auto"
    raise DtypeError(
        "a backend is asked for by name",
        found=f"{backend!r} of type {type(backend).__name__}",
        needed="a string or None",
        hint='backends() has the names; "auto" chooses among them',
    )


def _on_facts(
    facts: Facts, experts: Any, num_tokens: int, asked: Asked, device: str | torch.device | None
) -> Selection:
    """Answer about another machine; nothing is kept and nothing is logged, for nothing will run there."""
    if not isinstance(facts, Facts):
        raise DtypeError(
            "facts are not those of a machine",
            found=type(facts).__name__,
            needed="Facts",
            hint="pass current_facts().replace(capability=(9, 0))",
        )
    kind = facts.device if device is None else parse_device(device).type
    if kind != facts.device:
        facts = facts.replace(device=kind)
    return _select(REGISTRY.table(), facts, _problem(problem_fields(experts), num_tokens, asked), asked[2])


def choose_traced(fields: dict[str, Any], device: str, num_tokens: int, asked: Asked) -> Selection:
    """Return the selection for a call that is being traced, where ``problem_fields`` is all there is of the experts."""
    return _select(REGISTRY.table(), facts_for(torch.device(device)), _problem(fields, num_tokens, asked), asked[2])


def machine_decisions(facts: Facts) -> list[Decision]:
    """Return every backend's decision by the machine alone: device, versions, packages, toolkit."""
    return [Decision(**decision) for decision in REGISTRY.table().core.decisions(facts.to_dict())]


def _resolve(experts: Any) -> Any:
    from routed_experts.module_weights import resolve

    return resolve(experts)


def _problem(fields: dict[str, Any], num_tokens: int, asked: Asked) -> dict[str, Any]:
    num_top_k, dtype, _, training, compiling, capturing, expert_parallel, process_group = asked
    if not all(isinstance(size, int) and 0 <= size <= _MOST_TOKENS for size in (num_tokens, num_top_k)):
        raise LayoutError(
            "the sizes of a call are whole numbers, none of them negative",
            found=f"num_tokens {num_tokens!r}, num_top_k {num_top_k!r}",
            needed=f"whole numbers from 0 to {_MOST_TOKENS}",
            hint="pass the sizes of top_k_index, (T, K)",
        )
    if dtype not in _COMPUTE_DTYPES:
        raise DtypeError(
            "experts do not compute in this dtype",
            found=repr(dtype),
            needed=", ".join(map(str, _COMPUTE_DTYPES)),
            hint="pass the dtype of hidden_states, or leave it out",
        )
    return {
        **fields,
        "num_tokens": bucket(num_tokens),
        "num_top_k": num_top_k,
        "dtype": dtype_name(dtype),
        "training": bool(training),
        "compiling": bool(compiling),
        "capturing": bool(capturing),
        "expert_parallel": bool(expert_parallel),
        "process_group": bool(process_group),
        "scratch_limit_bytes": batched_budget(),
    }


def as_problem(
    experts: Any, num_tokens: int, num_top_k: int, dtype: torch.dtype, *, backend: str = "auto", capturing: bool = False
) -> dict[str, Any]:
    """Return a call without gradients on one device as the plain data that is decided by."""
    asked = (num_top_k, dtype, backend, False, False, capturing, False, False)
    return _problem(problem_fields(experts), num_tokens, asked)


def pin(experts: Any, selection: Selection) -> Any:
    """Return the same experts, whose calls run on one row whatever is asked for: to measure it, or to test it."""

    class Pinned(dict[Any, Selection]):
        def get(self, key: Any, default: Any = None) -> Selection:
            return selection

    experts.__dict__.update(_choices=Pinned(), _prepared={}, _plans={})
    return experts


def _select(table: Table, facts: Facts, problem: dict[str, Any], backend: str) -> Selection:
    found = table.core.select(facts.to_dict(), problem, backend, measured(facts, problem))
    spec, run = table.rows[found["row"]]
    first = next(index for index, (other, _) in enumerate(table.rows) if other.name == spec.name)
    return Selection(
        name=found["name"],
        path=found["path"],
        decisions=tuple(Decision(**one, tiles=_tiles(table, facts, problem, one)) for one in found["decisions"]),
        row=found["row"] - first,
        request=_describe(facts, problem),
        spec=spec,
        run=run,
    )


def _tiles(table: Table, facts: Facts, problem: dict[str, Any], decision: dict[str, Any]) -> str | None:
    """Whose tiles the row of a decision runs with, if it has any to choose."""
    rows = ((spec.name, spec.path, run) for spec, run in table.rows)
    run = next(run for name, path, run in rows if (name, path) == (decision["backend"], decision["path"]))
    if not decision["accepted"] or not getattr(run, "has_tiles", False):
        return None
    return "default" if measured_tiles(facts, problem) is None else "tuned"


def _describe(facts: Facts, problem: dict[str, Any]) -> str:
    sizes = "T={num_tokens} K={num_top_k} E={num_experts} H={hidden_size} I={intermediate_size} {dtype}"
    flags = ("training", "compiling", "capturing", "expert_parallel")
    state = "".join(f", {flag.replace('_', ' ')}" for flag in flags if problem[flag])
    where = facts.device if facts.capability is None else "{} SM{}{}".format(facts.device, *facts.capability)
    return f"{sizes.format(**problem)} on {where}{state}"


def _log(selection: Selection) -> None:
    rest = ", ".join(
        f"{_label(one.backend, one.path)} {one.predicted_us:.1f} us"
        for one in selection.decisions
        if one.accepted and one.predicted_us is not None
    )
    logger.info("auto chose %s for %s: %s", _label(selection.name, selection.path), selection.request, rest)


def _label(name: str, path: str) -> str:
    return f"{name} ({path})" if path else name
