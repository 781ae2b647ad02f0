"""What a family's model computes, as named tensors, and how two runs of it are compared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import routed_experts as rx
from routed_experts.parts import parts_of

TOKENS = torch.arange(24).reshape(2, 12) % 59 + 3
# Relative to the largest value. Outputs are below 5, so theirs is within 1e-4.
OUTPUT, GRADIENT = 2e-5, 1e-4
NAMED = {"eager", "batched_mm", "grouped_mm"}


def run(model: nn.Module) -> dict[str, Tensor]:
    """What every experts module gives, logits (or last hidden states), and gradients by parameter."""
    experts = {found.path: found.module for found in parts_of(model).experts()}
    assert experts, "no experts in this model"
    embeddings = model.get_input_embeddings().weight
    leaves = {n: p for n, p in model.named_parameters() if p is embeddings or n.rpartition(".")[0] in experts}
    with recorded(experts) as results:
        results["output"] = output = model(input_ids=TOKENS)[0]
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    # Experts of another modality take no part in a text.
    grads = torch.autograd.grad((output * noise).sum(), list(leaves.values()), allow_unused=True)
    results |= {name: grad for name, grad in zip(leaves, grads, strict=True) if grad is not None}
    return {name: result.detach() for name, result in results.items()}


@contextmanager
def recorded(experts: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Collect what experts return, by path."""
    results: dict[str, Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda _m, _args, out, path=path: results.update({path: out}))
        for path, module in experts.items()
    ]
    try:
        yield results
    finally:
        for hook in hooks:
            hook.remove()


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor, relative to its largest value."""
    assert found.keys() == wanted.keys()
    return {name: error(found[name], wanted[name]) for name in wanted}


def error(found: Tensor, wanted: Tensor) -> float:
    size = wanted.abs().max().item()
    assert size > 0, "nothing to compare"
    assert found.isfinite().all()
    return (found - wanted).abs().max().item() / size


def backends_for(module: nn.Module, num_top_k: int = 2) -> list[str]:
    """Every backend that can train these experts here, and ``auto``."""
    chosen = rx.select_backend(module, num_tokens=24, num_top_k=num_top_k, training=True)
    names = {decision.backend for decision in chosen.decisions if decision.accepted}
    assert names >= NAMED
    return ["auto", *sorted(names)]


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Outputs and gradients alike, within the tolerance of each."""
    wrong = {name: value for name, value in errors(found, wanted).items() if value > tolerance(name)}
    assert not wrong


def tolerance(name: str) -> float:
    """Parameters end in their own name; what modules return has the module's path, or is the output."""
    return GRADIENT if name.endswith(("weight", "proj", "bias")) else OUTPUT


@contextmanager
def scaled(modules: list[nn.Module], share: float) -> Iterator[None]:
    """Multiply a share of the columns that experts return by 1.05."""

    def scale(_module: nn.Module, _args: object, out: Tensor) -> Tensor:
        factor = torch.ones(out.shape[-1])
        factor[: int(share * out.shape[-1])] = 1.05
        return out * factor

    hooks = [module.register_forward_hook(scale) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
