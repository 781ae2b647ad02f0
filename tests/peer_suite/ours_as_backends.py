"""pytest plugin: this package stands behind the library's built-in names, before its test modules are imported.

The library's shared experts test wraps the module-level functions that it imports by name, and asserts that
the wrapper of the current name was called; so both the class-wide mapping and those functions are replaced.
``--scale-experts FACTOR`` multiplies what ours returns: a run that must fail. With ``--scale-share 0.5`` only half of
the columns are, which shows in models with a norm behind the experts, too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers.integrations.moe as moe
from torch import Tensor

import routed_experts as rx
from routed_experts.transformers_integration import forward_for

NAMES = ("batched_mm", "grouped_mm")
SCALE, SHARE = "PEER_SUITE_SCALE", "PEER_SUITE_SHARE"


def pytest_addoption(parser: pytest.Parser) -> None:
    """The negative control."""
    parser.addoption("--scale-experts", type=float, default=1.0, help="multiply the experts' output")
    parser.addoption("--scale-share", type=float, default=1.0, help="in the first columns alone: this part of them")


def pytest_configure(config: pytest.Config) -> None:
    """Install, and leave a line in the log: without it a plugin that did not load would give the same green."""
    os.environ[SCALE] = str(config.getoption("--scale-experts"))
    os.environ[SHARE] = str(config.getoption("--scale-share"))
    print(install())


def install() -> str:
    """Put ours behind the built-in names in this process; spawned ranks call it too."""
    rx.register_with_transformers(replace=True)
    scale, share = float(os.environ.get(SCALE, "1")), float(os.environ.get(SHARE, "1"))
    for name in NAMES:
        function = forward_for(name)
        if scale != 1:
            function = scaled(function, scale, share)
            moe.ExpertsInterface.register(name, function)
        if moe.ExpertsInterface._global_mapping[name] is not function:
            raise pytest.UsageError(f"{name} does not run on routed_experts")
        setattr(moe, f"{name}_experts_forward", function)
    names = [*NAMES, *exchange()]
    return f"peer suite: routed_experts {rx.__version__} behind {', '.join(names)}, {share:g} of the output x{scale:g}"


def exchange() -> list[str]:
    """Bring tokens to experts by our exchange where a config names none, its output times PEER_SUITE_EXCHANGE."""
    factor = float(os.environ.get("PEER_SUITE_EXCHANGE", "0"))
    if not factor:
        return []
    from transformers.distributed.expert_parallel import EPImplementationInterface

    ours = EPImplementationInterface()["routed_experts"]

    class Exchange(ours):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any) -> Tensor:
            out = super().__call__(*args)
            return out if factor == 1 else factor * out

    EPImplementationInterface.register("auto", Exchange)
    return [f"ep_implementation auto x{factor:g}"]


def scaled(function: Callable[..., Tensor], factor: float, share: float) -> Callable[..., Tensor]:
    """``function`` with its first columns multiplied, ``share`` of them."""

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        out = function(*args, **kwargs)
        columns = torch.ones(out.shape[-1], dtype=out.dtype)
        columns[: int(share * out.shape[-1])] = factor
        return out * columns

    return forward
