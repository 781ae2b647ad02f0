"""The fused call: what is launched, and how a call that was made before is made again.

The first call of a set of shapes goes through Triton, which compiles what is new. It leaves a plan, so that the next
one allocates, collects addresses and hands everything to the driver at once: with a token a call, that is most of
the time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from routed_experts import _core
from routed_experts.backends.registry import REGISTRY
from routed_experts.errors import BackendUnavailable
from routed_experts.kernels import e4m3_hopper_mlp, e4m3_mlp, mlp, records
from routed_experts.kernels.choice import Choice, Device, Sizes, choose, float32_precision, sizes_of, smaller_choices
from routed_experts.kernels.constants import settle
from routed_experts.kernels.launch import Launch, device_of, launch, plan, raw_stream
from routed_experts.kernels.layout import launches, scratch_size, tile_sizes
from routed_experts.kernels.memory import Piece, cut, places
from routed_experts.kernels.tuned import tiles_of
from routed_experts.weights import ExpertWeights

# Token counts that vary without end must not collect plans without end.
_MOST_PLANS = 512
_ALIGNMENT = 16  # bytes: what a compiled kernel takes for granted of tokens and weights
# The interpreter has no device of its own; it runs what Hopper would.
_INTERPRETED = Device((9, 0), 232448)


class Repeated:
    """Calls of one kind: the shapes, dtypes, device and layout are those of the first, strides may differ."""

    def __init__(self) -> None:
        self.plans: dict[Any, Planned] = {}

    def __call__(self, experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run a call as :func:`run_fused` does."""
        planned = self.plans.get((x.stride(), ids.stride(), weights.stride()))
        if planned is not None:
            return planned(experts, x, ids, weights)
        out = run_fused(experts, x, ids, weights)
        planned = experts._plans.get(_key(x, ids, weights))
        # The precision of float32 is a switch that can be turned between two calls.
        if planned is not None and x.dtype is not torch.float32:
            self.plans[x.stride(), ids.stride(), weights.stride()] = planned
        return out


def _key(x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Any, ...]:
    """All that the launches of a call depend on beside the weights; tiles that are measured renew the registry."""
    return (
        *(x.shape, x.stride(), x.dtype, ids.shape, ids.stride(), ids.dtype, weights.stride(), weights.dtype),
        *(x.device, x.dtype is torch.float32 and float32_precision(x.dtype), REGISTRY.generation),
    )


