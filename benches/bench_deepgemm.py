"""Time of `deepgemm` beside transformers' own path over the same build of DeepGEMM, in one run; bfloat16 and FP8.

    python benches/bench_deepgemm.py [--deep-gemm DIR] [--tokens 512,4096,16384] [--backends deepgemm] [--json FILE]

DIR is a folder that holds the package `deep_gemm` (of vLLM's wheel: .../site-packages/vllm/third_party); without it,
the kernel comes from where a call would load it. transformers is handed the entry points of that same module, so that
what differs is the work around the products. The gate comes first: answers on memory that holds NaN are compared with
float32 (FP8: with float32 over the same stored weights), eager and as CUDA graphs, and what is too far has no time.
Candidates take turns, medians are kept; the first call of a shape compiles and is in no time.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

import routed_experts as rx
from routed_experts.bench import floor, inputs, measure, report, shapes
from routed_experts.bench.candidates import PEER, Choice, Function
from routed_experts.bench.measure import MODES, UNQUANTIZED
from routed_experts.cli.options import split, token_counts
from routed_experts.loaders import DeepGemm, load_kernel

OURS, THEIRS = "deepgemm", f"{PEER} deepgemm"
FORMATS = (UNQUANTIZED, "fp8_block")


class Layer(measure.Layer):
    """A layer whose one peer is transformers' function over DeepGEMM, on the weights that ours runs on."""

    def peers(self, tokens: int, choice: Choice) -> dict[str, Function]:
        """That function, or none with --skip-peers."""
        return {} if choice.skip_peers else {THEIRS: theirs(self.ours.weights)}

    def compare(self, tokens: int, routing: str, modes: list[str], seconds: float, choice: Choice) -> dict[str, Any]:
        """One row, with transformers' time as a multiple of each other candidate's, by mode."""
        row = self.measure(tokens, routing, modes, seconds, choice)
        row["speedup"] = {mode: speedups(row[MODES[mode][0]]) for mode in modes}
        return row


def speedups(us: dict[str, float]) -> dict[str, float]:
    """transformers' time over that of each other candidate; empty where transformers has none."""
    return {name: us[THEIRS] / time for name, time in us.items() if name != THEIRS} if THEIRS in us else {}


def kernel_of(folder: Path | None) -> DeepGemm:
    """The entry points of the `deep_gemm` in ``folder``, registered for our backend too; else of what loads here."""
    if folder is not None:
        sys.path.insert(0, str(folder))
        rx.register_kernel("deepgemm", importlib.import_module("deep_gemm"))
    return load_kernel("deepgemm")


def hand_over(kernel: DeepGemm) -> None:
    """Let transformers' deepgemm use this kernel in place of one that it would fetch."""
    from transformers.integrations import deepgemm

    given = {
        "fp8_fp4_matmul": kernel.fp8_fp4_plain,
        "grouped_fp8_fp4_matmul_nt": kernel.fp8_fp4_nt,
        "grouped_fp8_fp4_matmul_nn": kernel.fp8_fp4_nn,
        "grouped_bf16_matmul_nt": kernel.bf16_nt,
        "grouped_bf16_matmul_nn": kernel.bf16_nn,
        "per_token_cast_to_fp8": kernel.cast_to_fp8,
        "transform_sf_into_required_layout": kernel.lay_out_scales,
        "m_alignment": kernel.mk_alignment(),
    }
    # The rest of its entry points, of Mega MoE, is not called here.
    names = [field.name for field in dataclasses.fields(deepgemm.DeepGEMM)]
    deepgemm._DEEPGEMM = deepgemm.DeepGEMM(**{name: given.get(name) for name in names})


def theirs(weights: rx.ExpertWeights) -> Function:
    """transformers' deepgemm function on a module that holds these weights."""
    from transformers.integrations import finegrained_fp8, moe

    quantized = weights.quantization is not None
    functions = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS if quantized else moe.ALL_EXPERTS_FUNCTIONS
    return functools.partial(functions["deepgemm"], module_of(weights))


