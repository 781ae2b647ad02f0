"""Train a small Qwen3-MoE on real text, with several backends side by side, and keep what its router learned.

What happens, in order:

1. The text is the source of this Python's standard library, a token a byte, so nothing is downloaded. One file in
   ten is held out.
2. One model per backend and one on transformers' own eager loop start from the same weights, and take every step on
   the same batch. The losses must agree: at each step they may differ by ``TOLERANCE`` of eager's at most.
3. The table gives the first and last losses, the largest difference and the time a step took. Then the model of the
   first backend reads held-out text: its checkpoint goes to ``--out``, the routing of one layer to ``--record``.

The recorded file is safetensors: ``top_k_index`` (T, K) int64, ``top_k_weights`` (T, K) float32, ``hidden_states``
(T, H) float32, and the metadata ``num_experts``, ``layer``, ``steps``. No loss balances the experts here, so some get
several times their share of the tokens: routing as tests and benchmarks should see it.

The exit status is 1 if the loss did not fall or a backend's left eager's.

    python examples/train_tiny_moe.py
    python examples/train_tiny_moe.py --backends grouped_mm --seconds 300 --out tiny-moe --record routing.safetensors
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from safetensors.torch import save_file

import routed_experts as rx

EAGER = "transformers' eager"
# A thousand steps leave the losses within 1e-6. What a longer run may bring is a token whose experts tie: rounding
# then decides which one it goes to, and the models are no longer the same.
TOLERANCE = 1e-5
BATCH, LENGTH = 8, 64
WARM_UP, LEARNING_RATE, EPSILON = 20, 1e-3, 1e-4


@dataclass
class Run:
    """One model in training, and what it showed so far."""

    name: str
    model: transformers.Qwen3MoeForCausalLM
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0


def read_sources() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of the standard library's modules: those to train on, and those held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    contents = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in files]
    held_out = contents[::10]
    del contents[::10]
    return np.concatenate(contents), np.concatenate(held_out)


def batches(text: np.ndarray, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield (BATCH, LENGTH) windows of the text, at random places that the seed fixes."""
    places = np.random.default_rng(0)
    while True:
        starts = places.integers(0, len(text) - LENGTH, size=BATCH)
        yield torch.from_numpy(np.stack([text[s : s + LENGTH] for s in starts])).long().to(device)


