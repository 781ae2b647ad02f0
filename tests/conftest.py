from __future__ import annotations

import os

import pytest
import torch

# Times that were measured on this machine must not decide what a test sees.
os.environ["ROUTED_EXPERTS_CACHE"] = os.devnull

# Triton chooses its interpreter when a kernel is defined, so this comes before any module of kernels.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def poisoned(monkeypatch):
    """Fill every tensor that code asks for uninitialised with NaN, and leave NaN behind in freed memory.

    Bytes are scratch memory that is cut into typed pieces: all bits set is NaN in each of them.
    """

    def poison(tensor):
        if tensor.dtype == torch.uint8:
            return tensor.fill_(255)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, _original=original, **k: poison(_original(*a, **k)))

    def leave_nan_behind():
        for power in range(6, 22):
            for _ in range(3):
                torch.full((2**power,), float("nan"))

    return leave_nan_behind


@pytest.fixture
def registered():
    """Our names in transformers, for one test."""
    import routed_experts as rx

    rx.register_with_transformers()
    yield
    rx.unregister_from_transformers()


@pytest.fixture
def asked(monkeypatch):
    """The backends that modules ask for, call by call."""
    from routed_experts import calling

    names: list[str] = []
    run = calling.run_experts

    def record(*args, backend, **kwargs):
        names.append(backend)
        return run(*args, backend=backend, **kwargs)

    monkeypatch.setattr(calling, "run_experts", record)
    return names
