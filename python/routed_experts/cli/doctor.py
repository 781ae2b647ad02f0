"""``routed-experts doctor``: what runs on this machine, what does not, why, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console

from routed_experts import machine
from routed_experts.cli.expert_bytes import expert_bytes
from routed_experts.cli.output import (
    Command,
    json_option,
    make_table,
    open_console,
    print_json,
    print_pairs,
    print_section,
    reasons,
    size,
    verdict,
)
from routed_experts.facts import current_facts
from routed_experts.loaders import kernel_status
from routed_experts.selection import machine_decisions
from routed_experts.toolkit import find_toolkit


@click.command(cls=Command)
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Report also the bytes per dtype of the experts in this safetensors folder.",
)
@json_option
def doctor(checkpoint: Path | None, as_json: bool) -> None:
    """Say what this machine has, and for every backend whether it can run, why not, and what to do.

    Nothing here creates a CUDA context.
    """
    report = examine(checkpoint)
    if as_json:
        print_json(report)
    else:
        print_report(open_console(), report)


def examine(checkpoint: Path | None = None) -> dict[str, Any]:
    """Return the report as plain data; ``checkpoint`` is a key of it only if one was given."""
    toolkit = find_toolkit().to_dict()
    # The folder of the headers is in the accepted candidate's words.
    del toolkit["include"]
    report: dict[str, Any] = {
        "machine": machine.describe_machine(),
        "torch": machine.describe_torch(),
        "devices": machine.describe_devices(),
        "packages": machine.describe_packages(),
        "toolkit": toolkit,
        "backends": [
            {
                "backend": decision.backend,
                "accepted": decision.accepted,
                "found": decision.found,
                "needed": decision.needed,
                "hint": decision.hint,
            }
            for decision in machine_decisions(current_facts())
        ],
    }
    if checkpoint is not None:
        report["checkpoint"] = expert_bytes(checkpoint)
    return report


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print the report as tables."""
    system = dict(report["machine"])
    system["memory"] = size(system.pop("memory_bytes"))
    print_pairs(console, "Machine", system.items())
    torch = report["torch"]
    built = torch["built_with_cuda_runtime"]
    runtime = "none: a CPU build" if built is None else f"{built} (the runtime it was built with, no compiler)"
    pairs = (("version", torch["version"]), ("CUDA", runtime), ("threads", torch["threads"]))
    print_pairs(console, "PyTorch", pairs)
    print_pairs(console, "Devices", (_device_row(device) for device in report["devices"]))
    packages = ((name, version or "not installed") for name, version in report["packages"].items())
    print_pairs(console, "Optional packages", packages)
    _print_toolkit(console, report["toolkit"])
    _print_backends(console, report["backends"])
    _print_kernels(console)
    if "checkpoint" in report:
        _print_checkpoint(console, report["checkpoint"])


def _device_row(device: dict[str, Any]) -> tuple[str, str]:
    if device["kind"] == "cpu":
        return "cpu", device["name"]
    capability = device["capability"]
    parts = [
        device["name"],
        "capability unknown" if capability is None else f"SM{capability[0]}{capability[1]}",
        size(device["memory_bytes"]),
        f"driver {device['driver']}",
    ]
    return f"cuda:{device['index']}", ", ".join(part for part in parts if part)


def _print_toolkit(console: Console, toolkit: dict[str, Any]) -> None:
    version = toolkit["version"]
    pairs = [
        ("folder", toolkit["root"]),
        ("nvcc", toolkit["nvcc"]),
        ("version", None if version is None else "{}.{}".format(*version)),
        *((name, path or "missing") for name, path in toolkit["helpers"].items()),
    ]
    print_pairs(console, "CUDA toolkit", pairs)
    table = make_table(console, "Candidate", "Used", "Why, and what to do")
    for one in toolkit["candidates"]:
        why = reasons(one["found"], one["needed"], one["hint"]) if one["path"] else one["found"]
        table.add_row(one["source"], "yes" if one["accepted"] else "no", why)
    print_section(console, "Where the toolkit was looked for", table)


def _print_backends(console: Console, backends: list[dict[str, Any]]) -> None:
    table = make_table(console, "Backend", "Runs here", "Why, and what to do")
    for one in backends:
        table.add_row(one["backend"], verdict(one["accepted"]), reasons(one["found"], one["needed"], one["hint"]))
    print_section(console, "Backends", table)


def _print_kernels(console: Console) -> None:
    table = make_table(console, "Kernel", "Would come from", "State")
    for one in kernel_status():
        waiting = "would be fetched" if one["needs_network"] else "here, not loaded yet"
        state = one["problem"] or ("loaded" if one["loaded"] else waiting)
        table.add_row(one["kernel"], one["source"] or "nowhere", state)
    print_section(console, "Kernels of other projects", table)


def _print_checkpoint(console: Console, checkpoint: dict[str, Any]) -> None:
    table = make_table(console, "Part", "Dtype", "Tensors", "Bytes", "Share")
    total = sum(row["bytes"] for part in ("experts", "other") for row in checkpoint[part]) or 1
    for part in ("experts", "other"):
        for row in checkpoint[part] or [{"dtype": "none", "tensors": 0, "bytes": 0}]:
            share = f"{100 * row['bytes'] / total:.1f} %"
            table.add_row(part, row["dtype"], str(row["tensors"]), size(row["bytes"]), share)
    print_section(console, f"Checkpoint {checkpoint['path']}", table)