def module_of(weights: rx.ExpertWeights) -> Any:
    """What transformers' two functions read of a module, over the same memory."""

    def apply_gate(up: Tensor) -> Tensor:
        gate, linear = up.chunk(2, -1)
        return F.silu(gate) * linear

    module = SimpleNamespace(num_experts=weights.num_experts, has_gate=True, is_concatenated=True)
    module.has_bias = module.is_transposed = module.has_post_expert_norm = module._is_expert_parallel = False
    module.gate_up_proj, module.down_proj = weights.up_weight, weights.down_weight
    module._apply_gate = apply_gate
    if weights.quantization is not None:
        module._deepgemm_disabled, module.activation_scheme = False, "dynamic"
        module.block_size = weights.quantization.block
        module.gate_up_proj_scale_inv, module.down_proj_scale_inv = weights.up_scale, weights.down_scale
    return module


def print_row(console: Any, row: dict[str, Any]) -> None:
    """One line a candidate and mode."""
    table = Table(title=f"{report.name_of(row)}, T={row['tokens']}, {row['routing']}", min_width=76)
    for column in ("candidate", "mode", "us", "times faster", "error"):
        table.add_column(column, justify="right" if column in ("us", "times faster", "error") else "left")
    for mode, faster in row["speedup"].items():
        for name, us in row[MODES[mode][0]].items():
            table.add_row(name, mode, f"{us:.1f}", report.ratio(faster.get(name)), f"{row['error'][name]:.1e}")
    console.print(table)
    for what in ("failed", "no_eager", "no_graph"):
        for name, why in row[what].items():
            console.print(f"{name}, {what.replace('_', ' ')}: {why}", highlight=False, markup=False)


@click.command()
@click.option("--deep-gemm", type=click.Path(path_type=Path, exists=True, file_okay=False), default=None, help="DIR.")
@click.option("--shapes", "names", default="qwen3-30b", help="Comma-separated names.")
@click.option("--shape", "sizes", multiple=True, help="E,K,H,I of a shape of one's own; may be repeated.")
@click.option("--quantizations", default=",".join(FORMATS), help="none (bfloat16), fp8_block")
@click.option("--tokens", default="512,4096,16384")
@click.option("--routing", default="skewed", help="skewed, balanced")
@click.option("--backends", default=OURS, help="Ours to time: deepgemm, and others beside it.")
@click.option("--modes", default="eager,graph")
@click.option("--skip-peers", is_flag=True, help="Ours alone.")
@click.option("--seconds", default=1.0, help="Time for each row and mode, all candidates together.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=None, help="Written after every row.")
def main(deep_gemm, names, sizes, quantizations, tokens, routing, backends, modes, skip_peers, seconds, json_file):
    """Run the benchmark, on the current CUDA device."""
    counts = token_counts(tokens)
    grid = list(itertools.product(counts, split(routing, inputs.ROUTINGS)))
    modes, formats = split(modes, ("eager", "graph")), split(quantizations, FORMATS)
    choice = Choice(tuple(split(backends, (*rx.backends(), "auto"))), skip_peers, 0)
    found = shapes.chosen("" if sizes else names, sizes, "cuda")
    kernel = kernel_of(deep_gemm)
    if not skip_peers:
        hand_over(kernel)
    run_grid(kernel, list(itertools.product(found.items(), formats)), grid, modes, seconds, choice, json_file)


def run_grid(kernel, layers, grid, modes, seconds, choice, json_file, device="cuda"):
    """Measure every layer at every (T, routing); print and write each row as soon as there is one."""
    console, rows = report.terminal(), []
    setting = report.setting(device)
    setting["versions"]["deep_gemm"] = getattr(kernel.module, "__version__", None)
    ceilings = floor.measure(device, ["bfloat16"], 0.3)
    for ((name, shape), fmt), (count, kind) in itertools.product(layers, grid):
        layer = Layer(name, shape, "bfloat16", device, ceilings, quantization=fmt)
        rows.append(layer.compare(count, kind, modes, seconds, choice))
        print_row(console, rows[-1])
        del layer  # before the next one is drawn: two of the largest may not fit
        if json_file:
            json_file.write_text(json.dumps({**setting, "ceilings": ceilings.to_dict(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
