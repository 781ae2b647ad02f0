"""Reads the experts of one layer: every check first, from names and headers; then only the tensors needed."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from routed_experts.checkpoint.declared import Declaration, declare
from routed_experts.checkpoint.files import TensorFiles, open_checkpoint
from routed_experts.checkpoint.names import SCALE, Stack, check_known, find_stack
from routed_experts.checkpoint.plan import Parameter, expert_count, plan
from routed_experts.checkpoint.quantized import (
    QuantizedPlan,
    in_memory,
    logical_shape,
    plan_quantized,
    quantization_of,
    read_dequantized,
    read_scales,
)
from routed_experts.checkpoint.scheme import Scheme
from routed_experts.errors import CheckpointError

logger = logging.getLogger(__name__)


def read_experts(
    path: str | os.PathLike[str],
    layer: int = 0,
    *,
    dequantize: bool = False,
    rank: int | None = None,
    world: int | None = None,
    device: torch.device | str | int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of ``ExpertWeights`` for the experts of one transformer layer.

    ``path`` is a folder with ``model.safetensors`` or a sharded index, or one safetensors file, with its
    ``config.json`` beside it. ``layer`` counts as the tensor names do. Stacked weights (E, ...) come as
    private memory maps unless ``device`` is not the CPU; one matrix per expert is copied into a stack with
    gate above up, (E, 2I, H). With ``rank`` and ``world``, only experts rank*E/world to (rank+1)*E/world are
    read, and ``shard`` is in the result.

    Experts in FP8 or FP4 come with their scales and a ``quantization``; with ``dequantize`` as bfloat16 and
    without. Scales are read and checked before anything is allocated for weights.

    Raises CheckpointError for a checkpoint that is missing, corrupt, incomplete or of no known layout and
    UnsupportedScheme for one quantized in another way, both before anything is allocated.
    """
    place = None if device is None else torch.device(device)
    with open_checkpoint(Path(path)) as (files, config):
        declared = declare(config, files.metadata(), files.source)
        stack = find_stack(files.where, layer)
        scheme = _scheme(stack, declared)
        check_known(stack, scheme is not None)
        count = expert_count(stack, declared, files)
        local = _local_experts(count, rank, world, declared)
        parameters, scales = plan(stack, declared, scheme, files, count, local)
        flags = _flags(stack, declared, scheme, parameters)
        reader = _Reader(files, count, local, place)
        if scheme is None:
            tensors = {role: reader.read(parameter) for role, parameter in parameters.items()}
        else:
            planned = plan_quantized(stack, scheme, parameters, scales, flags, as_floats=dequantize, local=local)
            tensors = reader.read_quantized(parameters, planned, as_floats=dequantize)
            if not dequantize:
                flags["quantization"] = quantization_of(planned)
        level = logging.DEBUG if rank is None else logging.INFO  # a share says what it cost
        logger.log(level, "read %d bytes of experts %s of layer %d from %s", files.bytes_read, local, layer, path)
    if rank is not None and world is not None:
        flags["shard"] = (rank, world)
    return {**tensors, **flags, "num_experts": len(local)}


def _scheme(stack: Stack, declared: Declaration) -> Scheme | None:
    """The declared scheme, unless it skips this layer's experts: as a whole, or each matrix of each."""
    scheme = declared.scheme
    if scheme is None or scheme.skips(stack.prefix.removesuffix(".")):
        return None
    matrices = [name.rpartition(".")[0] for roles in stack.matrices.values() for name in roles.values()]
    return None if matrices and all(map(scheme.skips, matrices)) else scheme


def _local_experts(count: int, rank: int | None, world: int | None, declared: Declaration) -> range:
    if rank is None and world is None:
        return range(count)
    if rank is None or world is None or not 0 <= rank < world:
        raise CheckpointError(
            "rank and world do not name a share of the experts",
            found=f"rank={rank}, world={world}",
            needed="both, with 0 <= rank < world",
            hint="leave both out to read every expert",
        )
    if declared.shard is not None:
        raise CheckpointError(
            "the checkpoint is itself one rank's share",
            found=f"the share of rank {declared.shard[0]} of {declared.shard[1]}",
            needed="the experts of all ranks",
            hint="read it without rank and world",
        )
    if count % world:
        raise CheckpointError(
            f"{count} experts cannot be shared equally by {world} ranks",
            found=f"{count} experts, world={world}",
            needed="a number of experts that is a multiple of the number of ranks",
            hint="choose another world size",
        )
    share = count // world
    return range(rank * share, (rank + 1) * share)


