"""Scales of quantized experts: names and grids checked from headers, values checked before a weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from routed_experts.checkpoint.files import TensorFiles, few
from routed_experts.checkpoint.plan import Parameter
from routed_experts.checkpoint.scheme import MX_GROUP, Scheme
from routed_experts.errors import CheckpointError

UE8M0 = torch.float8_e8m0fnu
_NOT_TOGETHER = "the config and the tensors do not belong together; fetch both again"
_DEQUANTIZE = "read it with dequantize=True"


@dataclass(frozen=True)
class Weight:
    """What the scale of one projection has to fit: its matrices as (N, K) in values, whatever is stored."""

    count: int
    rows: int
    columns: int
    halves: int  # 2 for gate and up on one axis
    is_transposed: bool
    is_concatenated: bool
    is_merged: bool  # from a matrix per expert and half


def grid_of_one(weight: Weight, scheme: Scheme) -> tuple[int, int]:
    """Rows and columns of the scales of one expert's half: one for each block, the last of an axis maybe short."""
    if scheme.block is None:
        return 1, 1
    rows, columns = scheme.block
    return -(-weight.rows // weight.halves // rows), -(-weight.columns // columns)


def check_blocks(role: str, weight: Weight, scheme: Scheme, dequantize: bool) -> None:
    """Raise CheckpointError for a projection that the declared blocks cannot be laid over."""
    if scheme.block is None:
        return
    high, wide = scheme.block
    half = weight.rows // weight.halves
    found = f"block [{high}, {wide}], {role} of N={weight.rows}, K={weight.columns}"
    if wide == MX_GROUP and high == 1 and weight.columns % MX_GROUP:
        _refuse(f"the groups of {role} are not whole", found, f"K a multiple of {MX_GROUP}", _NOT_TOGETHER)
    straddles = weight.halves == 2 and half > high and half % high
    if straddles and not (dequantize and weight.is_merged):
        hint = _DEQUANTIZE if weight.is_merged else _NOT_TOGETHER
        _refuse(f"a block of {role} would lie across gate and up", found, f"I a multiple of {high} or below it", hint)
    if weight.halves == 2 and not weight.is_concatenated and high > 1:
        _refuse(f"the gate and up rows of {role} alternate within a block", found, "blocks of one row", _NOT_TOGETHER)
    if weight.is_transposed and scheme.is_fp4:
        _refuse(f"{role} packs two values of different rows", f"FP4, transposed {role}", "(E, N, K/2)", _NOT_TOGETHER)


def plan_scale(stored: Parameter, name: str, weight: Weight, scheme: Scheme) -> Parameter:
    """The scale of a projection as it will be in memory, (E, rows, columns); CheckpointError if it does not fit.

    ``stored`` is what the headers say: of a stack, or of the matrices of one expert with E in front.
    """
    count = weight.count
    rows, columns = grid_of_one(weight, scheme)
    full = (count, weight.halves * rows, columns)
    if weight.is_merged:
        fits = [(count, rows, columns), *([(count, 1), (count,)] if scheme.block is None else [])]
    else:
        # The two scales of whole halves stand below each other, transposed or not.
        full = (count, columns, weight.halves * rows) if weight.is_transposed and scheme.block else full
        fits = [full, *([(count, 1), (count,)] if scheme.block is None and weight.halves == 1 else [])]
    if stored.shape not in fits:
        shown = [shape[1:] if weight.is_merged else shape for shape in (stored.shape, fits[0])]
        block = "one scale per matrix" if scheme.block is None else f"blocks of {list(scheme.block)}"
        needed = f"{list(shown[1])} for {block} over N={weight.rows // weight.halves}, K={weight.columns}"
        _refuse(f"{name} has the wrong grid", str(list(shown[0])), needed, _NOT_TOGETHER)
    return replace(stored, shape=full, dtype=_dtype_in_memory(stored.dtype, name, scheme))


def _dtype_in_memory(stored: torch.dtype, name: str, scheme: Scheme) -> torch.dtype:
    bytes_allowed = (UE8M0,) if scheme.scale_fmt == "float" else (UE8M0, torch.uint8)
    allowed = (torch.float32, *bytes_allowed, *((torch.bfloat16,) if scheme.block is None else ()))
    if stored not in allowed:
        _refuse(
            f"{name} has the wrong dtype",
            f"{stored}, scale_fmt {scheme.scale_fmt or 'float'}",
            few(allowed).replace(", ", " or "),
            _NOT_TOGETHER,
        )
    return UE8M0 if scheme.scale_fmt == "ue8m0" or stored in (UE8M0, torch.uint8) else torch.float32


def plan_activation_scale(stored: Parameter, name: str, count: int) -> Parameter:
    """Scales of the input of one projection, (E,) float32; CheckpointError if they are not one for each expert."""
    if stored.shape not in ((count,), (count, 1), (count, 1, 1)):
        _refuse(
            f"{name} has the wrong grid", str(list(stored.shape)), f"one for each of {count} experts", _NOT_TOGETHER
        )
    if stored.dtype not in (torch.float32, torch.bfloat16):
        _refuse(f"{name} has the wrong dtype", str(stored.dtype), "float32", _NOT_TOGETHER)
    return replace(stored, shape=(count,), dtype=torch.float32)


def read_scale(parameter: Parameter, files: TensorFiles, count: int, local: range) -> torch.Tensor:
    """The scales of the local experts, on the CPU; CheckpointError names tensor and experts of values that are none."""
    shape = (len(local), *parameter.shape[1:])
    if parameter.stacked is not None:
        stored = files.read(parameter.stacked, *(() if len(local) == count else (local.start, local.stop)))
        return exact(stored, parameter.dtype, parameter.stacked, local).reshape(shape)
    target = torch.empty(shape, dtype=parameter.dtype)
    for slot, expert in enumerate(local):
        names = parameter.matrices[expert]
        parts = [exact(files.read(name)[None], parameter.dtype, name, range(expert, expert + 1)) for name in names]
        if target.dim() == 1:
            target[slot] = _one(parts, names)
            continue
        for rows, part in zip(target[slot].chunk(len(names)), parts, strict=True):
            rows.copy_(part.reshape(rows.shape))
    return target


def _one(parts: list[torch.Tensor], names: tuple[str, ...]) -> torch.Tensor:
    """The scale of an input that gate and up share: they were quantized with one."""
    if any(not torch.equal(part, parts[0]) for part in parts):
        _refuse(
            f"{names[-1]} differs from {names[0]}",
            few(part.item() for part in parts),
            "one scale for the input of both",
            f"{_DEQUANTIZE}: scales of inputs are then not used",
        )
    return parts[0].reshape(())


def exact(stored: torch.Tensor, dtype: torch.dtype, name: str, experts: range) -> torch.Tensor:
    """Stored scales (E, ...) as ``dtype``, with no value changed: a raw byte is a power of two, not a number."""
    if stored.dtype == torch.uint8:
        stored = stored.view(UE8M0)
    _check_values(stored, name, experts)
    if stored.dtype == dtype:
        return stored
    if dtype != UE8M0:
        return stored.to(dtype)
    bits = stored.float().view(torch.int32)
    # 2^-127, byte 0, is the one power of two among them that float32 holds without an implied leading bit.
    powers = (bits & 0x7FFFFF == 0) | (bits == 0x400000)
    if not powers.all():
        slot = int(powers.reshape(len(experts), -1).all(1).logical_not().nonzero()[0])
        _refuse(
            f"{name} is declared ue8m0 and holds scales that are no powers of two",
            f"{stored[slot].flatten()[~powers[slot].flatten()][0].item()} in expert {experts[slot]}",
            "powers of two, or scale_fmt float",
            "rounding them without quantizing the weights again would be wrong by up to 2x; " + _NOT_TOGETHER,
        )
    return (bits >> 23).to(torch.uint8).view(UE8M0)


def _check_values(scales: torch.Tensor, name: str, experts: range) -> None:
    bad = list(_bad_experts(scales, experts))
    if bad:
        _refuse(
            f"{name} holds scales that are none",
            few(f"{kind} in expert {expert}" for expert, kind in bad),
            "positive, finite scales; a block of zeros has scale 1",
            "the checkpoint is incomplete or corrupt; fetch it again",
        )


def _bad_experts(scales: torch.Tensor, experts: range) -> Iterator[tuple[int, str]]:
    if scales.dtype == UE8M0:
        kinds = {"255 (NaN)": scales.view(torch.uint8) == 255}
    else:
        kinds = {"NaN": scales.isnan(), "Inf": scales.isinf(), "0": scales == 0, "a negative scale": scales < 0}
    for kind, where in kinds.items():
        for slot in where.reshape(len(experts), -1).any(1).nonzero().flatten().tolist():
            yield experts[slot], kind


def _refuse(message: str, found: str, needed: str, hint: str) -> None:
    raise CheckpointError(message, found=found, needed=needed, hint=hint)
