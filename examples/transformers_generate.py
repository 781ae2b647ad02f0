"""Generate text with a transformers MoE model, its experts on one backend after the other.

What happens, in order:

1. transformers makes a small Qwen3-MoE model with random weights and saves it with ``save_pretrained``, in a
   temporary folder or in ``--out DIR``.
2. ``rx.register_with_transformers()`` adds our names to those that transformers knows, and the checkpoint is loaded
   with ``experts_implementation="routed_experts"``: each call then runs on the cheapest backend.
3. ``model.set_experts_implementation("routed_experts_NAME")`` puts the same model on every backend of this machine,
   and on transformers' own functions, which are ``eager`` and ``grouped_mm``.
4. Each generates the same number of tokens after the same prompt, the likeliest token every time.

One table gives the tokens per second, whether the tokens are those of transformers' eager loop, and how far the logits
behind them are from eager's (largest difference over largest logit); another says why a backend does not run here. The
exit status is 1 if any token differs or logits are further off than ``TOLERANCE``. All of it is in float32: bfloat16
keeps 3 digits, and two backends that both round well may then part where two tokens are about as likely.

    python examples/transformers_generate.py
    python examples/transformers_generate.py --new-tokens 200 --out /tmp/tiny-moe
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table

import routed_experts as rx

TOLERANCE = 1e-4
PROMPT = "Every token is sent to a few experts; the others stay asleep. "


def make_checkpoint(folder: Path) -> None:
    """Save a small Qwen3-MoE with random float32 weights, a token a byte."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.1,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)


def names_here(model: transformers.PreTrainedModel) -> tuple[list[str], list[rx.Decision]]:
    """Return the names inside transformers of all that runs ``model`` here, and the decisions against the rest."""
    experts = rx.ExpertWeights.from_module(model.model.layers[0].mlp.experts)
    slots = model.config.num_experts_per_tok
    decisions = rx.select_backend(experts, num_tokens=1, num_top_k=slots).decisions
    ours = [f"routed_experts_{decision.backend}" for decision in decisions if decision.accepted]
    refused = [decision for decision in decisions if not decision.accepted]
    return ["eager", "grouped_mm", "routed_experts", *ours], refused


class Answer(NamedTuple):
    """What followed the prompt: N tokens, of a vocabulary of V."""

    tokens: list[int]
    logits: torch.Tensor  # (N, V)
    rate: float  # tokens a second


def generate(model: transformers.PreTrainedModel, count: int, repeats: int) -> Answer:
    """Generate ``count`` tokens after the prompt; the rate is the median of the repeats."""
    prompt = torch.tensor([list(PROMPT.encode())], device=model.device)
    settings = {"do_sample": False, "min_new_tokens": count, "max_new_tokens": count, "pad_token_id": 0}
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    rates: list[float] = []
    # The first time also chooses backends and fills caches; it is not counted.
    for _ in range(1 + repeats):
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        tokens = out.sequences[0, prompt.shape[1] :].tolist()
        rates.append(count / (time.perf_counter() - start))
    return Answer(tokens, torch.cat(out.logits), median(rates[1:]))


def compare(answer: Answer, eager: Answer) -> tuple[bool, str, str]:
    """Return whether an answer is eager's, and the table's cells for its tokens and its logits."""
    unequal = [i for i, (ours, theirs) in enumerate(zip(answer.tokens, eager.tokens, strict=True)) if ours != theirs]
    tokens = f"[bold red]no, from token {unequal[0]} on[/]" if unequal else "yes"
    apart = float((answer.logits - eager.logits).abs().max() / eager.logits.abs().max())
    near = apart <= TOLERANCE
    return near and not unequal, tokens, f"{apart:.1e}" if near else f"[bold red]{apart:.1e} > {TOLERANCE:.0e}[/]"


def run_all(model: transformers.PreTrainedModel, count: int, repeats: int, console: Console) -> bool:
    """Generate on everything that runs here; print the tables; return whether all answers are eager's."""
    names, refused = names_here(model)
    table = Table("experts_implementation", "tokens/s", "tokens of eager", "logits, difference")
    answers: list[Answer] = []
    good = True
    for name in names:
        model.set_experts_implementation(name)
        answers.append(generate(model, count, repeats))
        equal, *cells = compare(answers[-1], answers[0])
        good &= equal
        table.add_row(name, f"{answers[-1].rate:.0f}", *cells)
    console.print(table)
    if refused:
        missing = Table("not here", "found", "needed", "what to do")
        for decision in refused:
            missing.add_row(decision.backend, decision.found, decision.needed, decision.hint)
        console.print(missing)
    return good


def main() -> int:
    """Make the checkpoint, load it, generate with each; 0 if all answers are eager's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to keep the checkpoint in")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    rx.register_with_transformers()
    # Into a file or a pipe, rich would fold the tables at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        make_checkpoint(folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="routed_experts"
        ).to(options.device)
        console.print(f"Qwen3-MoE from {folder} on {options.device}; experts on {rx.get_experts_implementation(model)}")
        good = run_all(model, options.new_tokens, options.repeats, console)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
