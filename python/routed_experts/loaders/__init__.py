"""Kernels of other projects: where they come from, which entry points they must have, and what became of a load.

``KERNELS`` names them. A kernel is loaded at the first call that runs on it and never before; what came of it, good
or bad, is kept for the sources and the environment it came from, until :func:`reset_kernels`.
"""

from __future__ import annotations

from routed_experts.loaders.bundles import KERNELS, DeepGemm, Kernel, MegaMoe, SonicMoe
from routed_experts.loaders.loading import load_kernel, register_kernel, reset_kernels
from routed_experts.loaders.status import kernel_facts, kernel_status

__all__ = [
    "KERNELS",
    "DeepGemm",
    "Kernel",
    "MegaMoe",
    "SonicMoe",
    "kernel_facts",
    "kernel_status",
    "load_kernel",
    "register_kernel",
    "reset_kernels",
]
