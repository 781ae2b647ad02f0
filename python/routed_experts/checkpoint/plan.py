"""Which tensors make which parameter, checked by name and header before any data is read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from routed_experts.checkpoint.declared import Declaration
from routed_experts.checkpoint.files import Header, TensorFiles, few
from routed_experts.checkpoint.names import Stack
from routed_experts.errors import CheckpointError

# Rows of a parameter, from the matrices of one expert: gate above up.
_MERGED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up_proj_bias": ("gate_proj_bias", "up_proj_bias"),
}
_INCOMPLETE = "the checkpoint is incomplete; fetch the missing files again"


@dataclass(frozen=True)
class Parameter:
    """One parameter of E experts: a stacked tensor, or for each expert the matrices that make its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stacked: str | None
    matrices: tuple[tuple[str, ...], ...] = ()


def expert_count(stack: Stack, declared: Declaration, files: TensorFiles) -> int:
    """E, which names, shapes and config have to agree on."""
    if stack.matrices:
        # Bounded by how many experts have names, whatever number one of the names holds.
        count = min(max(stack.matrices) + 1, 2 * len(stack.matrices))
        if declared.counts and count not in declared.counts:
            # Experts missing at the end show only against the declared count.
            count = max(count, *declared.counts)
    else:
        first = stack.stacked.get("down_proj") or next(iter(stack.stacked.values()))
        count = (files.header(first).shape or (0,))[0]
    if count < 1 or (declared.counts and count not in declared.counts):
        raise CheckpointError(
            f"the number of experts under {stack.prefix} is wrong",
            found=f"{count} experts",
            needed=f"{few(declared.counts)} as the config says"
            if declared.counts and count
            else "at least one",
            hint="the config and the tensors do not belong together",
        )
    return count


def plan(
    stack: Stack, declared: Declaration, files: TensorFiles, count: int, local: range
) -> dict[str, Parameter]:
    """Parameters of all ``count`` experts; headers are read for the experts in ``local`` alone."""
    roles = _required(stack, declared)
    if stack.stacked:
        parameters = {role: _of_stack(role, stack, files) for role in roles}
    else:
        parameters = _of_matrices(roles, stack, files, count, local)
    _check_dtypes({role: parameter.dtype for role, parameter in parameters.items()}, stack.prefix)
    return parameters


def _required(stack: Stack, declared: Declaration) -> tuple[str, ...]:
    """Parameters that the declaration asks for; those the files have beyond or below it are refused."""
    present = _present(stack)
    if declared.tensors is not None:
        roles = declared.tensors
    else:
        up = "gate_up_proj" if _is_gated(stack, declared, present) else "up_proj"
        biases = (
            declared.has_bias if declared.has_bias is not None else any("_bias" in role for role in present)
        )
        roles = (up, "down_proj", *((f"{up}_bias", "down_proj_bias") if biases else ()))
    if stack.stacked and set(roles) != present:
        missing, extra = sorted(set(roles) - present), sorted(present - set(roles))
        raise CheckpointError(
            f"the experts under {stack.prefix} are not those declared",
            found=few(sorted(present)) + (f" ({few(extra)} not declared)" if extra else ""),
            needed=few(roles) + (f" ({few(missing)} missing)" if missing else ""),
            hint=_INCOMPLETE if missing else "the config and the tensors do not belong together",
        )
    return roles


def _present(stack: Stack) -> set[str]:
    if stack.stacked:
        return set(stack.stacked)
    return {role for roles in stack.matrices.values() for role in roles}


def _is_gated(stack: Stack, declared: Declaration, present: set[str]) -> bool:
    """The family's word, else a stack's name. Matrices alone never say "not gated": the gate may be lost."""
    if declared.has_gate is not None:
        return declared.has_gate
    return not (stack.stacked and "up_proj" in present and "gate_up_proj" not in present)


def _of_stack(role: str, stack: Stack, files: TensorFiles) -> Parameter:
    name = stack.stacked[role]
    header = files.header(name)
    return Parameter(header.shape, header.dtype, name)


def _of_matrices(
    roles: Iterable[str], stack: Stack, files: TensorFiles, count: int, local: range
) -> dict[str, Parameter]:
    rows = {role: _MERGED.get(role, (role,)) for role in roles}
    wanted = {matrix for matrices in rows.values() for matrix in matrices}
    _check_complete(stack, wanted, count)
    parameters = {}
    for role, matrices in rows.items():
        names = [tuple(stack.matrices[expert][matrix] for matrix in matrices) for expert in range(count)]
        header = _common_header([name for expert in local for name in names[expert]], files)
        rows_of_one = [len(matrices) * size for size in header.shape[:1]]
        shape = (count, *rows_of_one, *header.shape[1:])
        parameters[role] = Parameter(shape, header.dtype, None, tuple(names))
    return parameters


def _check_complete(stack: Stack, wanted: set[str], count: int) -> None:
    missing, extra = [], []
    for expert in range(count):
        present = set(stack.matrices.get(expert, ()))
        missing += [f"expert {expert} has no {role}" for role in sorted(wanted - present)]
        extra += [f"expert {expert} has {role}" for role in sorted(present - wanted)]
    if missing or extra:
        raise CheckpointError(
            f"the experts under {stack.prefix} are not complete",
            found=few(missing or extra),
            needed=f"{few(sorted(wanted))} of each of {count} experts, and nothing else",
            hint=_INCOMPLETE
            if missing
            else "build the model and use ExpertWeights.from_module on its experts",
        )


def _common_header(names: list[str], files: TensorFiles) -> Header:
    first = files.header(names[0])
    for name in names[1:]:
        header = files.header(name)
        if header != first:
            raise CheckpointError(
                f"{name} differs from {names[0]}",
                found=f"{list(header.shape)} {header.dtype}",
                needed=f"{list(first.shape)} {first.dtype}",
                hint="all experts of a layer have one shape and one dtype",
            )
    return first


def _check_dtypes(dtypes: dict[str, torch.dtype], prefix: str) -> None:
    if len(set(dtypes.values())) > 1:
        raise CheckpointError(
            f"the experts under {prefix} mix dtypes",
            found=few(f"{role} {dtype}" for role, dtype in dtypes.items()),
            needed="one dtype",
            hint="cast the checkpoint to one dtype",
        )
