"""The decode stage inside ``generate``: one switch after the prefill, one restore at the end.

transformers opens its decode stage once per generation or once per token, by release, in some releases not in
assisted decoding, and never in beam search. Ours begins where theirs opens first, or after the prefill of these
two, and lasts until the generation ends.
"""

from __future__ import annotations

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

    def __init__(self, model: nn.Module) -> None:
        self.model = model
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
def _generation(model: nn.Module) -> Iterator[Generation]:
    generation = Generation(model)
    _running.generations.append(generation)
    try:
        yield generation
    finally:
        _running.generations.remove(generation)
        leave_decode(generation.undo)


def _innermost(model: nn.Module) -> Generation | None:
    return next((one for one in reversed(_running.generations) if one.model is model), None)


class DecodeAdapter(PatchAdapter):
    """``generate`` bounds the stage; the library's own decode stage begins it where nothing else has."""

    name = "decode stage"

    def make_patches(self) -> None:
        """Wrap both methods."""
        from transformers.generation import GenerationMixin

        self.patches.append(Patch(GenerationMixin, "_optimize_model_for_decode", _begin_with_theirs))
        self.patches.append(Patch(GenerationMixin, "generate", _bound))


class PrefillAdapter(PatchAdapter):
    """Beam search has no decode stage of its own: it begins when a generation's prefill has returned."""

    name = "decode stage after the prefill"

    def make_patches(self) -> None:
        """Wrap the prefill."""
        from transformers.generation import GenerationMixin

        self.patches.append(Patch(GenerationMixin, "_prefill", _begin_after_prefill))


class AssistedAdapter(PatchAdapter):
    """Assisted decoding: it begins when the model's first call has returned, whether or not the library's does."""

    name = "decode stage of assisted decoding"

    def make_patches(self) -> None:
        """Wrap the decoding method."""
        from transformers.generation import GenerationMixin

        self.patches.append(Patch(GenerationMixin, "_assisted_decoding", _begin_after_first_call))


def _begin_with_theirs(original: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def decode(self: Any) -> Iterator[None]:
        generation = _innermost(self)
        if generation is None:
            # A loop of the model's own, outside generate: the stage lasts as long as theirs.
            with _generation(self) as loop:
                loop.begin_decode()
                with original(self):
                    yield
        else:
            generation.begin_decode()
            with original(self):
                yield

    return decode


def _bound(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _generation(self):
            return original(self, *args, **kwargs)

    return run


def _begin_after_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    def prefill(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        generation = _innermost(self)
        if generation is not None:
            generation.begin_decode()
        return outputs

    return prefill


def _begin_after_first_call(original: Callable[..., Any]) -> Callable[..., Any]:
    def assisted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _generation(self) as generation:

            def begin(*_: Any) -> None:
                # A model that drafts for itself is called by the draft's own generation first.
                if _innermost(self) is generation:
                    hook.remove()
                    generation.begin_decode()

            hook = self.register_forward_hook(begin)
            try:
                return original(self, *args, **kwargs)
            finally:
                hook.remove()

    return assisted
