"""From a module that holds FP8 or FP4 experts to their Quantization: what it declares, and the dtypes it has.

Such a module has a parameter ``<projection>_scale_inv`` beside each projection and ``block_size``, None for one scale
a matrix. Where inputs have stored scales, ``activation_scheme`` is "static" and they are
``<projection>_activation_scale``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from routed_experts.errors import LayoutError, UnsupportedScheme
from routed_experts.quantization.checks import as_stored, check_scale_values
from routed_experts.quantization.formats import MX_GROUP, Quantization
from routed_experts.weights import SCALE_NAMES, TENSOR_NAMES

_FP4 = (torch.int8, torch.uint8, getattr(torch, "float4_e2m1fn_x2", torch.int8))
_MISSING = object()
# Its parameters are made with requires_grad=True, quantized or not, and never get a gradient there.
_GIVES_NO_GRADIENTS = "transformers.integrations.finegrained_fp8"


def quantization_of(module: nn.Module, tensors: Mapping[str, Tensor | None]) -> Quantization | None:
    """Return the scheme of a module's experts, None without scales; ``tensors`` are its parameters as they are now.

    Raises:
        LayoutError: scales and no ``block_size``, or a block that the format does not have.
        UnsupportedScheme: quantized weights of another library's kind.
    """
    weight = tensors["down_proj"]
    scale = tensors["down_proj_scale_inv"]
    if all(tensors[name] is None for name in SCALE_NAMES) or not isinstance(weight, Tensor):
        return None
    if scale is None:
        raise LayoutError(
            f"{type(module).__name__} lacks the scales of its second projection",
            found=", ".join(name for name in SCALE_NAMES if tensors[name] is not None),
            needed="down_proj_scale_inv beside down_proj",
            hint="load the checkpoint again; every projection has scales or none has",
        )
    scheme = getattr(module, "activation_scheme", None) or "dynamic"
    dtype = scale.dtype  # uint8 stands for E8M0 there, too
    if weight.dtype in _FP4:
        return Quantization("mxfp4", None, scheme, dtype)
    if weight.dtype != torch.float8_e4m3fn:
        raise UnsupportedScheme(
            f"{type(module).__name__} has scales beside weights that are not quantized here",
            found=f"down_proj {weight.dtype}",
            needed="float8_e4m3fn, or int8 for FP4",
            hint="take the scales away if the weights are plain, or load the model with dequantization to bfloat16",
        )
    block = _block(module)
    if block is None:
        return Quantization("fp8_tensor", None, scheme, dtype)
    is_mx = block == (1, MX_GROUP) and dtype != torch.float32
    return Quantization("mxfp8" if is_mx else "fp8_block", block, scheme, dtype)


def _block(module: nn.Module) -> tuple[int, int] | None:
    block: Any = getattr(module, "block_size", _MISSING)
    if block is _MISSING:
        raise LayoutError(
            f"{type(module).__name__} does not say what its scales belong to",
            found="scales and no block_size",
            needed="module.block_size, (rows, columns) that share a scale, or None for one scale per matrix",
            hint="set it on the module; a block is never guessed from the shape of the scales",
        )
    return tuple(block) if isinstance(block, list) else block


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Read a module's tensors by name; raw bytes are seen as what they are."""
    tensors = {name: getattr(module, name, None) for name in TENSOR_NAMES}
    quantization = quantization_of(module, tensors)
    if quantization is None:
        return tensors
    return without_gradients(type(module), as_stored(tensors, quantization))


def check_values(tensors: dict[str, Any]) -> None:
    """Refuse scales that are none where they have values to look at: not in a tracer, nor while a graph is captured."""
    scales = {name: tensors[name] for name in SCALE_NAMES if isinstance(tensors[name], Tensor)}
    plain = all(type(scale) in (Tensor, nn.Parameter) for scale in scales.values())
    if scales and plain and not torch.compiler.is_compiling() and not _is_capturing(scales):
        check_scale_values(scales)


def _is_capturing(scales: dict[str, Tensor]) -> bool:
    return any(scale.is_cuda for scale in scales.values()) and torch.cuda.is_current_stream_capturing()


def without_gradients(cls: type, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors, detached where the class asks for gradients that it does not give."""
    if not torch.is_grad_enabled() or not gives_no_gradients(cls):
        return tensors
    return {name: None if tensor is None else tensor.detach() for name, tensor in tensors.items()}


def gives_no_gradients(cls: type) -> bool:
    """Whether it is the class of transformers that holds the experts of all FP8 models."""
    return any(base.__module__ == _GIVES_NO_GRADIENTS for base in cls.__mro__)
