"""How a call is run: its regime and tiles, from sizes, dtypes, strides and the device alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from routed_experts.kernels import configs, hopper, quantized_configs
from routed_experts.kernels.configs import Config, smaller_ones
from routed_experts.kernels.descriptors import can_describe
from routed_experts.kernels.layout import tile_sizes
from routed_experts.quantization.stacks import stack_of
from routed_experts.weights import ExpertWeights

# From this many operations on, some 50 us of a large GPU, descriptors are worth what they cost the host.
_LARGE_FLOPS = 2e10
_LARGE_ROWS = 128
# The first devices with instructions for E4M3, and from how many rows an expert on these multiply E4M3 rows.
_E4M3_SINCE = (8, 9)
_MEAN_ROWS_QUANTIZED = 16.0
# By pair, column blocks are on an axis of the grid that is no longer than this; the narrowest has so many columns.
_MOST_BLOCKS, _LEAST_COLUMNS = 2**16 - 1, 32


class Sizes(NamedTuple):
    """T, K, E, H and I of one call."""

    tokens: int
    slots: int
    experts: int
    hidden: int
    inner: int

    @property
    def pairs(self) -> int:
        """S = T*K."""
        return self.tokens * self.slots


class Device(NamedTuple):
    """What a choice depends on: compute capability, bytes of shared memory a block may have, multiprocessors.

    Of a device that is only described, to compile for it, nobody knows how many of them there are.
    """

    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int = 0


class Choice(NamedTuple):
    """How a call is run: sorted or by pair, the tiles of both products, the precision of float32.

    ``split`` is into how many parts the second product's depth is cut where there are few programs; ``is_large``
    says that operands come through tensor descriptors; ``is_quantized`` is of the weights, ``reads_e4m3`` that the
    device converts such numbers itself.
    ``quantizes`` is that rows are multiplied as E4M3 too, ``is_narrow`` that they are quantized where they are read;
    or, if ``has_records`` too, before that: see kernels/packed.py. ``programs`` is for the kernels of
    kernels/e4m3_hopper.py: how many stand beside one another.
    """

    is_sorted: bool
    up: Config
    down: Config
    precision: str
    split: int = 1
    is_large: bool = False
    is_quantized: bool = False
    reads_e4m3: bool = True
    quantizes: bool = False
    is_narrow: bool = False
    has_records: bool = False
    programs: int = 0


def sizes_of(experts: ExpertWeights, ids: Tensor) -> Sizes:
    """Return the sizes of a call with these ids, (T, K)."""
    tokens, slots = ids.shape
    return Sizes(tokens, slots, experts.num_experts, experts.hidden_size, experts.intermediate_size)


def choose(
    experts: ExpertWeights,
    sizes: Sizes,
    dtype: torch.dtype,
    device: Device,
    *,
    is_sorted: bool = False,
    may_quantize: bool = False,
    tiles: tuple[Config, Config] | None = None,
) -> Choice:
    """Choose regime and tiles of a call.

    Args:
        experts: the weights.
        sizes: of the call.
        dtype: of the products.
        device: where they run.
        is_sorted: sort however few the pairs are.
        may_quantize: whether the rows may be quantized too.
        tiles: of both products, instead of those of the tables.
    """
    widest = max(sizes.hidden, sizes.inner) // _LEAST_COLUMNS
    is_sorted = is_sorted or sizes.pairs > configs.MOST_PAIRS_UNSORTED or widest >= _MOST_BLOCKS
    if experts.quantization is not None:
        kinds = {"is_sorted": is_sorted, "may_quantize": may_quantize}
        return _quantized(experts, sizes, dtype, device, tiles, **kinds)
    if tiles is not None:
        up, down = tiles
    elif is_sorted:
        up, down = configs.sorted_configs(device.capability, sizes.pairs, sizes.experts)
    else:
        up, down = configs.unsorted_configs(device.capability, sizes.tokens)
    up = configs.fit(up, 1 + experts.has_gate, dtype.itemsize, device.shared_bytes)
    down = configs.fit(down, 1, dtype.itemsize, device.shared_bytes)
    split = 1 if is_sorted else configs.split_of(down, sizes.pairs, sizes.inner, sizes.hidden)
    is_large = up.rows >= _LARGE_ROWS and device.capability >= (9, 0) and _is_worthwhile(experts, sizes, dtype)
    return Choice(is_sorted, up, down, float32_precision(dtype), split, is_large)


def _is_worthwhile(experts: ExpertWeights, sizes: Sizes, dtype: torch.dtype) -> bool:
    return _flops(sizes) >= _LARGE_FLOPS and dtype.itemsize == 2 and experts.dtype == dtype and can_describe(experts)


def _flops(sizes: Sizes) -> int:
    return 6 * sizes.pairs * sizes.hidden * sizes.inner


def _quantized(
    experts: ExpertWeights,
    sizes: Sizes,
    dtype: torch.dtype,
    device: Device,
    tiles: tuple[Config, Config] | None,
    *,
    is_sorted: bool,
    may_quantize: bool,
) -> Choice:
    is_fp4 = experts.dtype == torch.int8
    reads_e4m3 = device.capability >= _E4M3_SINCE
    mean = sizes.pairs / sizes.experts if is_sorted else 0.0
    may_quantize = may_quantize and dtype.itemsize == 2 and reads_e4m3 and _groups_fit(experts)
    quantizes = may_quantize and not is_fp4 and is_sorted and mean >= _MEAN_ROWS_QUANTIZED
    table = quantized_configs.table(
        device.capability, is_fp4=is_fp4, quantizes=quantizes, records=is_fp4 and may_quantize
    )
    up, down = tiles or quantized_configs.products(table, mean, sizes.tokens)
    widths = 1 + experts.has_gate
    up = quantized_configs.fit(up, widths, dtype.itemsize, is_fp4, device.shared_bytes)
    down = quantized_configs.fit(down, 1, dtype.itemsize, is_fp4, device.shared_bytes)
    split = 1 if is_sorted else configs.split_of(down, sizes.pairs, sizes.inner, sizes.hidden)
    is_large = quantizes and device.capability >= (9, 0) and _flops(sizes) >= _LARGE_FLOPS and can_describe(experts)
    suits = is_large and hopper.suits(experts, mean, device.capability, device.shared_bytes)
    programs = device.multiprocessors if suits else 0
    if programs:
        up, down = hopper.UP, hopper.DOWN
    # Tensor cores take E4M3 as it is stored only as an operand of 64 rows (Hopper).
    is_narrow = may_quantize and not quantizes and up.swap and down.swap
    if is_narrow:
        up, down = (_narrow(config, is_fp4) for config in (up, down))
    kinds = (is_large, True, reads_e4m3, quantizes, is_narrow, is_narrow and is_fp4, programs)
    return Choice(is_sorted, up, down, float32_precision(dtype), split, *kinds)


def _narrow(config: Config, is_fp4: bool) -> Config:
    """With steps that no scale of E4M3 weights ends in, or that divide the depth of a product of packed codes."""
    if is_fp4:
        return config._replace(depth=quantized_configs.ROW_GROUP)
    return config._replace(depth=min(config.depth, quantized_configs.ROW_GROUP))


def _groups_fit(experts: ExpertWeights) -> bool:
    """Whether weights have scales that cover whole steps of their product in E4M3, or can be part of the numbers."""
    quantization = experts.quantization
    if quantization is None or experts.is_transposed or quantization.activation_scheme != "dynamic":
        return False
    if quantization.is_fp4:
        return _words_fit(experts)
    return quantization.block is None or quantization.block[1] % quantized_configs.ROW_GROUP == 0


def _words_fit(experts: ExpertWeights) -> bool:
    """Whether packed codes can be read 16 bytes, and their scales as powers of two 8 or 4 bytes, at a time."""
    return all(
        stack.scale.dtype != torch.float32
        and not stack.interleaved
        and stack.shape[2] % quantized_configs.ROW_GROUP == 0
        and _is_aligned(stack.weight, 16)
        and _is_aligned(stack.scale, 8 if stack.shape[2] % 256 == 0 else 4)
        for stack in (stack_of(experts, True), stack_of(experts, False))
    )


def _is_aligned(stack: Tensor, size: int) -> bool:
    """Whether all rows are contiguous and begin at a multiple of so many bytes."""
    return stack.stride(-1) == 1 and all(step % size == 0 for step in (stack.data_ptr(), *stack.stride()[:-1]))


def smaller_choices(choice: Choice) -> Iterator[Choice]:
    """The choice and ever smaller tiles, should a device have less room than the table assumes."""
    if choice.programs:  # whose tiles are what the kernels are written for
        yield choice
        choice = choice._replace(programs=0)
    least = quantized_configs.ROW_GROUP if choice.has_records else quantized_configs.LEAST_DEPTH
    ups, downs = (
        [one for one in smaller_ones(config) if not choice.is_quantized or one.depth >= least]
        for config in (choice.up, choice.down)
    )
    for step in range(max(len(ups), len(downs))):
        yield choice._replace(up=ups[min(step, len(ups) - 1)], down=downs[min(step, len(downs) - 1)])


def float32_precision(dtype: torch.dtype) -> str:
    """``ieee``, or ``tf32`` where the products are float32 and torch's own switch allows it."""
    # allow_tf32 raises once this newer name has been set; this one answers for both, and for the global switches.
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def num_tiles(sizes: Sizes, config: Config) -> int:
    """Tiles of the sorted rows, used or not."""
    return tile_sizes(sizes.pairs, sizes.experts, config.rows)[1]
