"""Cases of the oracle grid: every factor of the contract, and a small set that covers every pair of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import torch

FACTORS = {
    "tokens": (0, 1, 3, 17, 129),
    "top_k": (0, 1, 2, 8),
    "num_experts": (1, 2, 3, 8, 60, 128),
    "sizes": ((5, 3), (8, 16), (33, 7), (16, 8)),
    "dtype": (torch.float64, torch.float32, torch.bfloat16, torch.float16),
    "gate": ("silu", "gelu", "gelu_tanh", "clamped", "oai", "own", "no gate, relu2"),
    "is_transposed": (False, True),
    "is_concatenated": (True, False),
    "bias": (False, True),
    "norm": (False, True),
    "routing": ("all here", "sentinels", "all sentinels", "one expert"),
    "index_dtype": (torch.int64, torch.int32, torch.int16, torch.uint8),
    "weights_dtype": (torch.float32, None),
    "weights_on": ("output", "input"),
    "strided": (False, True),
}


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    tokens: int
    top_k: int
    num_experts: int
    sizes: tuple[int, int]
    dtype: torch.dtype
    gate: str
    is_transposed: bool
    is_concatenated: bool
    bias: bool
    norm: bool
    routing: str
    index_dtype: torch.dtype
    weights_dtype: torch.dtype | None
    weights_on: str
    strided: bool

    def __str__(self):
        parts = (str(value).replace("torch.", "").replace(" ", "") for value in self.__dict__.values())
        return "-".join(parts)


BASE_CASE = Case(
    tokens=17,
    top_k=2,
    num_experts=8,
    sizes=(64, 32),
    dtype=torch.bfloat16,
    gate="silu",
    is_transposed=False,
    is_concatenated=True,
    bias=False,
    norm=False,
    routing="all here",
    index_dtype=torch.int64,
    weights_dtype=torch.float32,
    weights_on="output",
    strided=False,
)


def own_gate(u):
    """A softcapped gate on interleaved columns: nothing the package knows."""
    return torch.tanh(u[..., 0::2]) * u[..., 1::2] + 0.25 * u[..., 0::2]


def rms_norm(d):
    return d * torch.rsqrt(
        d.square().mean(-1, keepdim=True) + 0.5
    )  # a small eps would magnify the rounding of small rows


CROSSED = (
    "tokens",
    "top_k",
    "num_experts",
    "sizes",
    "dtype",
    "gate",
    "is_transposed",
    "is_concatenated",
    "bias",
    "norm",
)


def full_grid(part, parts):
    """Every ``parts``-th combination of sizes, dtypes and flags; what is left of the factors is drawn for each."""
    combinations = itertools.product(*(FACTORS[name] for name in CROSSED))
    rng = random.Random(part)
    for values in itertools.islice(combinations, part, None, parts):
        drawn = {name: rng.choice(choices) for name, choices in FACTORS.items() if name not in CROSSED}
        yield Case(**dict(zip(CROSSED, values, strict=True)), **drawn)


def pairwise(seed=0):
    """Cases that together hold every pair of values of every two factors (greedy, best of some random tries)."""
    rng = random.Random(seed)
    names = list(FACTORS)
    uncovered = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]}
    cases = []
    while uncovered:
        best, best_pairs = None, set()
        a, x, b, y = sorted(uncovered, key=str)[0]
        for _ in range(40):
            values = {name: rng.choice(FACTORS[name]) for name in names} | {a: x, b: y}
            pairs = {(p, values[p], q, values[q]) for p, q in itertools.combinations(names, 2)} & uncovered
            if len(pairs) > len(best_pairs):
                best, best_pairs = values, pairs
        cases.append(Case(**best))
        uncovered -= best_pairs
    return cases


def build(case, seed=0):
    """Return (x, index, weights, tensors, flags) of a case, inputs of unit scale and weights of unit gain."""
    g = torch.Generator().manual_seed(seed)
    experts, (hidden, inner) = case.num_experts, case.sizes
    is_gated = case.gate != "no gate, relu2"
    width = 2 * inner if is_gated else inner

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, dtype=torch.float64).mul(scale).to(case.dtype)

    def matrix(rows, columns):
        shape = (experts, columns, rows) if case.is_transposed else (experts, rows, columns)
        weight = normal(*shape, scale=columns**-0.5)
        return weight.transpose(1, 2).contiguous().transpose(1, 2) if case.strided else weight

    up_name = "gate_up_proj" if is_gated else "up_proj"
    tensors = {up_name: matrix(width, hidden), "down_proj": matrix(hidden, inner)}
    if case.bias:
        biases = {up_name + "_bias": width, "down_proj_bias": hidden}
        tensors |= {name: normal(experts, size, scale=0.3) for name, size in biases.items()}
    flags = {"is_transposed": case.is_transposed, "is_concatenated": case.is_concatenated} | _gate_flags(case.gate)
    if case.norm:
        flags["post_expert_norm"] = rms_norm
    x = normal(case.tokens, 2 * hidden)[:, ::2] if case.strided else normal(case.tokens, hidden)
    index = _route(case, g).to(case.index_dtype)
    # Positive, as a router's are: slots of opposite sign cancel, and the error is taken relative to what is left.
    weights = 0.1 + torch.rand(case.tokens, case.top_k, generator=g, dtype=torch.float64)
    weights = weights.to(case.weights_dtype or case.dtype)
    if case.strided:
        index, weights = index.t().contiguous().t(), weights.t().contiguous().t()
    return x, index, weights, tensors, flags


def _gate_flags(gate):
    return {
        "silu": {"activation": "silu"},
        "gelu": {"activation": "gelu"},
        "gelu_tanh": {"activation": "gelu_tanh"},
        "clamped": {"swiglu_limit": 0.75},
        "oai": {"swiglu_limit": 0.75, "swiglu_alpha": 1.702},
        "own": {"gate": own_gate},
        "no gate, relu2": {"activation": "relu2"},
    }[gate]


def _route(case, g):
    experts, shape = case.num_experts, (case.tokens, case.top_k)
    index = torch.randint(0, experts, shape, generator=g)
    if case.routing == "one expert":
        return torch.full(shape, experts - 1)
    if case.routing == "all here":
        return index
    outside = (
        experts if case.index_dtype == torch.uint8 else torch.where(torch.rand(shape, generator=g) < 0.5, -1, experts)
    )
    outside = torch.as_tensor(outside).expand(shape)
    gone = torch.rand(shape, generator=g) < (0.4 if case.routing == "sentinels" else 2.0)
    return torch.where(gone, outside, index)
