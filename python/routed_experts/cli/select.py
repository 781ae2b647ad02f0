"""``routed-experts select``: explain which backend a shape or a checkpoint gets, and why not the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from click.core import ParameterSource

import routed_experts as rx
from routed_experts.cli.output import (
    Command,
    duration,
    json_option,
    make_table,
    open_console,
    print_json,
    print_section,
    reasons,
    verdict,
)
from routed_experts.facts import Facts, current_facts

_LAYOUT = ("has_gate", "transposed", "interleaved", "bias", "activation")
_DTYPES = ("float64", "float32", "bfloat16", "float16")


class Numbers(click.ParamType):
    """Numbers with a separator between them, such as ``128,8,2048,768``."""

    def __init__(self, name: str, separator: str, labels: str) -> None:
        self.name = name
        self.separator = separator
        self.labels = labels.split(separator)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers, none of them negative."""
        if isinstance(value, tuple):
            return value
        parts = value.split(self.separator)
        if len(parts) != len(self.labels) or not all(part.strip().isdecimal() for part in parts):
            self.fail(f"{value!r} is not {self.separator.join(self.labels)} in whole numbers", param, ctx)
        return tuple(int(part) for part in parts)


@click.command(cls=Command)
@click.option("--shape", type=Numbers("E,K,H,I", ",", "E,K,H,I"), help="Experts, top-k, hidden and expert size.")
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A safetensors folder, instead of --shape.",
)
@click.option("--layer", type=click.IntRange(min=0), default=0, show_default=True, help="Layer of --checkpoint.")
@click.option("--top-k", type=click.IntRange(min=0), help="Experts a token, if not in --shape.")
@click.option("--tokens", type=click.IntRange(min=0), required=True, help="Tokens in the call.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Dtype of hidden states. [default: the weights' own]")
@click.option("--backend", default="auto", show_default=True, help="Ask for one backend by name.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: what this machine has]")
@click.option("--capability", type=Numbers("X.Y", ".", "X.Y"), help="Decide as for this GPU capability.")
@click.option("--training", is_flag=True, help="Gradients are wanted.")
@click.option("--compiling", is_flag=True, help="Under torch.compile.")
@click.option("--capturing", is_flag=True, help="Inside a CUDA graph capture.")
@click.option("--expert-parallel", is_flag=True, help="Experts are split over ranks.")
@click.option("--has-gate/--no-gate", default=True, show_default=True, help="Gate and up projection, or up only.")
@click.option("--transposed", is_flag=True, help="Weights are (E, in, out).")
@click.option("--interleaved", is_flag=True, help="Gate and up rows alternate.")
@click.option("--bias", is_flag=True, help="Both projections have a bias.")
@click.option("--activation", default="silu", show_default=True)
@click.option("--explain", is_flag=True, help="Print every decision as a line of text instead of a table.")
@json_option
@click.pass_context
def select(ctx: click.Context, as_json: bool, explain: bool, **options: Any) -> None:
    """Explain the choice of a backend for --shape E,K,H,I or for a layer of --checkpoint."""
    _check_source(ctx, options)
    facts = _facts(options["device"], options["capability"])
    selection = rx.select_backend(
        _experts(options),
        num_tokens=options["tokens"],
        num_top_k=options["top_k"] if options["shape"] is None else options["shape"][1],
        dtype=None if options["dtype"] is None else getattr(torch, options["dtype"]),
        device=facts.device,
        facts=facts,
        **{name: options[name] for name in ("backend", "training", "compiling", "capturing", "expert_parallel")},
    )
    if as_json:
        print_json(selection.to_dict())
    elif explain:
        click.echo(selection.explain())
    else:
        _print_selection(selection)


def _check_source(ctx: click.Context, options: dict[str, Any]) -> None:
    if (options["shape"] is None) == (options["checkpoint"] is None):
        raise click.UsageError("give one of --shape and --checkpoint")

    def given(name: str) -> bool:
        return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE

    if options["checkpoint"] is not None and any(map(given, _LAYOUT)):
        raise click.UsageError("a checkpoint declares its own layout: leave out " + _names(filter(given, _LAYOUT)))
    if options["shape"] is not None and any(map(given, ("top_k", "layer"))):
        raise click.UsageError("--top-k and --layer go with --checkpoint")
    if options["capability"] is not None and options["device"] == "cpu":
        raise click.UsageError("--capability is of a GPU: leave out --device cpu")


def _names(parameters: Any) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in parameters)


def _facts(device: str | None, capability: tuple[int, int] | None) -> Facts:
    facts = current_facts()
    if capability is not None:
        return facts.replace(device="cuda", capability=capability)
    if device is None or device == facts.device:
        return facts
    return facts.replace(device=device, capability=None)


def _experts(options: dict[str, Any]) -> Any:
    """Return weights on the meta device, or the checkpoint's."""
    if options["checkpoint"] is not None:
        return rx.ExpertWeights.from_checkpoint(options["checkpoint"], layer=options["layer"])
    num_experts, _, hidden, inner = options["shape"]
    dtype = getattr(torch, options["dtype"] or "bfloat16")
    width = 2 * inner if options["has_gate"] else inner
    up = "gate_up_proj" if options["has_gate"] else "up_proj"

    def empty(*shape: int) -> torch.Tensor:
        try:
            return torch.empty(num_experts, *shape, device="meta", dtype=dtype)
        except (RuntimeError, OverflowError, TypeError) as error:
            raise click.UsageError("--shape is too large for any tensor") from error

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return empty(columns, rows) if options["transposed"] else empty(rows, columns)

    tensors: dict[str, Any] = {up: matrix(width, hidden), "down_proj": matrix(hidden, inner)}
    if options["bias"]:
        tensors |= {f"{up}_bias": empty(width), "down_proj_bias": empty(hidden)}
    return rx.ExpertWeights(
        **tensors,
        activation=options["activation"],
        is_transposed=options["transposed"],
        is_concatenated=not options["interleaved"],
    )


def _print_selection(selection: Any) -> None:
    console = open_console()
    way = f" ({selection.path})" if selection.path else ""
    console.print(f"Selected: {selection.name}{way}\n")
    table = make_table(console, "Backend", "Runs this", "Predicted", "Figures", "Why, and what to do")
    for one in selection.decisions:
        why = reasons(one.found, one.needed, one.hint)
        figures = "-" if one.predicted_us is None else "tuned" if one.tuned else "default"
        figures += "" if one.tiles is None else f", {one.tiles} tiles"
        table.add_row(one.backend, verdict(one.accepted), duration(one.predicted_us), figures, why)
    print_section(console, "Decisions", table)
