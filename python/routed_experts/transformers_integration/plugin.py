"""The adapters together: installed, kept in step with the registry of backends, and taken out."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable

from routed_experts.backends.registry import REGISTRY
from routed_experts.errors import BackendUnavailable
from routed_experts.names import valid_names
from routed_experts.transformers_integration.adapter import Adapter, Plan
from routed_experts.transformers_integration.decoding import AssistedAdapter, DecodeAdapter, PrefillAdapter
from routed_experts.transformers_integration.expert_parallel import ExpertParallelAdapter
from routed_experts.transformers_integration.get_method import GetMethodAdapter
from routed_experts.transformers_integration.load_time import LoadTimeAdapter
from routed_experts.transformers_integration.loading import LoadingAdapter
from routed_experts.transformers_integration.registration import QuantizedRegistrationAdapter, RegistrationAdapter
from routed_experts.transformers_integration.validation import ValidationAdapter

# In this order: validation is tried with a name that registration has put there.
ADAPTERS: tuple[Callable[[], Adapter], ...] = (
    RegistrationAdapter,
    QuantizedRegistrationAdapter,
    ValidationAdapter,
    GetMethodAdapter,
    LoadingAdapter,
    LoadTimeAdapter,
    DecodeAdapter,
    PrefillAdapter,
    AssistedAdapter,
    ExpertParallelAdapter,
)


class Plugin:
    """Which adapters are in place; one lock around every change."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._adapters: list[Adapter] | None = None
        self._replace = False

    def register(self, replace: bool) -> None:
        """Bring every adapter that works to the present backends and to ``replace``."""
        with self._lock:
            self._replace = replace
            if self._adapters is None:
                self._adapters = [make() for make in ADAPTERS]
                REGISTRY.watchers.append(self.keep_in_step)
            self._install()

    def keep_in_step(self) -> None:
        """Follow a change of the registry of backends."""
        with self._lock:
            if self._adapters is not None:
                self._install()

    def unregister(self) -> None:
        """Take every adapter out."""
        with self._lock:
            if self._adapters is None:
                return
            REGISTRY.watchers.remove(self.keep_in_step)
            adapters, self._adapters, self._replace = self._adapters, None, False
            with contextlib.ExitStack() as stack:
                for adapter in adapters:
                    stack.callback(adapter.uninstall)

    def _install(self) -> None:
        plan = Plan(tuple(valid_names()), self._replace)
        for adapter in tuple(self._adapters or ()):
            try:
                adapter.install(plan)
            except Exception as error:
                self._leave_out(adapter, error)

    def _leave_out(self, adapter: Adapter, error: Exception) -> None:
        """Take out one adapter that does not fit, and leave the others; it is not tried again until unregistered."""
        assert self._adapters is not None
        self._adapters.remove(adapter)
        # It may have failed half-way; what it never did, it need not undo.
        with contextlib.suppress(Exception):
            adapter.uninstall()
        warnings.warn(
            f"routed-experts: {adapter.name} does not fit this transformers and is left out ({error!r})",
            RuntimeWarning,
            stacklevel=5,
        )


_PLUGIN = Plugin()


def register_with_transformers(replace: bool = False) -> None:
    """Offer our backends as ``experts_implementation`` names of transformers.

    ``routed_experts`` is ``auto`` and ``routed_experts_NAME`` is the backend NAME, those that are registered later
    included; they hold for the whole process, for loading, ``model.set_experts_implementation`` and generation.
    With ``replace``, ``grouped_mm`` and ``batched_mm`` run on our backends of the same name too, so that code which
    knows nothing of this package does; ``eager`` stays the model's own. Quantized experts keep their functions.

    May be called again at any time, from any thread; the last call says whether names are replaced. A hook that
    does not fit the installed release is left out, with a RuntimeWarning that names it.

    Raises:
        BackendUnavailable: there is no transformers, or one without an interface for experts.
    """
    _require_transformers()
    _PLUGIN.register(bool(replace))


def unregister_from_transformers() -> None:
    """Put transformers back as it was before; does nothing if nothing is registered.

    A model that still names one of our backends then raises KeyError: give it another name first.
    """
    _PLUGIN.unregister()


def _require_transformers() -> None:
    try:
        from transformers.integrations.moe import ExpertsInterface  # noqa: F401
    except ImportError as error:
        raise BackendUnavailable(
            "transformers has no experts interface to register with",
            found=str(error),
            needed="transformers 5.0 or newer",
            hint='pip install "routed-experts[transformers]"',
        ) from error
