"""What a user of generate feels: prefill and decode of a transformers model, per experts implementation, in one run.

    python benches/bench_generate.py [--implementations grouped_mm,routed_experts,nothing] [--passes 2] [--json FILE]

The model has the sizes of Qwen3-30B-A3B, fewer layers and random weights. ``nothing`` returns its input: what is left
of a step without any experts, and so the most that experts can gain.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.integrations import moe

import routed_experts as rx

CASES = ((1, 32), (8, 32), (1, 4096))  # batch, prompt
STEPS = 48


def make_model(layers: int, device: str) -> Any:
    """A model of random weights that never ends a text by itself."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
        norm_topk_prob=True,
        max_position_embeddings=8192,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def seconds(model: Any, ids: torch.Tensor, steps: int) -> float:
    """Seconds of generating so many tokens."""

    def wait() -> float:
        if ids.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    start = wait()
    model.generate(ids, max_new_tokens=steps, min_new_tokens=steps, do_sample=False)
    return wait() - start


def measure(model: Any, name: str, batch: int, prompt: int, device: str) -> dict[str, Any]:
    """Medians of three: prefill, and the rate of decoding behind a short prompt."""
    model.set_experts_implementation(name)
    ids = torch.randint(0, 150000, (batch, prompt), device=device)
    with torch.inference_mode():
        seconds(model, ids, 4)
        rounds = [(seconds(model, ids, 1), seconds(model, ids, STEPS + 1) if prompt < 100 else None) for _ in range(3)]
    prefill = statistics.median(first for first, _ in rounds)
    row = {"implementation": name, "batch": batch, "prompt": prompt, "prefill_ms": prefill * 1e3}
    if prompt < 100:
        decode = statistics.median(whole - first for first, whole in rounds if whole is not None)
        row["tokens_per_s"] = batch * STEPS / decode
    return row


@click.command()
@click.option("--implementations", default="grouped_mm,routed_experts,nothing")
@click.option("--layers", default=12)
@click.option("--passes", default=2, help="Every implementation takes its turn so often.")
@click.option("--device", default="cuda")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None)
def main(implementations: str, layers: int, passes: int, device: str, json_file: Path | None) -> None:
    """Run the benchmark."""
    if device == "cuda" and not torch.cuda.is_available():
        Console().print("needs a CUDA device; --device cpu takes 14 GB and minutes")
        return
    rx.register_with_transformers()
    moe.ExpertsInterface.register("nothing", lambda module, hidden_states, *routing, **rest: hidden_states)
    model = make_model(layers, device)
    names = implementations.split(",") * passes
    rows = [measure(model, name, batch, prompt, device) for name in names for batch, prompt in CASES]
    table = Table("implementation", "batch", "prompt", "prefill ms", "tokens/s")
    for row in rows:
        rate = f"{row['tokens_per_s']:.1f}" if "tokens_per_s" in row else ""
        table.add_row(row["implementation"], str(row["batch"]), str(row["prompt"]), f"{row['prefill_ms']:.1f}", rate)
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
