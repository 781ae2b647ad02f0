"""What is known of each kernel without loading it: for selection and for reports."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from routed_experts.errors import BackendUnavailable
from routed_experts.loaders.bundles import KERNELS, Kernel
from routed_experts.loaders.sources import find_source


def kernel_facts() -> dict[str, dict[str, Any]]:
    """Return, for each kernel, its source where that needs no network, and why there is none or it did not load."""
    return {name: _facts(kernel) for name, kernel in KERNELS.items()}


def kernel_status() -> list[dict[str, Any]]:
    """Return one row a kernel for reports: where it comes from, whether it was loaded, and its version."""
    return [_status(kernel) for kernel in KERNELS.values()]


def _facts(kernel: Kernel) -> dict[str, Any]:
    from routed_experts.loaders.loading import failure_of

    found: dict[str, Any] = {"source": None, "source_refusal": None, "load_refusal": None}
    failure = failure_of(kernel.name)
    try:
        source = find_source(kernel)
        found["source"] = source.words if source.is_local else None
    except BackendUnavailable as error:
        found["source_refusal"] = _refusal(error)
    if failure is not None and found["source_refusal"] is None:
        found["load_refusal"] = {"found": failure.found, "needed": failure.needed, "hint": failure.hint}
    return found


def _refusal(error: BackendUnavailable) -> dict[str, str]:
    return {"found": error.found or error.message, "needed": error.needed or "", "hint": error.hint or ""}


def _status(kernel: Kernel) -> dict[str, Any]:
    facts = _facts(kernel)
    refusal = facts["source_refusal"] or facts["load_refusal"]
    try:
        source = find_source(kernel)
        words, local = source.words, source.is_local
    except BackendUnavailable:
        words, local = None, False
    return {
        "kernel": kernel.name,
        "source": words,
        "needs_network": words is not None and not local,
        "installed": _installed_version(kernel.package),
        "problem": None if refusal is None else refusal["found"],
    }


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package.replace("_", "-"))
    except metadata.PackageNotFoundError:
        return None
