"""Arguments of the wrong kind: an error of this package, with found, needed and hint."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import routed_experts as rx
from routed_experts import errors

SOURCE = Path(rx.__file__).parent
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type)} - {"RoutedExpertsError", "Any"}

X, INDEX, WEIGHTS = torch.randn(5, 8), torch.zeros(5, 2, dtype=torch.long), torch.ones(5, 2)
EXPERTS = rx.ExpertWeights(gate_up_proj=torch.randn(4, 12, 8), down_proj=torch.randn(4, 8, 6))


def refusals():
    for file in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                yield f"{file.relative_to(SOURCE)}:{node.lineno}", {keyword.arg for keyword in node.keywords}


def test_every_refusal_in_the_code_says_found_needed_and_hint():
    found = dict(refusals())
    assert len(found) > 60
    assert {where: keys for where, keys in found.items() if not {"found", "needed", "hint"} <= keys} == {}


def select(**changes):
    return lambda: rx.select_backend(EXPERTS, **{"num_tokens": 3, **changes})


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: rx.run_experts(X, INDEX, WEIGHTS, EXPERTS, backend=3), rx.DtypeError),
        (lambda: rx.run_experts(X, INDEX, WEIGHTS, EXPERTS, backend=["eager"]), rx.DtypeError),
        (lambda: rx.run_experts(X, INDEX, WEIGHTS, None), rx.LayoutError),
        (select(backend=3), rx.DtypeError),
        (select(num_tokens=2.5), rx.LayoutError),
        (select(num_tokens=None), rx.LayoutError),
        (select(num_tokens=2**70), rx.LayoutError),
        (select(num_top_k="2"), rx.LayoutError),
        (select(dtype="float32"), rx.DtypeError),
        (select(dtype=torch.int32), rx.DtypeError),
        (select(device="gpu"), rx.DeviceError),
        (select(facts={}), rx.DtypeError),
        (lambda: rx.current_facts("gpu"), rx.DeviceError),
        (lambda: rx.build_layout(INDEX, 2.5), rx.DtypeError),
        (lambda: rx.build_layout(INDEX, 2, alignment=None), rx.DtypeError),
        (lambda: rx.get_experts_implementation(None), rx.DtypeError),
        (lambda: rx.set_experts_implementation("model", "eager"), rx.DtypeError),
        (lambda: rx.RoutedExperts(2, 2, 2, dtype="float32"), rx.DtypeError),
        (lambda: rx.unregister_backend(3), rx.UnknownBackend),
    ],
)
def test_arguments_of_the_wrong_kind(call, error):
    with pytest.raises(error) as caught:
        call()
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint


@pytest.mark.parametrize("backend", ["eager", "batched_mm", "grouped_mm"])
def test_more_pairs_than_an_int32_counts_are_refused_before_anything_is_allocated(backend):
    index = torch.zeros(1, 1, dtype=torch.uint8).expand(2**16, 2**15)
    with pytest.raises(rx.LayoutError, match="int32"):
        rx.run_experts(X[:1].expand(2**16, 8), index, WEIGHTS[:1, :1].expand(2**16, 2**15), EXPERTS, backend=backend)


@pytest.mark.parametrize("backend", ["eager", "batched_mm", "grouped_mm"])
def test_a_gradient_of_nan_stops_at_a_sentinel(backend):
    """A sentinel's gradient is 0 whatever arrives at its token."""
    x, w = X.clone().requires_grad_(), WEIGHTS.clone().requires_grad_()
    index = INDEX.clone()
    index[0] = -1
    module = rx.RoutedExperts(4, 8, 6, experts_implementation=backend)
    grad = torch.ones(5, 8)
    grad[0] = float("nan")
    module(x, index, w).backward(grad)
    assert w.grad[0].tolist() == [0, 0]
    assert x.grad[0].count_nonzero() == 0
    assert all(leaf.grad.isfinite().all() for leaf in (x, w, *module.parameters()))


def test_a_module_that_is_no_experts():
    with pytest.raises(rx.LayoutError) as caught:
        rx.select_backend(nn.Linear(2, 2), num_tokens=1)
    assert "experts" in caught.value.hint


def test_a_huge_budget_is_a_budget(monkeypatch):
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", "9" * 30)
    out = rx.run_experts(X, INDEX, WEIGHTS, EXPERTS, backend="batched_mm")
    torch.testing.assert_close(out, rx.run_experts(X, INDEX, WEIGHTS, EXPERTS, backend="eager"))
