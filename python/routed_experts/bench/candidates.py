"""Who is measured: transformers' own functions and our backends, each as a function of one input set."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

import routed_experts as rx
from routed_experts.bench.inputs import Experts
from routed_experts.weights import TENSOR_NAMES

if TYPE_CHECKING:
    from routed_experts.bench.shapes import Shape

PEER = "transformers"
Function = Callable[[Tensor, Tensor, Tensor], Tensor]


class Choice(NamedTuple):
    """What was asked for on the command line."""

    backends: tuple[str, ...]  # empty for all that can run, and auto
    skip_peers: bool
    most_copies: int  # (token, slot) pairs above which nothing that copies weights for each is run


class Ours:
    """Our backends on one layer, and what the selection says of them."""

    def __init__(self, weights: rx.ExpertWeights, shape: Shape):
        self.weights, self.top_k = weights, shape.top_k

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of the stored weights and scales, for each element they stand for."""
        tensors = [t for t in self.weights.tensors() if t is not None]
        weights = self.weights
        halves = 3 if weights.has_gate else 2
        elements = weights.num_experts * halves * weights.hidden_size * weights.intermediate_size
        return sum(t.numel() * t.element_size() for t in tensors) / elements

    def reference(self, x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        """``eager`` in float32: over float32 copies of weights that are not quantized, else over these."""
        weights = self.weights if self.weights.quantization is not None else _float32(self.weights)
        return rx.run_experts(x.float(), index, scores, weights, backend="eager")

    def select(self, tokens: int, backend: str = "auto", capturing: bool = False) -> rx.Selection:
        """The selection of a call of ``tokens``."""
        return rx.select_backend(
            self.weights, num_tokens=tokens, num_top_k=self.top_k, backend=backend, capturing=capturing
        )

    def run(self, x: Tensor, index: Tensor, weights: Tensor, *, backend: str) -> Tensor:
        """Run one call on a backend."""
        return rx.run_experts(x, index, weights, self.weights, backend=backend)

    def function(self, name: str) -> Function:
        """The call on a backend of that name."""
        return functools.partial(self.run, backend=name)

    def decisions(self, tokens: int) -> dict[str, str | None]:
        """Backend to the reason why it cannot run this call, None for those that can."""
        decided = self.select(tokens).decisions
        return {one.backend: None if one.accepted else str(one) for one in decided}

    def refuses_capture(self, tokens: int, name: str) -> str | None:
        """Why a backend declines a call that is being captured, None where it does not."""
        try:
            self.select(tokens, name, capturing=True)
        except rx.RoutedExpertsError as error:
            return reason(error)
        return None


def _float32(weights: rx.ExpertWeights) -> rx.ExpertWeights:
    named = zip(TENSOR_NAMES, weights.tensors(), strict=True)
    given: dict[str, Any] = {name: t.float() for name, t in named if t is not None}
    declared = ("activation", "gate", "swiglu_limit", "swiglu_alpha", "is_transposed", "is_concatenated")
    given |= {name: getattr(weights, name) for name in declared}
    return rx.ExpertWeights(**given, post_expert_norm=weights.post_expert_norm)


def peers(layer: Experts, pairs: int, choice: Choice) -> dict[str, Function]:
    """Functions of other libraries that are installed: transformers' experts interface, vLLM's Triton kernel."""
    if choice.skip_peers:
        return {}
    return _transformers(layer, pairs <= choice.most_copies) | _vllm(layer)


def _transformers(layer: Experts, copies: bool) -> dict[str, Function]:
    try:
        from transformers.integrations import moe
    except ImportError:
        return {}
    found: dict[str, Function] = {f"{PEER} grouped_mm": functools.partial(moe.grouped_mm_experts_forward, layer)}
    if copies:
        found[f"{PEER} batched_mm"] = functools.partial(moe.batched_mm_experts_forward, layer)
    return found


def _vllm(layer: Experts) -> dict[str, Function]:
    # Of a package of that size, importing fails in many ways; a build for CPUs has no such kernel.
    if not layer.down_proj.is_cuda or importlib.util.find_spec("vllm") is None:
        return {}
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except Exception:
        return {}

    def run(x: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        return fused_experts(x, layer.gate_up_proj, layer.down_proj, scores.float(), index.int())

    return {"vllm fused_experts": run}


def ours(backends: Ours, tokens: int, choice: Choice) -> tuple[dict[str, Function], dict[str, str]]:
    """Return the functions of our backends, and why those asked for that cannot run this call have none."""
    reasons = backends.decisions(tokens) | {"auto": None}
    names = choice.backends or tuple(reasons)
    if tokens * backends.top_k > choice.most_copies:
        names = tuple(name for name in names if not _copies_weights(name))
    found = {name: backends.function(name) for name in names if name in reasons and reasons[name] is None}
    unknown = "no backend of this name"
    declined = {name: reasons.get(name, unknown) for name in choice.backends if name in names and name not in found}
    return found, {name: str(reason) for name, reason in declined.items()}


def _copies_weights(name: str) -> bool:
    """Whether a backend declares that it copies weights for every (token, slot) pair."""
    spec = rx.backends().get(name)
    return spec is not None and any(cost.copies_weights for cost in spec.cost.values())


def reason(error: BaseException) -> str:
    """An error as one line of a table or a JSON value; of errors that led to each other, the first."""
    while error.__context__ is not None:
        error = error.__context__
    text = f"{type(error).__name__}: {error}".split("\n")
    return " ".join(part.strip() for part in text[:4])[:300]
