"""From a config, or from the block of a folder written by this package, to declared flags."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from routed_experts.checkpoint.families import DEFAULT, FAMILIES, GATE_KEYS, REFUSED, Family
from routed_experts.checkpoint.files import CONFIG, few
from routed_experts.checkpoint.scheme import KEY, Scheme, differences, parse_scheme
from routed_experts.errors import CheckpointError
from routed_experts.quantization import FORMATS

BLOCK = "routed_experts"
_BLOCK_TYPES = {"activation": str, "tensors": tuple, "is_transposed": bool, "is_concatenated": bool}
_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_FROM_MODULE = "build the model and use ExpertWeights.from_module on its experts"


@dataclass(frozen=True, kw_only=True)
class Declaration:
    """What a checkpoint says of its experts. None stands for "not said": there the tensor names decide."""

    activation: str
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    has_gate: bool | None = None
    has_bias: bool | None = None
    is_transposed: bool | None = False
    is_concatenated: bool = True
    counts: tuple[int, ...] = ()
    tensors: tuple[str, ...] | None = None
    shard: tuple[int, int] | None = None
    scheme: Scheme | None = None


def declare(config: dict[str, Any] | None, metadata: dict[str, str], source: Path) -> Declaration:
    """What a checkpoint declares: the block in its file or config if we wrote it, else its model family."""
    block = metadata.get(BLOCK)
    if block is not None:
        return _agreed(_from_block(_parse(block, source), source), config, source)
    if config is None:
        raise CheckpointError(
            f"nothing at {source} says how its experts are laid out",
            found=f"no {CONFIG}, and no {BLOCK} block in the file",
            needed=f"{CONFIG} beside the tensors",
            hint=f"put the model's {CONFIG} there; layouts are never guessed from shapes",
        )
    if BLOCK in config:
        return _agreed(_from_block(config[BLOCK], source), config, source)
    return _from_config(config, source)


def to_block(declaration: Declaration) -> dict[str, Any]:
    """JSON-ready form of a declaration, read back by ``declare``."""
    block = {"version": 1, **asdict(declaration)}
    if declaration.scheme is None:
        del block["scheme"]
    return block


def _agreed(declaration: Declaration, config: dict[str, Any] | None, source: Path) -> Declaration:
    """The declaration of our block, unless the config beside it has another quantization for others to read."""
    contrary = "" if config is None else differences(declaration.scheme, parse_scheme(_parts(config)))
    if contrary:
        raise CheckpointError(
            f"the {BLOCK} block of {source} and {CONFIG} declare different quantizations",
            found=contrary,
            needed=f"the {KEY} that was written with the block",
            hint="the config and the tensors do not belong together",
        )
    return declaration


def _from_config(config: dict[str, Any], source: Path) -> Declaration:
    parts = _parts(config)
    names = [str(part["model_type"]).removesuffix("_text") for part in parts if part.get("model_type")]
    refused = next((name for name in names if name in REFUSED), None)
    if refused:
        raise _unreadable(f"{refused}: {REFUSED[refused]}")
    family = next((FAMILIES[name] for name in names if name in FAMILIES), DEFAULT)
    _refuse_unknown_gate(parts, family)
    return Declaration(
        activation=_activation(parts, family, source),
        swiglu_limit=_constant(parts, "swiglu_limit", family.swiglu_limit),
        swiglu_alpha=_constant(parts, "swiglu_alpha", family.swiglu_alpha),
        has_gate=family.has_gate,
        has_bias=family.has_bias,
        is_transposed=family.is_transposed,
        is_concatenated=family.is_concatenated,
        counts=_counts(parts),
        scheme=parse_scheme(parts),
    )


def _parts(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config of the text model first, where a composite has one, then the whole."""
    return [*(config[key] for key in _TEXT_PARTS if isinstance(config.get(key), dict)), config]


def _first(parts: list[dict[str, Any]], keys: tuple[str, ...]) -> Any:
    return next((part[key] for part in parts for key in keys if part.get(key) is not None), None)


def _refuse_unknown_gate(parts: list[dict[str, Any]], family: Family) -> None:
    known = {key for key in ("swiglu_limit", "swiglu_alpha") if getattr(family, key) is not None}
    unknown = [key for key in GATE_KEYS if key not in known and _first(parts, (key,)) is not None]
    if unknown:
        raise _unreadable(f"{few(unknown)} in {CONFIG}, for a family whose gate is not known to have it")


def _unreadable(found: str) -> CheckpointError:
    return CheckpointError(
        "these experts compute something that a checkpoint's tensors and flags do not describe",
        found=found,
        needed="a gate made of an activation, swiglu_limit and swiglu_alpha, with no norm of its own",
        hint=_FROM_MODULE,
    )


def _activation(parts: list[dict[str, Any]], family: Family, source: Path) -> str:
    name = family.activation or _first(parts, family.activation_keys)
    if not isinstance(name, str):
        raise CheckpointError(
            f"{CONFIG} of {source} names no activation",
            found="nothing" if name is None else repr(name),
            needed=f"a name under {' or '.join(family.activation_keys)}",
            hint=f"add it to {CONFIG}, or {_FROM_MODULE}",
        )
    return name


def _constant(parts: list[dict[str, Any]], key: str, default: float | None) -> float | None:
    """A constant of the gate: null in the config is a choice (no clamp), absence is not."""
    if default is None:
        return None
    value = next((part[key] for part in parts if key in part), default)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise CheckpointError(
        f"{key} in {CONFIG} is not a number", found=repr(value), needed="a number or null", hint=_FROM_MODULE
    )


def _counts(parts: list[dict[str, Any]]) -> tuple[int, ...]:
    """Every expert count of the most specific part that has any; files name it by several keys at once."""
    for part in parts:
        found = {part[key] for key in _COUNT_KEYS if isinstance(part.get(key), int)}
        if found:
            return tuple(sorted(found))
    return ()


def _parse(text: str, source: Path) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise _bad_block(source, str(error)) from error


def _from_block(block: Any, source: Path) -> Declaration:
    if not isinstance(block, dict) or block.get("version") != 1:
        raise _bad_block(source, f"version {block.get('version') if isinstance(block, dict) else block!r}")
    known = {field.name for field in fields(Declaration)}
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in block.items()}
    values.pop("version")
    values["scheme"] = _scheme(values.get("scheme"), source)
    if set(values) != known:
        raise _bad_block(source, f"keys missing or unknown: {few(sorted(set(values) ^ known))}")
    wrong = [key for key, kind in _BLOCK_TYPES.items() if not isinstance(values[key], kind)]
    if wrong:
        raise _bad_block(source, few(f"{key}={values[key]!r}" for key in wrong))
    return Declaration(**values)


def _scheme(value: Any, source: Path) -> Scheme | None:
    if value is None:
        return None
    try:
        given: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in value.items()}
        # What is checked is the config that it stands for.
        parsed = parse_scheme([{KEY: Scheme(**given).to_config()}])
    except (TypeError, AttributeError) as error:
        raise _bad_block(source, f"scheme={value!r}") from error
    if parsed is None or given.get("fmt") not in (*FORMATS, None):
        raise _bad_block(source, f"scheme={value!r}")
    return replace(parsed, fmt=given.get("fmt"), scale_fmt=given.get("scale_fmt"))


def _bad_block(source: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"the {BLOCK} block of {source} is not readable",
        found=found,
        needed="version 1 of the block",
        hint="save the experts again with this version of routed-experts",
    )
