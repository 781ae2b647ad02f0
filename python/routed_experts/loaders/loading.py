"""One load for each kernel, set of sources and environment; what came of it is kept."""

from __future__ import annotations

import logging
import threading
from typing import Any, NamedTuple

from routed_experts.backends.registry import REGISTRY
from routed_experts.errors import BackendUnavailable
from routed_experts.facts import environment, forget_facts
from routed_experts.loaders.bundles import KERNELS, Kernel, kernel_named
from routed_experts.loaders.deepgemm_environment import check_tools, prepare
from routed_experts.loaders.sources import REGISTERED, find_source

logger = logging.getLogger("routed_experts")


class Failure(NamedTuple):
    """Why a load failed: the words for everybody who asks again, and the exception behind them."""

    message: str
    found: str
    needed: str
    hint: str
    cause: BaseException | None

    def error(self) -> BackendUnavailable:
        """Return a fresh exception: one that is raised twice would gather the traces of both."""
        error = BackendUnavailable(self.message, found=self.found, needed=self.needed, hint=self.hint)
        error.__cause__ = self.cause
        return error


_LOCK = threading.RLock()
_KEPT: dict[tuple[Any, ...], Any] = {}


def load_kernel(name: str) -> Any:
    """Return the frozen bundle of a kernel's entry points, loading it at the first call.

    Args:
        name: ``deepgemm``, ``deepgemm_megamoe`` or ``sonicmoe``.

    Raises:
        BackendUnavailable: it cannot be had, does not load or lacks entry points; chained to the loader's own error,
            and raised again without another try until the environment changes or ``reset_kernels`` is called.
    """
    kept = _KEPT.get((name, environment("cuda")))
    if kept is None:
        kept = _load_once(KERNELS[name])
    if isinstance(kept, Failure):
        raise kept.error()
    return kept


def failure_of(name: str) -> Failure | None:
    """Return why the last load in this environment failed, if it did."""
    kept = _KEPT.get((name, environment("cuda")))
    return kept if isinstance(kept, Failure) else None


def register_kernel(name: str, module: Any) -> None:
    """Run the backend of a kernel on ``module``, whatever else is installed.

    Args:
        name: ``deepgemm`` (which ``deepgemm_megamoe`` then uses too), ``deepgemm_megamoe`` or ``sonicmoe``; the name of
            the kernel's repository or package does as well.
        module: any object with the kernel's entry points as attributes; None takes it back. They are looked up, and
            those that are missing named, when the backend first runs.

    Raises:
        UnknownBackend: there is no such kernel.
    """
    kernel = kernel_named(name)
    with _LOCK:
        if module is None:
            REGISTERED.pop(kernel.name, None)
        else:
            REGISTERED[kernel.name] = module
        _forget()


def reset_kernels() -> None:
    """Forget what was registered and what came of every load: the next call of each backend tries anew."""
    from routed_experts.megamoe_buffers import release_buffers

    release_buffers()
    with _LOCK:
        REGISTERED.clear()
        _forget()


def _forget() -> None:
    _KEPT.clear()
    _tell_selection()


def _tell_selection() -> None:
    forget_facts()
    REGISTRY.renew()


def _load_once(kernel: Kernel) -> Any:
    with _LOCK:
        before = (kernel.name, environment("cuda"))
        if before not in _KEPT:
            result = _try(kernel)
            # A load may have set CUDA_HOME, and is the load of that environment too.
            _KEPT[before] = _KEPT[kernel.name, environment("cuda")] = result
            if isinstance(result, Failure):
                logger.warning("kernel %s: %s: %s", kernel.name, result.message, result.found)
                _tell_selection()
        return _KEPT[before]


def _try(kernel: Kernel) -> Any:
    words = "no source"
    try:
        source = find_source(kernel)
        words = source.words
        prepare(kernel)
        bundle = kernel.bundle_of(source.open(), source.words)
        check_tools(kernel, bundle.module)
    except BackendUnavailable as error:
        found, needed, hint = error.found or str(error), error.needed or "", error.hint or ""
        return Failure(error.message, found, needed, hint, error)
    except Exception as error:  # loaders raise whatever they come across
        return Failure(
            f"the kernel {kernel.name} did not load",
            f"{type(error).__name__}: {error} (from {words})",
            f"a kernel {kernel.name} that loads",
            "mend what it says, then reset_kernels(); docs/external-kernels.md lists the sources",
            error,
        )
    logger.info("kernel %s loaded from %s", kernel.name, source.words)
    return bundle
