"""The decode stage inside ``generate``: one switch after the prefill, one restore at the end.

transformers opens its decode stage once per generation or once per token, by release, and not at all in beam
search. Ours begins where it opens first, or after beam search's prefill, and lasts until the generation ends.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from routed_experts import config_names
from routed_experts.models import enter_decode, leave_decode
from routed_experts.transformers_integration.adapter import Patch, PatchAdapter


class Generation:
    """One running generation of one model, and what its decode stage has switched."""

    def __init__(self, model: nn.Module, kind: str) -> None:
        self.model, self.kind = model, kind
        self.begun = False
        self.undo: list[Callable[[], None]] = []

    def begin_decode(self) -> None:
        """Switch, the first time; a generation inside another's decode stage finds nothing left to switch."""
        if not self.begun:
            self.begun = True
            # Built-in names that run on ours are switched by the library itself.
            enter_decode(self.model, self.undo, spare=config_names.STATE.replaced)


class _Running(threading.local):
    def __init__(self) -> None:
        self.generations: list[Generation] = []


_running = _Running()


@contextmanager
def _generation(model: nn.Module, kind: str) -> Iterator[Generation]:
    generation = Generation(model, kind)
    _running.generations.append(generation)
    try:
        yield generation
    finally:
        _running.generations.remove(generation)
        leave_decode(generation.undo)


def _innermost(model: nn.Module) -> Generation | None:
    return next((one for one in reversed(_running.generations) if one.model is model), None)


class DecodeAdapter(PatchAdapter):
    """``generate`` bounds the stage; the library's own decode stage begins it (greedy, sampling, assisted)."""

    name = "decode stage"

    def make_patches(self) -> None:
        """Wrap both methods."""
        from transformers.generation import GenerationMixin

        self.patches.append(Patch(GenerationMixin, "_optimize_model_for_decode", _begin_with_theirs))
        self.patches.append(Patch(GenerationMixin, "generate", functools.partial(_bound, "generate")))


class BeamSearchAdapter(PatchAdapter):
    """Beam search has no decode stage of its own: it begins when its prefill has returned."""

    name = "decode stage of beam search"

    def make_patches(self) -> None:
        """Wrap the search and the prefill in it."""
        from transformers.generation import GenerationMixin

        self.patches.append(Patch(GenerationMixin, "_prefill", _begin_after_prefill))
        self.patches.append(Patch(GenerationMixin, "_beam_search", functools.partial(_bound, "beam search")))


def _begin_with_theirs(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def decode(self: Any) -> Iterator[None]:
        generation = _innermost(self)
        if generation is None:
            # A loop of the model's own, outside generate: the stage lasts as long as theirs.
            with _generation(self, "loop") as loop:
                loop.begin_decode()
                with original(self):
                    yield
        else:
            generation.begin_decode()
            with original(self):
                yield

    return decode


def _bound(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _generation(self, kind):
            return original(self, *args, **kwargs)

    return run


def _begin_after_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    def prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        generation = _innermost(self)
        if generation is not None and generation.kind == "beam search":
            generation.begin_decode()
        return outputs

    return prefill
