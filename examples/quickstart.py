"""Run the experts of a real transformers MoE checkpoint through every backend of this machine.

What happens, in order:

1. transformers makes a small Qwen3-MoE model with random weights and saves it with ``save_pretrained``, in a
   temporary folder or in ``--out DIR``.
2. The model reads a sentence, a token a byte. Hooks keep what reaches the experts of two layers: the hidden
   states, the experts that the router chose, and their weights.
3. The experts of layer 0 are taken from the module in memory, those of layer 1 from the folder on disk.
4. Every backend computes both layers. A plain loop in float64 says what is right.

One table gives each backend's median time for layer 1 and its error against float64 on both layers (largest
difference over largest output); another says why a backend does not run here and what would change that. The
exit status is 1 if a backend that runs is outside the tolerance of its dtype.

    python examples/quickstart.py
    python examples/quickstart.py --dtype bfloat16 --out /tmp/tiny-moe
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table

import routed_experts as rx

TEXT = "Every token is sent to a few experts; the others stay asleep, and cost nothing but memory. "
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


class Routed(NamedTuple):
    """What reaches the experts of one layer: T tokens of width H, K experts each."""

    hidden_states: torch.Tensor  # (T, H)
    top_k_index: torch.Tensor  # (T, K)
    top_k_weights: torch.Tensor  # (T, K)


def make_checkpoint(folder: Path, dtype: torch.dtype) -> transformers.Qwen3MoeForCausalLM:
    """Save a small Qwen3-MoE with random weights in ``folder`` and return the model."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.1,
    )
    model = transformers.Qwen3MoeForCausalLM(config).to(dtype).eval()
    model.save_pretrained(folder)
    return model


def record(model: transformers.Qwen3MoeForCausalLM, tokens: int) -> list[Routed]:
    """Let the model read ``tokens`` bytes of text; return what reached the experts of each layer."""
    calls: list[Routed] = []
    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(lambda _, arguments: calls.append(Routed(*arguments)))
    text = (TEXT * (tokens // len(TEXT) + 1))[:tokens]
    model(input_ids=torch.tensor([list(text.encode())], device=model.device), use_cache=False)
    return calls


def in_float64(experts: rx.ExpertWeights, call: Routed) -> torch.Tensor:
    """Return the (T, H) answer in float64: each token, each of its experts, one after the other."""
    gate_up, down = experts.gate_up_proj.double(), experts.down_proj.double()
    out = torch.zeros_like(call.hidden_states, dtype=torch.float64)
    for token, hidden in enumerate(call.hidden_states.double()):
        for expert, weight in zip(call.top_k_index[token], call.top_k_weights[token].double(), strict=True):
            gate, up = (gate_up[expert] @ hidden).chunk(2)
            out[token] += weight * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


def median_ms(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Return the median time of ``run`` in milliseconds, over half a second or at least 5 calls."""
    times: list[float] = []
    run()
    while len(times) < 5 or (sum(times) < 500 and len(times) < 200):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return median(times)


def compare(layers: list[tuple[rx.ExpertWeights, Routed]], tolerance: float, console: Console) -> bool:
    """Print what each backend gives or why it does not run; return whether all answers are good."""
    truth = [in_float64(experts, call) for experts, call in layers]
    experts, call = layers[-1]
    tokens, top_k = call.top_k_index.shape
    selection = rx.select_backend(experts, num_tokens=tokens, num_top_k=top_k, dtype=call.hidden_states.dtype)
    runs = Table("backend", "time", "error, from_module", "error, from_checkpoint")
    refused = Table("not here", "found", "needed", "what to do")
    good = True
    for decision in selection.decisions:
        name = decision.backend
        if not decision.accepted:
            refused.add_row(name, decision.found, decision.needed, decision.hint)
            continue
        cells = [f"{median_ms(partial(rx.run_experts, *call, experts, backend=name), experts.device):.3f} ms"]
        for (weights, routed), right in zip(layers, truth, strict=True):
            answer = rx.run_experts(*routed, weights, backend=name)
            error = float((answer.double() - right).abs().max() / right.abs().max())
            inside = error <= tolerance
            good &= inside
            cells.append(f"{error:.1e}" if inside else f"[bold red]{error:.1e} > {tolerance:.1e}[/]")
        runs.add_row(name, *cells)
    console.print(runs, refused if refused.rows else "Every backend runs here.")
    console.print(f"auto takes [bold]{selection.name}[/] for {tokens} tokens, {top_k} experts each.")
    return good


@torch.no_grad()
def main() -> int:
    """Make the model, route real hidden states, compare; 0 if every backend that runs is right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to keep the checkpoint in")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        model = make_checkpoint(folder, getattr(torch, options.dtype)).to(options.device)
        first, second = record(model, options.tokens)
        layers = [
            (rx.ExpertWeights.from_module(model.model.layers[0].mlp.experts), first),
            (rx.ExpertWeights.from_checkpoint(folder, layer=1, device=options.device), second),
        ]
        # Into a file or a pipe, rich would fold the tables at 80 columns.
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(f"Qwen3-MoE, {options.dtype}, on {options.device}; checkpoint in {folder}")
        good = compare(layers, TOLERANCE[options.dtype], console)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
