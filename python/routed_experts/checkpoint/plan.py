"""Which tensors make which parameter, checked by name and header before any data is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from routed_experts.checkpoint.declared import Declaration
from routed_experts.checkpoint.files import DTYPES, Header, TensorFiles, few
from routed_experts.checkpoint.names import ACTIVATION_SCALE, SCALE, Stack
from routed_experts.checkpoint.scheme import Scheme
from routed_experts.errors import CheckpointError, UnsupportedScheme

_FLOATS = tuple(DTYPES.values())
_NOT_QUANTIZED = "the config declares no such scales; fetch the config that belongs to these tensors"
_INCOMPLETE = "the checkpoint is incomplete; fetch the missing files again"


@dataclass(frozen=True)
class Parameter:
    """One parameter of E experts: a stacked tensor, or for each expert the matrices that make its rows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    stacked: str | None
    matrices: tuple[tuple[str, ...], ...] = ()

    def name(self, expert: int) -> str:
        """A tensor that stands for the parameter in what is said of it."""
        return self.stacked if self.stacked is not None else self.matrices[expert][0]


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
            found=f"{count} experts" + _of_highest(stack),
            needed=f"{few(declared.counts)} as the config says" if declared.counts and count else "at least one",
            hint="the config and the tensors do not belong together",
        )
    return count


def _of_highest(stack: Stack) -> str:
    """The tensor that says how many there are."""
    return f", as {min(stack.matrices[max(stack.matrices)].values())} says" if stack.matrices else ""


def plan(
    stack: Stack, declared: Declaration, scheme: Scheme | None, files: TensorFiles, count: int, local: range
) -> tuple[dict[str, Parameter], dict[str, Parameter]]:
    """Weights and biases of all ``count`` experts, and their scales as stored: (E, ...) of what one matrix has.

    Headers are read for the experts in ``local`` alone.
    """
    roles = _required(stack, declared, scheme)
    matrices = {role: _matrices_of(role, "gate_up_proj" in roles) for role in roles}
    if not stack.stacked:
        _check_complete(stack, {matrix for names in matrices.values() for matrix in names}, count)
    stored = {role: _stored(role, matrices[role], stack, files, count, local) for role in roles}
    scales = {role: stored.pop(role) for role in roles if role.endswith((SCALE, ACTIVATION_SCALE))}
    _check_dtypes(stored, stack.prefix, scheme, local)
    return {role: _merged(parameter, len(matrices[role])) for role, parameter in stored.items()}, scales


def _required(stack: Stack, declared: Declaration, scheme: Scheme | None) -> tuple[str, ...]:
    """Parameters that the declaration asks for; those the files have beyond or below it are refused."""
    present = _present(stack)
    if declared.tensors is not None:
        roles = declared.tensors
    else:
        up = "gate_up_proj" if _is_gated(stack, declared, present) else "up_proj"
        biases = declared.has_bias if declared.has_bias is not None else any("_bias" in role for role in present)
        roles = (up, "down_proj", *((f"{up}_bias", "down_proj_bias") if biases else ()))
    if scheme is not None:
        roles = (*roles, *_scales(roles, scheme))
    if stack.stacked and set(roles) != present:
        missing, extra = sorted(set(roles) - present), sorted(present - set(roles))
        raise CheckpointError(
            f"the experts under {stack.prefix} are not those declared",
            found=few(sorted(present)) + (f" ({few(extra)} not declared)" if extra else ""),
            needed=few(roles) + (f" ({few(missing)} missing)" if missing else ""),
            hint=_INCOMPLETE if missing else _hint_for(extra),
        )
    return roles


def _scales(roles: tuple[str, ...], scheme: Scheme) -> list[str]:
    inputs = ("gate_up_proj", "down_proj") if scheme.is_static else ()
    weights = [role for role in roles if not role.endswith("_bias")]
    return [*(role + SCALE for role in weights), *(role + ACTIVATION_SCALE for role in inputs)]


def _hint_for(extra: list[str]) -> str:
    if any(name.endswith((SCALE, ACTIVATION_SCALE)) or "scale" in name for name in extra):
        return _NOT_QUANTIZED
    return "the config and the tensors do not belong together"


def _present(stack: Stack) -> set[str]:
    if stack.stacked:
        return set(stack.stacked)
    return {role for roles in stack.matrices.values() for role in roles}


