"""What commands that run a layer share: the options that name it, lists in options, the layer of a checkpoint."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar, cast

import click
import torch

from routed_experts.bench.shapes import Shape
from routed_experts.weights import ExpertWeights

DTYPES = ("bfloat16", "float16", "float32")
FORMATS = ("none", "fp8_block", "mxfp8", "fp8_tensor", "mxfp4")
Callback = TypeVar("Callback", bound=Callable[..., Any])
_MOST_TOKENS = 2**31 - 1
_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
# Names that configurations of MoE models give to K.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k_experts", "top_k")


def layer_options(purpose: str, names: str) -> Callable[[Callback], Callback]:
    """Return a decorator that adds the options which say on what layers a command works.

    Args:
        purpose: what the command does with a layer, such as "Measure".
        names: help of ``--shapes``.
    """
    options = (
        click.option(
            "--device", type=click.Choice(["cpu", "cuda"]), callback=_present, help="[default: what this machine has]"
        ),
        click.option("--shapes", "names", help=names),
        click.option("--shape", "sizes", multiple=True, help="E,K,H,I of a layer of one's own; may be repeated."),
        click.option("--checkpoint", type=_FOLDER, help=f"{purpose} a layer of this safetensors folder."),
        click.option("--layer", type=click.IntRange(min=0), help="Of --checkpoint. [default: 0]"),
        click.option(
            "--top-k", type=click.IntRange(min=1), help="Experts a token of --checkpoint. [default: its config's]"
        ),
        click.option("--dtypes", default="bfloat16", show_default=True, help=f"Of {', '.join(DTYPES)}."),
        click.option("--quantizations", default="none", show_default=True, help=f"Of {', '.join(FORMATS)}."),
    )

    def add(callback: Callback) -> Callback:
        @functools.wraps(callback)
        def checked(*args: Any, **given: Any) -> Any:
            _refuse_unread(given)
            return callback(*args, **given)

        for option in reversed(options):
            checked = option(checked)
        return cast(Callback, checked)

    return add


def finite(ctx: click.Context, option: click.Parameter, value: float) -> float:
    """Refuse infinity and nan, which click's ranges let through."""
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no finite number")
    return value


def _present(ctx: click.Context, option: click.Parameter, device: str | None) -> str | None:
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch finds no CUDA device here; routed-experts doctor says what it finds")
    return device


def _refuse_unread(given: dict[str, Any]) -> None:
    """Refuse options that would be ignored: the measured layer would not be the one asked for."""
    checkpoint = given["checkpoint"] is not None
    pairs = {"names": "--shapes", "sizes": "--shape"} if checkpoint else {"layer": "--layer", "top_k": "--top-k"}
    unread = [option for name, option in pairs.items() if given[name] not in (None, ())]
    if unread:
        raise click.UsageError(
            f"{', '.join(unread)} cannot be given {'with' if checkpoint else 'without'} --checkpoint"
        )


def split(text: str, known: Collection[str]) -> list[str]:
    """Split a comma-separated option, refusing what is not ``known``."""
    parts = [part for part in text.split(",") if part]
    strange = [part for part in parts if part not in known]
    if strange or not parts:
        raise click.UsageError(f"cannot take {', '.join(strange) or 'an empty list'} of {', '.join(sorted(known))}")
    return parts


def token_counts(text: str) -> list[int]:
    """Split a comma-separated option of token counts."""
    parts = [part for part in text.split(",") if part]
    strange = [part for part in parts if not part.isdecimal() or not int(part)]
    if strange or not parts:
        raise click.UsageError(
            f"--tokens takes whole numbers above 0, as 1,8,64; not {', '.join(strange) or 'nothing'}"
        )
    if any(int(part) > _MOST_TOKENS for part in parts):
        raise click.UsageError(f"--tokens takes at most {_MOST_TOKENS}: rows are counted in 32 bits")
    return [int(part) for part in parts]


def layer_of(options: dict[str, Any], device: str) -> tuple[str, Shape, ExpertWeights]:
    """Return name, shape and weights of ``--checkpoint`` and ``--layer`` on ``device``."""
    folder: Path = options["checkpoint"]
    layer = options["layer"] or 0
    weights = ExpertWeights.from_checkpoint(folder, layer=layer, device=device)
    top_k = options["top_k"] or _top_k(folder)
    if not 0 < top_k <= weights.num_experts:
        reason = f"{top_k} is more than it has experts" if top_k else f"{folder} does not say it"
        raise click.UsageError(f"give --top-k, from 1 to {weights.num_experts}: {reason}")
    shape = Shape(weights.num_experts, top_k, weights.hidden_size, weights.intermediate_size)
    return f"{folder.name} layer {layer}", shape, weights


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def _top_k(folder: Path) -> int:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return 0
    for part in filter(_is_object, (config, config.get("text_config") if _is_object(config) else None)):
        for name in _TOP_K:
            if isinstance(part.get(name), int) and not isinstance(part[name], bool):
                return int(part[name])
    return 0