def _flags(
    stack: Stack, declared: Declaration, scheme: Scheme | None, parameters: dict[str, Parameter]
) -> dict[str, Any]:
    shapes = {role: logical_shape(role, parameter, scheme) for role, parameter in parameters.items()}
    flags = {
        "activation": declared.activation,
        "swiglu_limit": declared.swiglu_limit,
        "swiglu_alpha": declared.swiglu_alpha,
        "has_gate": "gate_up_proj" in parameters,
        "is_transposed": _is_transposed(stack, declared, shapes),
        "is_concatenated": bool(stack.matrices) or (declared.is_concatenated and not stack.interleaved),
    }
    return flags if declared.shard is None else {**flags, "shard": declared.shard}


def _is_transposed(stack: Stack, declared: Declaration, shapes: dict[str, tuple[int, ...]]) -> bool:
    """The declared orientation, once the shapes agree with it; CheckpointError if they do not."""
    # Matrices of single experts are those of nn.Linear, however the family stacks them.
    way = False if stack.matrices else declared.is_transposed
    ways = (False, True) if way is None else (way,)
    needed = {way: _needed_shapes(shapes["down_proj"], "gate_up_proj" in shapes, way) for way in ways}
    for way, wanted in needed.items():
        if all(shape == wanted.get(role) for role, shape in shapes.items()):
            return way
    raise CheckpointError(
        f"the shapes under {stack.prefix} contradict the declared layout",
        found=str({role: list(shape) for role, shape in shapes.items()}),
        needed=" or ".join(f"{wanted} (is_transposed={way})" for way, wanted in needed.items()),
        hint="the config and the tensors do not belong together, or the model_type in it is wrong",
    )


def _needed_shapes(down: tuple[int, ...], has_gate: bool, is_transposed: bool) -> dict[str, tuple[int, ...]]:
    """Shapes that go with down_proj of (E, H, I), or (E, I, H) if transposed."""
    if len(down) != 3 or 0 in down:
        return {"down_proj": (down[0], 0, 0)}
    count, hidden, inner = (down[0], down[2], down[1]) if is_transposed else down
    width = 2 * inner if has_gate else inner
    up = "gate_up_proj" if has_gate else "up_proj"
    return {
        up: (count, hidden, width) if is_transposed else (count, width, hidden),
        "down_proj": down,
        f"{up}_bias": (count, width),
        "down_proj_bias": (count, hidden),
    }


@dataclass(frozen=True)
class _Reader:
    """Where tensors come from, of which experts, and where they go."""

    files: TensorFiles
    count: int
    local: range
    device: torch.device | None

    def read(self, parameter: Parameter) -> torch.Tensor:
        if parameter.stacked is not None:
            rows = () if len(self.local) == self.count else (self.local.start, self.local.stop)
            tensor = self.files.read(parameter.stacked, *rows)
            return tensor if self.device is None else tensor.to(self.device)
        shape = (len(self.local), *parameter.shape[1:])
        target = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        for slot, expert in enumerate(self.local):
            names = parameter.matrices[expert]
            for rows_of_one, name in zip(target[slot].chunk(len(names)), names, strict=True):
                rows_of_one.copy_(self.files.read(name))
        return target

    def read_quantized(
        self, parameters: dict[str, Parameter], planned: QuantizedPlan, *, as_floats: bool
    ) -> dict[str, torch.Tensor]:
        scales = read_scales(planned, self.files, self.count, self.local)
        if as_floats:
            return {
                role: self.read(parameter).to(torch.bfloat16)
                if role not in planned.weights
                else read_dequantized(
                    role, parameter, scales[role + SCALE], planned, self.files, self.local, self.device
                )
                for role, parameter in parameters.items()
            }
        weights = {role: self.read(in_memory(parameter)) for role, parameter in parameters.items()}
        return weights | {
            role: scale if self.device is None else scale.to(self.device) for role, scale in scales.items()
        }
