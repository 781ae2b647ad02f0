"""How a call is run: its regime and tiles, from sizes, dtypes, strides and the device alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from routed_experts.kernels import configs
from routed_experts.kernels.configs import Config, smaller_ones
from routed_experts.kernels.descriptors import can_describe
from routed_experts.kernels.layout import tile_sizes
from routed_experts.weights import ExpertWeights

# From this many operations on, some 50 us of a large GPU, descriptors are worth what they cost the host.
_LARGE_FLOPS = 2e10
_LARGE_ROWS = 128


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
    """What a choice depends on: compute capability, and bytes of shared memory that a block may have."""

    capability: tuple[int, int]
    shared_bytes: int


class Choice(NamedTuple):
    """How a call is run: sorted or by pair, the tiles of both products, the precision of float32.

    ``split`` is into how many parts the second product's depth is cut where there are few programs; ``is_large``
    says that operands come through tensor descriptors.
    """

    is_sorted: bool
    up: Config
    down: Config
    precision: str
    split: int = 1
    is_large: bool = False


def sizes_of(experts: ExpertWeights, ids: Tensor) -> Sizes:
    """Return the sizes of a call with these ids, (T, K)."""
    tokens, slots = ids.shape
    return Sizes(tokens, slots, experts.num_experts, experts.hidden_size, experts.intermediate_size)


def choose(
    experts: ExpertWeights, sizes: Sizes, dtype: torch.dtype, device: Device, *, is_sorted: bool = False
) -> Choice:
    """Choose regime and tiles of a call.

    Args:
        experts: the weights.
        sizes: of the call.
        dtype: of the products.
        device: where they run.
        is_sorted: sort however few the pairs are.
    """
    is_sorted = is_sorted or sizes.pairs > configs.MOST_PAIRS_UNSORTED
    if is_sorted:
        up, down = configs.sorted_configs(device.capability, sizes.pairs, sizes.experts)
    else:
        up, down = configs.unsorted_configs(device.capability, sizes.tokens)
    up = configs.fit(up, 1 + experts.has_gate, dtype.itemsize, device.shared_bytes)
    down = configs.fit(down, 1, dtype.itemsize, device.shared_bytes)
    split = 1 if is_sorted else configs.split_of(down, sizes.pairs, sizes.inner, sizes.hidden)
    is_large = up.rows >= _LARGE_ROWS and device.capability >= (9, 0) and _is_worthwhile(experts, sizes, dtype)
    return Choice(is_sorted, up, down, float32_precision(dtype), split, is_large)


def _is_worthwhile(experts: ExpertWeights, sizes: Sizes, dtype: torch.dtype) -> bool:
    flops = 6 * sizes.pairs * sizes.hidden * sizes.inner
    return flops >= _LARGE_FLOPS and dtype.itemsize == 2 and experts.dtype == dtype and can_describe(experts)


def smaller_choices(choice: Choice) -> Iterator[Choice]:
    """The choice and ever smaller tiles, should a device have less room than the table assumes."""
    ups, downs = list(smaller_ones(choice.up)), list(smaller_ones(choice.down))
    for step in range(max(len(ups), len(downs))):
        yield choice._replace(up=ups[min(step, len(ups) - 1)], down=downs[min(step, len(downs) - 1)])


def float32_precision(dtype: torch.dtype) -> str:
    """``ieee``, or ``tf32`` where the products are float32 and torch's own switch allows it."""
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if allowed else "ieee"


def num_tiles(sizes: Sizes, config: Config) -> int:
    """Tiles of the sorted rows, used or not."""
    return tile_sizes(sizes.pairs, sizes.experts, config.rows)[1]
