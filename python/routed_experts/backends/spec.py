"""What a backend says of itself: plain data, evaluated by the Rust core and by nobody else.

A backend file exports ``BACKEND = Backend(...)``: one or more rows, each a :class:`Spec` beside the function
that runs it. Several rows of one name are several ways to the same numbers (torch's grouped GEMM or a loop
per group; Triton or Rust); the core picks the cheapest row whose requirements are met.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Takes: TypeAlias = Literal["routing", "slots", "grouped", "padded"]
Gives: TypeAlias = Literal["tokens", "slots", "rows"]

# {"kind": ..., **arguments}: one sentence of the vocabulary in rust/core/src/requirements.rs.
Requirement: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost parameters of one row on one kind of device; microseconds, bytes, floating-point operations.

    predicted_us = call_us + expert_us * experts hit + max(bytes / bytes_per_us, flops / flops_per_us), where
    bytes counts the weights of the experts hit once (``weight_passes`` times) or, with ``copies_weights``,
    once for every (token, slot) pair.
    """

    call_us: float
    expert_us: float = 0.0
    bytes_per_us: float
    flops_per_us: float
    weight_passes: float = 1.0
    copies_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One row of the backend table.

    ``takes`` says what the run function receives, and ``gives`` what it returns; T tokens, K slots a token,
    S = T*K pairs, H hidden size, R padded rows:

    * ``routing``: ``run(experts, hidden_TH, top_k_index_TK, top_k_weights_TK)``
    * ``slots``: ``run(experts, x_SH, expert_S)``, pairs in token order, -1 for a sentinel
    * ``grouped``: ``run(experts, x_SH, layout)``, rows sorted by expert, sentinel rows last
    * ``padded``: ``run(experts, x_RH, layout)``, every expert's rows start at a multiple of ``alignment``

    and back come ``tokens`` (T, H), weighted and summed; ``slots`` (S, H), in pair order; or ``rows``, in the
    order they were handed over. Rows of sentinels must read 0 in slots and rows.

    ``decode_as`` names the backend that takes over in the decode stage on an accelerator ("" for none);
    ``load_time_only`` marks one that reshapes weights, so it is neither entered nor left after loading.
    """

    name: str
    path: str = ""
    devices: tuple[str, ...] = ("cpu", "cuda")
    takes: Takes = "routing"
    gives: Gives = "tokens"
    alignment: int = 1
    requires: tuple[Requirement, ...] = ()
    cost: dict[str, Cost] = field(default_factory=dict)
    auto: bool = True
    decode_as: str = ""
    load_time_only: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the row as nested plain data, the form the Rust registry reads."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Backend:
    """A named backend: its rows, each with the function that runs it."""

    rows: tuple[tuple[Spec, Callable[..., Any]], ...]

    @property
    def name(self) -> str:
        """Name shared by all rows."""
        return self.rows[0][0].name