def run_fused(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run experts whose gate is one of ours: x (T, H), ids and weights (T, K) to (T, H) in the dtype of x."""
    key = _key(x, ids, weights)
    kept = experts._plans.get(key)
    if kept is None:
        return _through_triton(experts, x, ids, weights, key)
    out: Tensor = kept(experts, x, ids, weights)
    return out


class Planned:
    """A call that was made before: its launches need new addresses and nothing else."""

    def __init__(
        self,
        launches: _core.LaunchPlan,
        compiled: Sequence[Any],
        names: Sequence[str],
        pieces: Sequence[Piece],
        out: Tensor,
    ) -> None:
        """Keep a plan whose pointers are: tokens, weights by ``names``, ids, routing weights, scratch, the result.

        ``compiled`` are Triton's objects, which own the code that the plan launches.
        """
        self.launches, self.compiled = launches, compiled
        self.offsets, self.bytes = places(pieces)
        self.index, self.names = out.device.index, names

    def __call__(self, experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run the call over tensors of the shapes, strides and dtypes that were planned."""
        if torch.cuda.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(experts, x, ids, weights)
        tensors, low = experts._tensors, x.data_ptr()
        given = [low]
        for name in self.names:
            address = tensors[name].data_ptr()  # type: ignore[union-attr]
            low |= address
            given.append(address)
        given += ids.data_ptr(), weights.data_ptr()
        if low % _ALIGNMENT or not all(given):
            return _through_triton(experts, x, ids, weights, None)
        # Of all ways to ask for memory these two cost the host least.
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        scratch = x.new_empty(self.bytes, dtype=torch.uint8)
        base = scratch.data_ptr()
        pieces = [base + offset for offset in self.offsets]
        self.launches.launch(raw_stream(self.index), (*given, *pieces, out.data_ptr()))
        return out


def _operands(experts: ExpertWeights, x: Tensor) -> list[Tensor]:
    """Tokens and weights: what kernels read in vectors of 16 bytes."""
    return [x, *(tensor for tensor in experts._tensors.values() if tensor is not None)]


def _through_triton(experts: ExpertWeights, x: Tensor, ids: Tensor, weights: Tensor, key: Any) -> Tensor:
    """Make the call through Triton, and keep its plan under the key unless that is None."""
    given = (x, ids, weights)
    x, ids, weights = settle(*given)  # type: ignore[assignment]
    if any(now is not before for now, before in zip((x, ids, weights), given, strict=True)):
        key = None  # the plan of the copies is not that of the call
    sizes = sizes_of(experts, ids)
    tiles = tiles_of(experts, sizes, x.dtype, x.device)
    choice = choose(experts, sizes, x.dtype, limits(x.device), may_quantize=True, tiles=tiles)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pieces: list[Piece] = []
    made: list[Tensor] = []

    def attempt(smaller: Choice) -> Iterator[Launch]:
        pieces[:], made[:] = memory_of(smaller, sizes, x)
        return launches_of(experts, smaller, x, ids, weights, made, out)

    done = run_smaller(smaller_choices(choice), out, attempt)
    if key is not None:
        _keep(experts, key, done, [*_operands(experts, x), ids, weights, *made, out], pieces)
    return out


def run_smaller(
    attempts: Iterable[Any], out: Tensor, listed: Callable[[Any], Iterable[Launch]]
) -> list[tuple[Launch, Any]]:
    """Launch the first attempt that the device has room for; return its launches and their compiled kernels."""
    with device_of(out):
        for attempt in attempts:
            try:
                return [(one, launch(one)) for one in listed(attempt)]
            except triton.OutOfResources:
                continue
    raise _too_large(out.device)


def run_choice(experts: ExpertWeights, choice: Choice, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Run a call as chosen and not otherwise; nothing is kept.

    Raises:
        triton.OutOfResources: the device has no room for these tiles.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with device_of(out):
        for one in launches_as(experts, choice, x, ids, weights, out):
            launch(one)
    return out


def launches_as(
    experts: ExpertWeights, choice: Choice, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor
) -> Iterator[Launch]:
    """The kernels of a call as chosen, over scratch memory of their own."""
    _, made = memory_of(choice, sizes_of(experts, ids), x)
    return launches_of(experts, choice, x, ids, weights, made, out)


def memory_of(choice: Choice, sizes: Sizes, x: Tensor) -> tuple[list[Piece], list[Tensor]]:
    """Scratch memory of a call: its pieces, and the tensors that they are."""
    pieces = pieces_of(choice, sizes, x.dtype)
    return pieces, cut(torch.empty(places(pieces)[1], dtype=torch.uint8, device=x.device), pieces)


def pieces_of(choice: Choice, sizes: Sizes, dtype: torch.dtype) -> list[Piece]:
    """Scratch memory of a call: the gated units, the slots, and what finds the rows."""
    if choice.quantizes:
        return _of_rows(choice).pieces_of(choice, sizes, dtype)
    units, rows = Piece((sizes.pairs, sizes.inner), dtype), (choice.split * sizes.pairs, sizes.hidden)
    extra = records.pieces_of(choice, sizes)
    if not choice.is_sorted:
        counters = Piece((mlp.counters_of(choice, sizes.hidden),), torch.int32)
        return [units, Piece(rows, torch.float32), counters, *extra]
    lists = sum(tile_sizes(sizes.pairs, sizes.experts, choice.up.rows))
    chunks = scratch_size(sizes.pairs, sizes.experts)
    return [units, Piece(rows, dtype), Piece((lists,), torch.int32), Piece((chunks,), torch.int32), *extra]


def _of_rows(choice: Choice) -> Any:
    """The launches of a call whose rows are multiplied as E4M3."""
    return e4m3_hopper_mlp if choice.programs else e4m3_mlp


def launches_of(
    experts: ExpertWeights, choice: Choice, x: Tensor, ids: Tensor, weights: Tensor, made: list[Tensor], out: Tensor
) -> Iterator[Launch]:
    """The kernels of a call, in order; ``made`` is the memory of :func:`_pieces`."""
    if choice.quantizes:
        yield from _of_rows(choice).launches_of(experts, choice, x, ids, weights, made, out)
        return
    rest, recorded = (made[:-2], made[-2:]) if choice.has_records else (made, [])
    a, slots = rest[:2]
    rows, units = recorded or (x, a)
    if recorded:
        yield records.record(x, rows)
    if choice.is_sorted:
        tiles, chunks = rest[2:]
        yield from launches(ids, tiles, chunks, experts.num_experts, choice.up.rows, tiles=True)
    else:
        tiles = rest[2]
    yield mlp.up(experts, choice, rows, ids, tiles, a)
    if recorded:
        yield records.record(a, units)
    if choice.is_sorted:
        yield mlp.down_by_tile(experts, choice, units, ids, tiles, slots)
        yield mlp.weigh(slots, ids, weights, out, experts.num_experts)
    else:
        yield mlp.down_by_pair(experts, choice, units, ids, weights, tiles, slots, out)


def _keep(
    experts: ExpertWeights, key: Any, done: Sequence[tuple[Launch, Any]], tensors: list[Tensor], pieces: list[Piece]
) -> None:
    out = tensors[-1]
    if not out.is_cuda or any(tensor.data_ptr() % _ALIGNMENT for tensor in tensors):
        return
    launch_plan = plan(done, tensors)
    if launch_plan is None:
        return
    if len(experts._plans) >= _MOST_PLANS:
        experts._plans.clear()
    names = [name for name, tensor in experts._tensors.items() if tensor is not None]
    experts._plans[key] = Planned(launch_plan, [compiled for _, compiled in done], names, pieces, out)


@functools.cache
def limits(device: torch.device) -> Device:
    """What a choice depends on, asked of the driver once.

    Raises:
        BackendUnavailable: Triton cannot build its own access to the driver.
    """
    if device.type != "cuda":
        return _INTERPRETED
    try:
        properties = triton.runtime.driver.active.utils.get_device_properties(device.index)
    except Exception as error:  # Triton lets through whatever its build raises.
        raise _cannot_build(error) from error
    capability = torch.cuda.get_device_capability(device)
    return Device(capability, properties["max_shared_mem"], properties["multiprocessor_count"])


def _cannot_build(error: Exception) -> BackendUnavailable:
    return BackendUnavailable(
        "Triton cannot launch kernels here",
        found=f"{type(error).__name__}: {error}",
        needed="a C compiler (gcc or clang) and Python's headers, with which Triton builds its launcher",
        hint='install them or set CC; until then use backend="grouped_mm"',
    )


def _too_large(device: torch.device) -> BackendUnavailable:
    capability, shared, _ = limits(device)
    return BackendUnavailable(
        "no tile of the fused kernels fits this device",
        found=f"compute capability {capability}, {shared} bytes of shared memory a block",
        needed="room for the smallest tile",
        hint='use backend="grouped_mm"',
    )