def make_run(name: str, implementation: str, device: torch.device) -> Run:
    """Build the model on an implementation; the same weights every time."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.05,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation)
    model.to(device).train()
    # Adam divides a gradient by its usual size. Where that is next to nothing, rounding would become a full step: at
    # the usual epsilon of 1e-8 the losses part after some fifty steps. This one leaves such weights alone.
    return Run(name, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON))


def take_step(run: Run, tokens: torch.Tensor) -> None:
    """Train on one batch."""
    start = time.perf_counter()
    warm = min(1.0, (len(run.losses) + 1) / WARM_UP)
    for group in run.optimizer.param_groups:
        group["lr"] = LEARNING_RATE * warm
    loss = run.model(input_ids=tokens, labels=tokens, use_cache=False).loss
    run.optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.losses.append(loss.item())
    run.seconds += time.perf_counter() - start


def difference(run: Run, eager: Run) -> float:
    """Return the largest difference of a loss from eager's at the same step, over eager's."""
    return max(abs(ours - theirs) / theirs for ours, theirs in zip(run.losses, eager.losses, strict=True))


def train(runs: list[Run], text: np.ndarray, steps: int | None, seconds: float, console: Console) -> None:
    """Train all side by side until the steps are done, or the time is over."""
    start = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps or seconds)
        for step, tokens in enumerate(batches(text, runs[0].model.device), start=1):
            for run in runs:
                take_step(run, tokens)
            spent = time.monotonic() - start
            label = f"step {step}, loss {runs[0].losses[-1]:.3f}"
            progress.update(task, completed=step if steps else spent, description=label)
            if step >= steps if steps else spent >= seconds:
                return


def level(losses: list[float], end: bool) -> float:
    """Return the mean of the first or last tenth of the losses."""
    count = max(1, len(losses) // 10)
    return float(np.mean(losses[-count:] if end else losses[:count]))


def report(eager: Run, runs: list[Run], console: Console) -> bool:
    """Print the table; return whether the loss fell and every run's is eager's."""
    table = Table("experts on", "loss, first tenth", "loss, last tenth", "largest difference", "time a step")
    good = True
    for run in [eager, *runs]:
        apart, first, last = difference(run, eager), level(run.losses, end=False), level(run.losses, end=True)
        fell, equal = last < first, apart <= TOLERANCE
        good &= fell and equal
        table.add_row(
            run.name,
            f"{first:.3f}",
            f"{last:.3f}" if fell else f"[bold red]{last:.3f}, not lower[/]",
            f"{apart:.1e}" if equal else f"[bold red]{apart:.1e} > {TOLERANCE:.0e}[/]",
            f"{run.seconds / len(run.losses) * 1e3:.1f} ms",
        )
    console.print(table)
    return good


@torch.no_grad()
def record(run: Run, text: np.ndarray, layer: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return what reaches the experts of a layer while the model reads text it has not seen."""
    calls: list[tuple[torch.Tensor, ...]] = []
    experts = run.model.model.layers[layer].mlp.experts
    hook = experts.register_forward_pre_hook(lambda _, arguments: calls.append(arguments))
    rows = torch.from_numpy(text[: max(1, tokens // LENGTH) * LENGTH].copy()).long().reshape(-1, LENGTH)
    for row in rows.split(BATCH):
        run.model(input_ids=row.to(run.model.device), use_cache=False)
    hook.remove()
    names = ("hidden_states", "top_k_index", "top_k_weights")
    return {name: torch.cat(parts).cpu() for name, parts in zip(names, zip(*calls, strict=True), strict=True)}


def describe(routing: dict[str, torch.Tensor], num_experts: int) -> str:
    """Say how unevenly the tokens went to the experts."""
    counts = routing["top_k_index"].flatten().bincount(minlength=num_experts)
    share = counts.max().item() * num_experts / counts.sum().item()
    return f"the busiest of {num_experts} experts gets {share:.1f} times its share, the idlest {counts.min()} tokens"


def main() -> int:
    """Train, compare, save, record; 0 if the loss fell and every backend's is eager's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="grouped_mm,batched_mm,eager", help="names of ours, with commas between")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to train, all models together")
    parser.add_argument("--steps", type=int, help="how many steps to take, instead of --seconds")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--out", type=Path, help="folder for the checkpoint of the first backend's model")
    parser.add_argument("--record", type=Path, help="safetensors file for the routing of one layer")
    parser.add_argument("--record-layer", type=int, default=1)
    parser.add_argument("--record-tokens", type=int, default=4096)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    # Work this small is done before a second thread has woken; and one thread rounds alike on every machine.
    torch.set_num_threads(1)
    rx.register_with_transformers()

    console = Console(width=None if sys.stdout.isatty() else 140)
    text, held_out = read_sources()
    eager = make_run(EAGER, "eager", options.device)
    runs = [make_run(name, f"routed_experts_{name}", options.device) for name in options.backends.split(",")]
    train([eager, *runs], text, options.steps, options.seconds, console)
    good = report(eager, runs, console)
    routing = record(runs[0], held_out, options.record_layer, options.record_tokens)
    num_experts = runs[0].model.config.num_experts
    console.print(f"Layer {options.record_layer} on held-out text: {describe(routing, num_experts)}.")
    if options.record:
        facts = {"num_experts": num_experts, "layer": options.record_layer, "steps": len(eager.losses)}
        save_file(routing, options.record, {key: str(value) for key, value in facts.items()})
        console.print(f"Routing in {options.record}")
    if options.out:
        runs[0].model.save_pretrained(options.out)
        console.print(f"Checkpoint in {options.out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
