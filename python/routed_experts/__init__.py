"""Run the experts of a Mixture-of-Experts layer through interchangeable backends.

Given a router's output, ``run_experts`` runs the experts of an MoE layer on the backend that fits the call best,
or on the one that was asked for; ``select_backend`` says which, and why. Importing touches no device and no
optional package.
"""

from routed_experts import parallel, quantization
from routed_experts._core import __version__
from routed_experts.backends.registry import ExpertsInterface, backends, register_backend, unregister_backend
from routed_experts.backends.spec import Backend, Cost, Spec
from routed_experts.decorator import use_experts_implementation
from routed_experts.errors import (
    BackendUnavailable,
    CheckpointError,
    DeviceError,
    DtypeError,
    ExpertIndexError,
    GradientUnsupported,
    LayoutError,
    RoutedExpertsError,
    SwitchError,
    UnknownBackend,
    UnsupportedExperts,
    UnsupportedScales,
    UnsupportedScheme,
)
from routed_experts.facts import Facts, current_facts
from routed_experts.layout import ExpertLayout, build_layout
from routed_experts.loaders import register_kernel, reset_kernels
from routed_experts.models import decode_stage, get_experts_implementation, set_experts_implementation
from routed_experts.modules import RoutedExperts
from routed_experts.moe import run_experts
from routed_experts.quantization import Quantization
from routed_experts.quantization.experts import quantize_experts
from routed_experts.selection import Decision, Selection, select_backend
from routed_experts.transformers_integration import register_with_transformers, unregister_from_transformers
from routed_experts.weights import ExpertWeights

__all__ = [
    "Backend",
    "BackendUnavailable",
    "CheckpointError",
    "Cost",
    "Decision",
    "DeviceError",
    "DtypeError",
    "ExpertIndexError",
    "ExpertLayout",
    "ExpertWeights",
    "ExpertsInterface",
    "Facts",
    "GradientUnsupported",
    "LayoutError",
    "Quantization",
    "RoutedExperts",
    "RoutedExpertsError",
    "Selection",
    "Spec",
    "SwitchError",
    "UnknownBackend",
    "UnsupportedExperts",
    "UnsupportedScales",
    "UnsupportedScheme",
    "__version__",
    "backends",
    "build_layout",
    "current_facts",
    "decode_stage",
    "get_experts_implementation",
    "parallel",
    "quantization",
    "quantize_experts",
    "register_backend",
    "register_kernel",
    "register_with_transformers",
    "reset_kernels",
    "run_experts",
    "select_backend",
    "set_experts_implementation",
    "unregister_backend",
    "unregister_from_transformers",
    "use_experts_implementation",
]
