"""From Triton kernels to launches: through Triton the first time, through the driver afterwards.

Triton's own call binds arguments, hashes their types and looks its cache up, every time. The kernels of one call
and one set of shapes are always the same, so the first call keeps the compiled ones, and later calls hand the
driver their pointers: all kernels of a layer in one call of the Rust core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from routed_experts import _core
from routed_experts.errors import DtypeError, RoutedExpertsError


class Launch(NamedTuple):
    """One kernel: ``kernel[grid](*arguments, **constants, num_warps=..., num_stages=...)``.

    ``arguments`` are what the kernel gets at run time, in its order: tensors or their descriptors, None where there is
    none, and whole numbers that it does not specialize on. ``constants`` are its constexprs.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    registers: int | None = None


def launch(one: Launch) -> Any:
    """Launch through Triton, on the current stream of the current device; return the compiled kernel.

    Raises:
        DtypeError: a tensor that has no memory of its own.
    """
    for argument in one.arguments:
        if isinstance(argument, Tensor) and argument.numel() and not argument.data_ptr():
            raise _no_memory(argument)
    return one.kernel[one.grid](*one.arguments, **one.constants, **options_of(one))


def compile_only(one: Launch) -> None:
    """Compile as a launch would, and launch nothing; the interpreter compiles nothing."""
    one.kernel.warmup(*one.arguments, grid=one.grid, **one.constants, **options_of(one))


def options_of(one: Launch) -> dict[str, int]:
    """Triton's options of a launch."""
    options = {"num_warps": one.num_warps, "num_stages": one.num_stages}
    return options if one.registers is None else {**options, "maxnreg": one.registers}


def _no_memory(tensor: Tensor) -> DtypeError:
    # What wraps other tensors (a DTensor, a fake one) has address 0, and the kernel would read there.
    return DtypeError(
        "a kernel needs tensors with memory of their own",
        found=f"{type(tensor).__name__} of shape {tuple(tensor.shape)} without an address",
        needed="torch.Tensor",
        hint="pass what it wraps, DTensor.to_local()",
    )


def device_of(tensor: Tensor) -> Any:
    """Context in which the tensor's device is the current one: Triton launches there and nowhere else."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def raw_stream(device: int) -> int:
    """The address of the current stream of a device."""
    return _raw_stream(device)


def _slow_stream(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# What torch's own compiler calls: a stream object costs ten times more.
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _slow_stream)


def plan(launches: Sequence[tuple[Launch, Any]], tensors: Sequence[Tensor]) -> _core.LaunchPlan | None:
    """Return a plan of launches that were made, or None where their compiled kernels cannot be launched directly.

    Args:
        launches: each launch beside the compiled kernel that Triton returned for it.
        tensors: every tensor among the arguments; a call of the plan takes their addresses in this order.
    """
    slots = {id(tensor): slot for slot, tensor in enumerate(tensors)}
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]

    def slot_of(tensor: Tensor) -> int:
        # A view of other dtype is the memory of the one tensor that it is of.
        if id(tensor) in slots:
            return slots[id(tensor)]
        place = (tensor.data_ptr(), tensor.nbytes)
        if places.count(place) != 1:
            raise KeyError("memory that a call does not bring")
        return places.index(place)

    try:
        return _core.LaunchPlan([_compiled(one, compiled, slot_of) for one, compiled in launches])
    except (AttributeError, KeyError, RoutedExpertsError):
        # Memory that a call does not bring, another Triton than those we know, or a driver without what is needed:
        # Triton's own way is only slower.
        return None


def _width(value: Any) -> str:
    """The type that Triton gives a whole number."""
    if not isinstance(value, int):
        raise AttributeError("a descriptor, which only Triton passes")
    return "int32" if -(2**31) <= value < 2**31 else "int64"


def _compiled(one: Launch, compiled: Any, slot_of: Callable[[Tensor], int]) -> Any:
    metadata = compiled.metadata
    if metadata.num_ctas != 1 or getattr(metadata, "global_scratch_size", 0):
        raise AttributeError("a cluster or scratch memory, which only Triton provides")
    parameters = [
        ("pointer", slot_of(value)) if isinstance(value, Tensor) else (_width(value), value)
        for value in one.arguments
        if value is not None  # Triton compiles None away
    ]
    return compiled.function, one.grid, metadata.num_warps * 32, metadata.shared, False, parameters
