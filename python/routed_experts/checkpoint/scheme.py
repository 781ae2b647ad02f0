"""What a config says of quantized experts: keys, defaults, where they may stand, and the values that are none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from routed_experts.checkpoint.files import CONFIG, few
from routed_experts.errors import CheckpointError, UnsupportedScheme
from routed_experts.quantization import Quantization

KEY = "quantization_config"
MX_GROUP = 32
_DEFAULT_BLOCK = (128, 128)
_MX_BLOCK = (1, MX_GROUP)
_CHOICES = {
    "expert_dtype": ("fp8", "fp4"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": ("float", "ue8m0"),
}
_OUTSIDE = ("expert_dtype", "scale_fmt")  # early files have these beside the block; the block wins


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a checkpoint's experts are quantized, as declared.

    ``block`` is None for one scale per matrix; ``scale_fmt`` None where the config is silent; ``skipped`` are names
    and patterns of modules that stayed as they were; ``fmt`` is set in folders of our own alone.
    """

    expert_dtype: str = "fp8"
    block: tuple[int, int] | None = _DEFAULT_BLOCK
    activation_scheme: str = "dynamic"
    scale_fmt: str | None = None
    skipped: tuple[str, ...] = ()
    fmt: str | None = None

    @property
    def is_fp4(self) -> bool:
        """Whether two values share a byte, along the last axis."""
        return self.expert_dtype == "fp4"

    @property
    def is_static(self) -> bool:
        """Whether each projection of each expert has a stored scale for its input."""
        return self.activation_scheme == "static"

    def skips(self, module: str) -> bool:
        """Whether a module is among those that were not converted: by its whole name, its beginning or its end."""
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        return any(re.match(f"(?:{skip}){boundary}", module) or module.endswith(skip) for skip in self.skipped)

    def quantization(self, scale_dtype: torch.dtype) -> Quantization:
        """The format of weights that this scheme declares and whose scales are held as ``scale_dtype``."""
        fmt = self.fmt or _format(self, scale_dtype)
        return Quantization(fmt, self.block, self.activation_scheme, scale_dtype)

    def to_config(self) -> dict[str, Any]:
        """The block of a config that declares this scheme."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": self.activation_scheme,
            "weight_block_size": None if self.block is None else list(self.block),
            "scale_fmt": self.scale_fmt or "float",
            "expert_dtype": self.expert_dtype,
        }


def scheme_of(quantization: Quantization) -> Scheme:
    """The scheme under which quantized experts are written."""
    return Scheme(
        expert_dtype="fp4" if quantization.is_fp4 else "fp8",
        block=quantization.block,
        activation_scheme=quantization.activation_scheme,
        scale_fmt="float" if quantization.scale_dtype == torch.float32 else "ue8m0",
        fmt=quantization.fmt,
    )


def parse_scheme(parts: list[dict[str, Any]]) -> Scheme | None:
    """The scheme in the parts of a config, the text model's first; None for experts that are not quantized.

    Raises UnsupportedScheme for a method other than fp8, CheckpointError for a value that is none of its key's.
    """
    block = next((part[key] for part in parts for key in (KEY, "compression_config") if part.get(key)), None)
    outside = {key: part[key] for part in reversed(parts) for key in _OUTSIDE if part.get(key) is not None}
    if block is None:
        if outside.get("expert_dtype") not in _CHOICES["expert_dtype"]:
            return None
        block = {"quant_method": "fp8"}
    _check_method(block)
    values = outside | {key: value for key, value in block.items() if key not in _OUTSIDE or value is not None}
    return _from_values(values)


def _check_method(block: Any) -> None:
    method = block.get("quant_method", "unnamed") if isinstance(block, dict) else block
    fmt = block.get("fmt", "e4m3") if isinstance(block, dict) else None
    if method != "fp8" or fmt != "e4m3":
        raise UnsupportedScheme(
            "the checkpoint is quantized in a way that is not read",
            found=f"quant_method {method}" + (f", fmt {fmt}" if fmt != "e4m3" else "") + f" in {CONFIG}",
            needed="quant_method fp8 with e4m3 weights, or weights that are not quantized",
            hint="dequantize the checkpoint first, or take one in FP8",
        )


def _from_values(values: dict[str, Any]) -> Scheme:
    chosen = {
        key: _choice(key, values[key], choices) for key, choices in _CHOICES.items() if values.get(key) is not None
    }
    if not isinstance(
        values.get("dequantize", False), bool
    ):  # an option of loading; the caller's is the one that counts
        raise _bad("dequantize", values["dequantize"], "true or false")
    block = _block(values.get("weight_block_size", _DEFAULT_BLOCK))
    if chosen.get("expert_dtype") == "fp4":
        block = _MX_BLOCK
    skipped = values.get("modules_to_not_convert")
    return Scheme(block=block, skipped=_skipped(values.get("ignored_layers") if skipped is None else skipped), **chosen)


def _choice(key: str, value: Any, choices: tuple[str, ...]) -> str:
    given = value.lower() if key == "activation_scheme" and isinstance(value, str) else value
    if given not in choices:
        raise _bad(key, value, " or ".join(choices))
    return str(given)


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in value):
        raise _bad("weight_block_size", value, "two positive integers, or null for one scale per matrix")
    return value[0], value[1]


def _skipped(value: Any) -> tuple[str, ...]:
    names = () if value is None else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise _bad("modules_to_not_convert", value, "a list of names")
    for name in names:
        try:
            re.compile(name)
        except re.error as error:
            raise _bad("modules_to_not_convert", name, "names or regular expressions") from error
    return tuple(names)


def _format(scheme: Scheme, scale_dtype: torch.dtype) -> str:
    if scheme.is_fp4:
        return "mxfp4"
    if scheme.block is None:
        return "fp8_tensor"
    return "mxfp8" if scheme.block == _MX_BLOCK and scale_dtype != torch.float32 else "fp8_block"


def differences(first: Scheme | None, second: Scheme | None) -> str:
    """What two declarations of the same experts disagree about; empty if nothing."""
    one, other = ({} if scheme is None else scheme.to_config() for scheme in (first, second))
    keys: Iterable[str] = sorted(key for key in {**one, **other} if one.get(key) != other.get(key))
    return few(f"{key} {one.get(key)} and {other.get(key)}" for key in keys) if one != other else ""


def _bad(key: str, value: Any, needed: str) -> CheckpointError:
    return CheckpointError(
        f"{key} of the {KEY} in {CONFIG} has no such value",
        found=f"{key}={value!r}",
        needed=needed,
        hint="correct it, or fetch the config again",
    )
