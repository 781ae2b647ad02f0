"""The formats of quantized weights: what is stored, in which dtype, under which grid of scales.

E experts, N rows and K columns of a matrix, K the axis that a product sums over:

============== ===================== ================================= ==============================
format         weight                scale                             dtype of the scale
============== ===================== ================================= ==============================
``fp8_block``  e4m3 (E, N, K)        (E, ceil(N/bn), ceil(K/bk))       float32, or float8_e8m0fnu
``mxfp8``      e4m3 (E, N, K)        (E, N, K/32)                      float8_e8m0fnu
``fp8_tensor`` e4m3 (E, N, K)        (E, 1, 1); gate and up (E, 2, 1)  float32, or float8_e8m0fnu
``mxfp4``      int8 (E, N, K/2)      (E, N, K/32)                      float8_e8m0fnu, or float32
============== ===================== ================================= ==============================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from routed_experts.errors import BackendUnavailable, DtypeError, LayoutError, UnsupportedScales, UnsupportedScheme

FORMATS = ("fp8_block", "mxfp8", "fp8_tensor", "mxfp4")
SCHEMES = ("dynamic", "static")
MX_GROUP = 32
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
E2M1_MAX = 6.0

_MX = ("mxfp8", "mxfp4")


class TorchTooOld(BackendUnavailable, RuntimeError):
    """This torch lacks a dtype that was asked for."""


def ue8m0() -> torch.dtype:
    """Return float8_e8m0fnu, the powers of two; raise TorchTooOld (a RuntimeError) where torch has no such dtype."""
    dtype = getattr(torch, "float8_e8m0fnu", None)
    if dtype is None:
        raise TorchTooOld(
            "UE8M0 scales need a dtype of torch's",
            found=f"torch {torch.__version__}",
            needed="torch 2.7 or newer",
            hint='pip install "torch>=2.9", or use scale_dtype=torch.float32',
        )
    return dtype


@dataclass(frozen=True)
class Quantization:
    """How the weights of experts are quantized.

    Args:
        fmt: ``fp8_block``, ``mxfp8``, ``fp8_tensor`` or ``mxfp4``.
        block: (rows, columns) that share a scale; (128, 128) when not given for ``fp8_block``, always (1, 32) for the
            MX formats (``mxfp4`` ignores what is given, as checkpoints name the block of their other layers), always
            None for ``fp8_tensor``.
        activation_scheme: ``dynamic``, or ``static`` where scales of the activations are stored with the weights. A
            permission to quantize activations, no duty.
        scale_dtype: torch.float32 or torch.float8_e8m0fnu; float32 when not given, for MX float8_e8m0fnu.

    Raises:
        LayoutError: an unknown format or scheme, or a block that does not fit the format.
        UnsupportedScales: ``mxfp8`` with float32 scales.
        DtypeError: another dtype of scales.
        RuntimeError: float8_e8m0fnu asked of a torch without it.
    """

    fmt: str
    block: tuple[int, int] | None = None
    activation_scheme: str = "dynamic"
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _one_of("fmt", self.fmt, FORMATS)
        _one_of("activation_scheme", self.activation_scheme, SCHEMES)
        object.__setattr__(self, "block", _block(self.fmt, self.block))
        object.__setattr__(self, "scale_dtype", _scale_dtype(self.fmt, self.scale_dtype))

    @property
    def is_fp4(self) -> bool:
        """Whether two values share a byte, so that the stored K is half the logical one."""
        return self.fmt == "mxfp4"

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype weights are stored in: float8_e4m3fn, or int8 for FP4."""
        return torch.int8 if self.is_fp4 else E4M3

    def scale_shape(self, experts: int, rows: int, columns: int, halves: bool = False) -> tuple[int, int, int]:
        """Return the shape of the scales of an (experts, rows, columns) stack, sizes logical and not transposed.

        ``halves`` says that gate and up lie on the rows: each keeps scales of its own.

        Raises:
            LayoutError: columns that do not divide by 32 (MX), a block that straddles gate and up.
        """
        if self.block is None:
            return experts, 2 if halves else 1, 1
        height, width = self.row_block(rows, halves), self.block[1]
        if self.fmt in _MX and columns % width:
            raise LayoutError(
                f"{self.fmt} groups {width} columns",
                found=f"{columns} columns",
                needed=f"a multiple of {width}",
                hint="use fp8_block, whose last block may be short",
            )
        return experts, -(-rows // height), -(-columns // width)

    def row_block(self, rows: int, halves: bool) -> int:
        """Return how many rows share a scale; of gate and up no more than one half has."""
        assert self.block is not None
        height = self.block[0]
        if not halves:
            return height
        half = rows // 2
        if half > height and half % height:
            raise LayoutError(
                "a block of scales would straddle gate and up",
                found=f"intermediate size {half}, blocks of {height} rows",
                needed=f"an intermediate size that is a multiple of {height}, or at most {height}",
                hint="quantize with another block, or shard so that every rank keeps whole blocks",
            )
        return min(height, half)


def _one_of(name: str, value: Any, names: tuple[str, ...]) -> None:
    if value not in names:
        raise LayoutError(
            f"unknown {name}", found=repr(value), needed="one of " + ", ".join(names), hint="names are lower case"
        )


def _block(fmt: str, block: Any) -> tuple[int, int] | None:
    if fmt == "mxfp4":
        return (1, MX_GROUP)
    default = {"fp8_block": (128, 128), "mxfp8": (1, MX_GROUP), "fp8_tensor": None}[fmt]
    if block is None:
        return default
    sizes = tuple(block) if isinstance(block, (tuple, list)) else ()
    is_pair = len(sizes) == 2 and all(isinstance(size, int) and size > 0 for size in sizes)
    if not is_pair or (fmt != "fp8_block" and sizes != default):
        raise LayoutError(
            f"a block that {fmt} does not have",
            found=f"block={block!r}",
            needed="two positive whole numbers (rows, columns)" if fmt == "fp8_block" else f"block={default}",
            hint="fp8_block takes any block, fp8_tensor none",
        )
    return sizes[0], sizes[1]


def _scale_dtype(fmt: str, dtype: Any) -> torch.dtype:
    if dtype is None:
        return ue8m0() if fmt in _MX else torch.float32
    if dtype in (torch.uint8, getattr(torch, "float8_e8m0fnu", torch.uint8)):
        return ue8m0()
    if dtype != torch.float32:
        raise DtypeError(
            "scales are not stored in this dtype",
            found=repr(dtype),
            needed="torch.float32 or torch.float8_e8m0fnu",
            hint="leave scale_dtype out for the format's own",
        )
    if fmt == "mxfp8":
        raise UnsupportedScales(
            "the scales of mxfp8 are powers of two",
            found="scale_dtype=torch.float32",
            needed="torch.float8_e8m0fnu",
            hint='float32 scales over 32 columns are fmt="fp8_block" with block=(1, 32)',
        )
    return dtype


def refuse_format(found: str, needed: str) -> UnsupportedScheme:
    """Return the error for weights that no format stores."""
    return UnsupportedScheme(
        "no format stores such weights", found=found, needed=needed, hint="quantize_experts makes quantized experts"
    )
