"""What each backend does under torch.compile and when it is repeated: for tests and for docs/behaviour.md."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import routed_experts as rx

DTYPES = ("float32", "bfloat16", "float16")
MODES = ("inference", "training")
REPEATS = 5
# norm(compiled - eager) / norm(eager): a graph may round products elsewhere.
_NEAR = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 4e-3}
Call = Callable[[], list[Tensor]]


def names() -> list[str]:
    """auto, and every backend that comes with the package."""
    return ["auto", *rx.backends()]


def layer(dtype: str, device: str, *, training: bool) -> tuple[rx.ExpertWeights, list[Tensor], dict[str, Tensor]]:
    """Weights, (tokens, ids, routing weights), and the weights' tensors; T=24, K=2, E=6, H=64, I=32."""
    g = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=g) * shape[-1] ** -0.5
        return drawn.to(device, getattr(torch, dtype)).requires_grad_(training)

    tensors = {"gate_up_proj": normal(6, 64, 64), "down_proj": normal(6, 64, 32)}
    index = torch.rand(24, 6, generator=g).argsort(-1)[:, :2].to(device)
    scores = torch.rand(24, 2, generator=g).to(device, getattr(torch, dtype)).requires_grad_(training)
    return rx.ExpertWeights(**tensors), [normal(24, 64), index, scores], tensors


def call(backend: str, dtype: str, device: str, mode: str, wrap: Any = lambda function: function) -> Call:
    """A call that gives its result, and in training the gradients of all that has one."""
    training = mode == "training"
    weights, inputs, tensors = layer(dtype, device, training=training)
    run = wrap(lambda x, index, scores: rx.run_experts(x, index, scores, weights, backend=backend))

    def again() -> list[Tensor]:
        if not training:
            with torch.no_grad():
                return [run(*inputs)]
        out = run(*inputs)
        wanted = [inputs[0], inputs[2], *tensors.values()]
        return [out.detach(), *torch.autograd.grad(out, wanted, torch.ones_like(out))]

    return again


def runs(backend: str, dtype: str, device: str, mode: str) -> bool:
    """Whether a backend takes this call at all."""
    weights, _, _ = layer(dtype, device, training=mode == "training")
    how = {"num_tokens": 24, "num_top_k": 2, "training": mode == "training", "backend": backend}
    try:
        rx.select_backend(weights, **how)
    except rx.RoutedExpertsError:
        return False
    return True


def compiled(backend: str, dtype: str, device: str, mode: str, how: str = "aot_eager") -> dict[str, str]:
    """``fullgraph=True`` and ``fullgraph=False`` to "yes", "declined" or the name of what was raised.

    "yes": it compiles with torch's compiler ``how``, and results and gradients are near those of plain calls.
    """
    if not runs(backend, dtype, device, mode):
        return {"fullgraph=True": "declined", "fullgraph=False": "declined"}
    wanted = call(backend, dtype, device, mode)()
    found = {}
    for fullgraph in (True, False):
        torch.compiler.reset()
        options = {"fullgraph": fullgraph, "backend": how}
        try:
            answers = _quietly(call(backend, dtype, device, mode, lambda run, o=options: torch.compile(run, **o)))
        except Exception as error:  # what is raised is what the cell says
            found[f"fullgraph={fullgraph}"] = type(error).__name__
            continue
        near = all(_distance(a, b) <= _NEAR[dtype] for a, b in zip(answers, wanted, strict=True))
        found[f"fullgraph={fullgraph}"] = "yes" if near else "wrong"
    return found


def _quietly(again: Call) -> list[Tensor]:
    """Dynamo looks at .grad of what crosses a graph break, which warns; as an error that would be its own fault."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        return again()


def repeated(backend: str, dtype: str, device: str, mode: str) -> str:
    """Whether every repeat has the same bits: "equal", "differ" or "declined"."""
    if not runs(backend, dtype, device, mode):
        return "declined"
    again = call(backend, dtype, device, mode)
    first = again()
    rest = [again() for _ in range(REPEATS)]
    same = all(torch.equal(one, other) for answers in rest for one, other in zip(first, answers, strict=True))
    return "equal" if same else "differ"


def cells(device: str) -> dict[str, Any]:
    """Every cell of both tables for one device."""
    grid = [(name, mode, dtype) for name in names() for mode in MODES for dtype in DTYPES]
    return {
        "compile": {" ".join(key): compiled(key[0], key[2], device, key[1]) for key in grid},
        "repeat": {" ".join(key): repeated(key[0], key[2], device, key[1]) for key in grid},
    }


def _distance(one: Tensor, other: Tensor) -> float:
    one, other = one.float(), other.float()
    return ((one - other).norm() / other.norm().clamp_min(1e-12)).item()