def _is_gated(stack: Stack, declared: Declaration, present: set[str]) -> bool:
    """The family's word, else a stack's name. Matrices alone never say "not gated": the gate may be lost."""
    if declared.has_gate is not None:
        return declared.has_gate
    return not (stack.stacked and "up_proj" in present and "gate_up_proj" not in present)


def _matrices_of(role: str, has_gate: bool) -> tuple[str, ...]:
    """Roles of one expert's matrices whose rows make a parameter: gate above up."""
    if not role.startswith("gate_up_proj"):
        return (role,)
    kind = role.removeprefix("gate_up_proj")
    return ("gate_proj" + kind, "up_proj" + kind) if has_gate else ("up_proj" + kind,)


def _stored(
    role: str, matrices: tuple[str, ...], stack: Stack, files: TensorFiles, count: int, local: range
) -> Parameter:
    if stack.stacked:
        name = stack.stacked[role]
        header = files.header(name)
        return Parameter(header.shape, header.dtype, name)
    names = [tuple(stack.matrices[expert][matrix] for matrix in matrices) for expert in range(count)]
    header = _common_header([name for expert in local for name in names[expert]], files)
    return Parameter((count, *header.shape), header.dtype, None, tuple(names))


def _merged(parameter: Parameter, parts: int) -> Parameter:
    """The parameter with the rows of each of its matrices one below the other."""
    count, *sizes = parameter.shape or (0,)
    rows = [parts * size for size in sizes[:1]]
    return parameter if parameter.stacked else replace(parameter, shape=(count, *rows, *sizes[1:]))


def _check_complete(stack: Stack, wanted: set[str], count: int) -> None:
    missing, extra = [], []
    for expert in range(count):
        present = stack.matrices.get(expert, {})
        missing += [_missing(stack, expert, role) for role in sorted(wanted - present.keys())]
        extra += [f"expert {expert} has {present[role]}" for role in sorted(present.keys() - wanted)]
    if missing or extra:
        raise CheckpointError(
            f"the experts under {stack.prefix} are not complete"
            if missing
            else f"more under {stack.prefix} than declared",
            found=few(missing or extra),
            needed=f"{few(sorted(wanted))} of each of {count} experts, and nothing else",
            hint=_INCOMPLETE if missing else _hint_for(extra),
        )


def _missing(stack: Stack, expert: int, role: str) -> str:
    """What an expert lacks; for a scale, the tensor's name as it would be beside those of other experts."""
    base, kind = next(
        ((role.removesuffix(end), end) for end in (SCALE, ACTIVATION_SCALE) if role.endswith(end)), ("", "")
    )
    if not kind:
        return f"expert {expert} has no {role}"
    models = (roles[role] for roles in stack.matrices.values() if role in roles)
    default = f".{base}.weight_scale_inv" if kind == SCALE else f".{base}.activation_scale"
    model = next((name.removeprefix(stack.prefix).lstrip("0123456789") for name in models), default)
    return f"expert {expert} has no {stack.prefix}{expert}{model}"


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


def _check_dtypes(parameters: dict[str, Parameter], prefix: str, scheme: Scheme | None, local: range) -> None:
    plain = {role: parameter for role, parameter in parameters.items() if scheme is None or role.endswith("_bias")}
    for role, parameter in parameters.items():
        if scheme is not None and role not in plain:
            _check_quantized_dtype(parameter, scheme, local)
        elif parameter.dtype not in _FLOATS:
            raise UnsupportedScheme(
                f"{parameter.name(local.start)} is not stored in a plain floating dtype",
                found=str(parameter.dtype),
                needed=f"{few(_FLOATS)}, or a quantization_config in the config",
                hint=_NOT_QUANTIZED,
            )
    if len({parameter.dtype for parameter in plain.values()}) > 1:
        raise CheckpointError(
            f"the experts under {prefix} mix dtypes",
            found=few(f"{role} {parameter.dtype}" for role, parameter in plain.items()),
            needed="one dtype",
            hint="cast the checkpoint to one dtype",
        )


def _check_quantized_dtype(parameter: Parameter, scheme: Scheme, local: range) -> None:
    needed = (torch.int8, torch.float4_e2m1fn_x2) if scheme.is_fp4 else (torch.float8_e4m3fn,)
    if parameter.dtype not in needed:
        raise CheckpointError(
            f"{parameter.name(local.start)} has the wrong dtype",
            found=str(parameter.dtype),
            needed=f"{needed[0]}, as expert_dtype {scheme.expert_dtype} says",
            hint="the config and the tensors do not belong together; plain layers are in modules_to_not_convert",
        )
