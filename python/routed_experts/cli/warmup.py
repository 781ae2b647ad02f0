"""``routed-experts warmup``: fetch and compile now what a later run would wait for."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import torch
from rich.console import Console

from routed_experts.backends.registry import REGISTRY, check_name
from routed_experts.cli.options import layer_options, split, token_counts
from routed_experts.cli.output import (
    Command,
    describe_error,
    duration,
    json_option,
    make_table,
    open_console,
    print_json,
    print_section,
    reasons,
)
from routed_experts.cli.tune import make_layers
from routed_experts.errors import RoutedExpertsError
from routed_experts.loaders import kernel_status

if TYPE_CHECKING:
    from routed_experts.tuning.measure import Layer

TOKENS = {"cpu": "1,8,64", "cuda": "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192,16384"}
MODES = ("eager", "compiled", "training")


@click.command(cls=Command)
@layer_options("Warm up for", "Comma-separated names of models' layers. [default: one of them]")
@click.option("--tokens", help="Token counts to expect. [default: a range for the device]")
@click.option("--backends", default="auto", show_default=True, help="Those to warm up; auto is what auto chooses.")
@click.option("--modes", default="eager", show_default=True, help="Of " + ", ".join(MODES) + ".")
@json_option
@click.pass_context
def warmup(ctx: click.Context, as_json: bool, **options: Any) -> None:
    """Fetch external kernels of the backends named, run each on the layer, and list what was done.

    For images and start-up scripts: Triton's, torch's and the hub's caches are filled (TRITON_CACHE_DIR,
    TORCHINDUCTOR_CACHE_DIR, HF_HOME). Ends with status 1 if a backend asked for by name cannot run.
    """
    device = options["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    text = options["tokens"] or TOKENS[device]
    counts = token_counts(text)
    names = [name for name in options["backends"].split(",") if name]
    modes = split(options["modes"], MODES)
    for name in names:
        check_name(name)
    before = _cached()
    steps = list(_fetches(names))
    layers = make_layers(options, device)
    with Console(stderr=as_json).status("warming up") as status:
        for layer in layers:
            for name, mode in ((name, mode) for name in names for mode in modes):
                status.update(f"{layer.name} {layer.dtype}: {name}, {mode}")
                steps.append(_runs(layer, name, mode, counts))
    report = {"device": device, "steps": steps, "new_cache_files": _new(before)}
    print_json(report) if as_json else _print(report)
    if any(step["error"] for step in steps):
        ctx.exit(1)


def _fetches(names: list[str]) -> Iterator[dict[str, Any]]:
    """Load the kernels that run functions bring from elsewhere, as their ``load`` says."""
    for name, backend in REGISTRY.backends().items():
        load = next((run.load for _, run in backend.rows if hasattr(run, "load")), None)
        if name in names and load is not None:
            step: dict[str, Any] = {"backend": name, "what": "fetch", "done": "", "seconds": 0.0, "error": None}
            start = time.perf_counter()
            try:
                load()
                step["done"] = f"loaded from {_source(name)}"
            except RoutedExpertsError as error:
                step["error"] = describe_error(error)
            yield step | {"seconds": time.perf_counter() - start}


def _source(name: str) -> str:
    return next((one["source"] for one in kernel_status() if one["kernel"] == name), None) or "its own place"


def _runs(layer: Layer, name: str, mode: str, counts: list[int]) -> dict[str, Any]:
    """Run a layer at every count twice: the first call does what later ones need not."""
    step: dict[str, Any] = {
        "backend": name,
        "what": f"{layer.name} {layer.dtype}, {mode}",
        "done": "",
        "seconds": 0.0,
        "error": None,
    }
    start, later, used = time.perf_counter(), 0.0, set()
    try:
        call = _call(layer, name, mode)
        for tokens in counts:
            used.add(layer.select(tokens, name, training=mode == "training"))
            inputs = layer.draw(tokens)
            call(*inputs)
            again = time.perf_counter()
            call(*inputs)
            _wait(layer)
            later += 2 * (time.perf_counter() - again)
    except RoutedExpertsError as error:
        step["error"] = describe_error(error)
    total = time.perf_counter() - start
    done = f"{len(counts)} token counts on {', '.join(sorted(used))}" if used else ""
    return step | {"done": done, "seconds": total, "compiling_seconds": max(0.0, total - later)}


def _call(layer: Layer, name: str, mode: str) -> Any:
    import routed_experts as rx

    def run(x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return rx.run_experts(x, index, scores, layer.weights, backend=name)

    def train(x: torch.Tensor, index: torch.Tensor, scores: torch.Tensor) -> None:
        run(x.clone().requires_grad_(), index, scores.clone().requires_grad_()).sum().backward()

    if mode == "training":
        return train
    return torch.no_grad()(torch.compile(run) if mode == "compiled" else run)


def _wait(layer: Layer) -> None:
    if layer.device.type == "cuda":
        torch.cuda.synchronize(layer.device)


def _folders() -> dict[str, Path]:
    home = Path.home()
    hub = Path(os.environ.get("HF_HOME") or home / ".cache" / "huggingface")
    return {
        "TRITON_CACHE_DIR": Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"),
        "HF_HOME": hub / "hub",
    }


def _cached() -> dict[str, set[str]]:
    """The names in every cache folder, one level deep."""
    return {name: set(os.listdir(folder)) if folder.is_dir() else set() for name, folder in _folders().items()}


def _new(before: dict[str, set[str]]) -> dict[str, dict[str, Any]]:
    folders = _folders()
    return {name: {"folder": str(folders[name]), "entries": len(now - before[name])} for name, now in _cached().items()}


def _print(report: dict[str, Any]) -> None:
    console = open_console()
    table = make_table(console, "Backend", "What", "Done", "Took")
    for step in report["steps"]:
        error = step["error"]
        done = reasons(error["found"], error["needed"], error["hint"]) if error else step["done"]
        table.add_row(step["backend"], step["what"], done, duration(1e6 * step["seconds"]))
    print_section(console, f"Warmed up on {report['device']}", table)
    for one in report["new_cache_files"].values():
        console.print(f"{one['entries']} new entries in {one['folder']}", soft_wrap=True)
