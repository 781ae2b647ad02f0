"""Experts, machines and tables for tests of selection: plain data, no weights run."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from routed_experts import _core
from routed_experts.backends.spec import Backend, Cost, Spec
from routed_experts.facts import Facts
from routed_experts.problem import problem_fields

CHEAP = Cost(call_us=1.0, bytes_per_us=1e9, flops_per_us=1e9)

LOCAL = {"source": "a module registered", "source_refusal": None, "load_refusal": None}
KERNELS = {name: dict(LOCAL) for name in ("deepgemm", "deepgemm_megamoe", "sonicmoe")}

READY = {"kernels": "0.17.2", "nvidia-cutlass-dsl": "4.6.0", "apache-tvm-ffi": "0.1.10", "triton": "3.6.0"}


def make_experts(**changes: Any) -> SimpleNamespace:
    """Return what selection reads of ExpertWeights: E=8, H=256, I=128, bfloat16, gated, no storage."""
    up = torch.empty(8, 256, 256, dtype=torch.bfloat16, device="meta")
    down = torch.empty(8, 256, 128, dtype=torch.bfloat16, device="meta")
    fields: dict[str, Any] = {
        "gate_up_proj": up,
        "up_proj": None,
        "down_proj": down,
        "num_experts": 8,
        "hidden_size": 256,
        "intermediate_size": 128,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "has_gate": True,
        "is_transposed": False,
        "is_concatenated": True,
        "has_bias": False,
        "activation_name": "silu",
        "own_gate": False,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "post_expert_norm": None,
        "quantization": None,
        "_choices": {},
    }
    return SimpleNamespace(**{**fields, **changes})


def quantized(fmt: str, scale_dtype: torch.dtype, scheme: str = "dynamic", block: Any = (128, 128)) -> Any:
    """Return the fields of a Quantization."""
    return SimpleNamespace(fmt=fmt, block=block, activation_scheme=scheme, scale_dtype=scale_dtype)


def machine(capability: tuple[int, int] = (9, 0), nvcc: Any = "13.0", **changes: Any) -> Facts:
    """Return a CUDA machine with every package, or with ``changes``."""
    toolkit = {"root": "/opt/cuda", "nvcc": "/opt/cuda/bin/nvcc", "version": nvcc, "candidates": []}
    facts = Facts(
        device="cuda",
        capability=capability,
        device_name="a GPU",
        device_count=1,
        torch="2.10.0+cu130",
        python="3.12.1",
        packages=dict(READY),
        toolkit=toolkit,
        c_compiler="/usr/bin/gcc",
        python_headers="/usr/include/python3.12",
        kernels=KERNELS,
    )
    return facts.replace(**changes)


def ready(backend: Backend) -> list[Spec]:
    """Return the rows of a backend with one cost on every device."""
    return [dataclasses.replace(spec, cost={"cpu": CHEAP, "cuda": CHEAP}) for spec, _ in backend.rows]


def ask(specs: list[Spec], facts: Facts, backend: str = "auto", experts: Any = None, **changes: Any) -> Any:
    """Choose among specs that are in no registry; ``changes`` are fields of the problem."""
    problem = {
        **problem_fields(experts or make_experts()),
        "num_tokens": 8,
        "num_top_k": 2,
        "dtype": "bfloat16",
        "training": False,
        "compiling": False,
        "capturing": False,
        "expert_parallel": False,
        "process_group": False,
        "scratch_limit_bytes": 1 << 30,
        **changes,
    }
    return _core.Registry([spec.to_dict() for spec in specs]).select(facts.to_dict(), problem, backend)
