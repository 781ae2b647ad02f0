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

from routed_experts.errors import LayoutError

Takes: TypeAlias = Literal["routing", "slots", "grouped", "padded"]
Gives: TypeAlias = Literal["tokens", "slots", "rows"]

# {"kind": ..., **arguments}: one sentence of the vocabulary in rust/core/src/requirements.rs.
Requirement: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost parameters of one row on one kind of device; microseconds, bytes, floating-point operations.

    predicted_us = call_us + expert_us * experts hit + max(bytes / bytes_per_us, flops / flops_per_us), where
    bytes counts the weights of the experts hit once (``weight_passes`` times) or, with ``copies_weights``,
    once for every (token, slot) pair. Inside a CUDA graph ``captured_us`` stands for ``call_us``, if it is given.
    """

    call_us: float
    captured_us: float | None = None
    expert_us: float = 0.0
    bytes_per_us: float
    flops_per_us: float
    weight_passes: float = 1.0
    copies_weights: bool = False


_GIVES: dict[str, tuple[str, ...]] = {
    "routing": ("tokens", "slots"),
    "slots": ("slots", "rows"),
    "grouped": ("rows", "slots"),
    "padded": ("rows", "slots"),
}


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One row of the backend table.

    ``takes`` says what the run function receives, and ``gives`` what it returns; T tokens, K slots a token,
    S = T*K pairs, H hidden size, R padded rows:

    * ``routing``: ``run(experts, hidden_TH, top_k_index_TK, top_k_weights_TK)``
    * ``slots``: ``run(experts, x_SH, expert_S)``, pairs in token order, -1 for a sentinel
    * ``grouped``: ``run(experts, x_SH, layout)``, rows sorted by expert, sentinel rows last
    * ``padded``: ``run(experts, x_RH, layout)``, every expert's rows start at a multiple of ``alignment``

    and back come ``tokens`` (T, H), weighted and summed (only from ``routing``, which has the weights); ``slots``
    (S, H), in pair order; or ``rows``, in the order they were handed over (not from ``routing``, which hands
    over none). Rows of sentinels hold their token; what comes back for them is not read.

    ``decode_as`` names the backend that takes over in the decode stage on an accelerator ("" for none);
    ``load_time_only`` marks one that reshapes weights, so it is neither entered nor left after loading;
    ``takes_group`` hands the run function the keyword ``process_group`` (it must take the routing).

    Raises:
        LayoutError: fields that contradict each other.
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
    takes_group: bool = False

    def __post_init__(self) -> None:
        mistake = self._mistake()
        if mistake is not None:
            name, needed = mistake
            raise LayoutError(
                f"a spec whose {name} does not fit",
                found=f"{name}={getattr(self, name)!r}, takes={self.takes!r}",
                needed=needed,
                hint="the docstring of Spec has what goes together",
            )

    def _mistake(self) -> tuple[str, str] | None:
        if isinstance(self.devices, str):
            return "devices", f"a tuple: ({self.devices!r},)"
        if self.takes_group and self.takes != "routing":
            return "takes_group", "takes='routing'"
        if self.takes not in _GIVES:
            return "takes", "one of " + ", ".join(_GIVES)
        if self.gives not in _GIVES[self.takes]:
            return "gives", " or ".join(_GIVES[self.takes])
        if self.alignment < (least := 2 if self.takes == "padded" else 1):
            return "alignment", f"at least {least}"
        return None

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
