"""The gradients of one call, each as a method: the gradients' launches over the call's tiles.

Letters as in kernels/experts.py; N = 2I gated, else I.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from routed_experts.kernels import descriptors, gradient_launches, mlp, mlp_large
from routed_experts.kernels.choice import Choice, choose, sizes_of, smaller_choices
from routed_experts.kernels.configs import Config, smaller_ones, sums_config
from routed_experts.kernels.fused import limits, run_smaller
from routed_experts.kernels.gradient_launches import Rows
from routed_experts.kernels.launch import Launch
from routed_experts.kernels.layout import launches
from routed_experts.kernels.matrices import Matrix, up_matrix
from routed_experts.kernels.steps import tile_lists
from routed_experts.weights import ExpertWeights

Grads = dict[str, Tensor]


class Backward:
    """One backward: sizes and tiles of the call, and the gradients as methods."""

    def __init__(
        self,
        experts: ExpertWeights,
        x: Tensor,
        ids: Tensor,
        grad: Tensor,
        wanted: set[str],
        mains: Grads,
        tiles: Tensor | None,
    ) -> None:
        """Take the call: what was differentiated, which gradients are wanted, and the tiles where they were kept."""
        self.experts, self.ids, self.wanted, self.mains = experts, ids, wanted, mains
        self.grad, self.kept_tiles = grad.contiguous(), tiles
        self.sizes = sizes_of(experts, ids)
        self.device = limits(x.device)
        self.choice = choose(experts, self.sizes, x.dtype, self.device, is_sorted=True)
        self.in_room: Tensor | None = None  # whose rows ``room`` holds

    def run(self, out: Tensor, launches_of: Callable[[Choice], Iterable[Launch]]) -> None:
        """Launch with the call's tiles, or with the largest that there is room for."""
        run_smaller(smaller_choices(self.choice), out, launches_of)

    @functools.cached_property
    def tiles(self) -> Tensor:
        """The flat list of tiles, kept or sorted anew."""
        if self.kept_tiles is not None:
            return self.kept_tiles
        experts, unit = self.sizes.experts, self.choice.up.rows
        tiles, chunks = tile_lists(self.sizes, unit, self.ids.device)
        run_smaller([None], tiles, lambda _: launches(self.ids, tiles, chunks, experts, unit, tiles=True))
        return tiles

    @functools.cached_property
    def ranges(self) -> Tensor:
        """First sorted row and number of rows of every expert, (E, 2)."""
        out = torch.empty(self.sizes.experts, 2, dtype=torch.int32, device=self.ids.device)
        self.run(out, lambda choice: [gradient_launches.ranges(choice, self.sizes, self.tiles, out)])
        return out

    def matrix(self, of: Callable[..., Matrix], choice: Choice) -> Matrix:
        """A projection's matrix turned, for gradients of its rows."""
        return of(self.experts, reads_e4m3=choice.reads_e4m3).turned()

    def empty(self, *shape: int) -> Tensor:
        """Memory in the dtype of the products."""
        return torch.empty(shape, dtype=self.grad.dtype, device=self.grad.device)

    @functools.cached_property
    def room(self) -> Tensor:
        """Memory for rows (S, H), of which a backward needs several kinds one after the other."""
        return self.empty(self.sizes.pairs, self.sizes.hidden)

    def sorted(self, rows: Rows) -> Tensor:
        """Rows (S, D) in sorted order; those that pairs share are gathered into ``room``, over what was there."""
        if not rows.per:
            return descriptors.described(rows.tensor)
        if self.in_room is not rows.tensor:
            gather = gradient_launches.gather(self.sizes, rows, self.tiles, self.ids, self.room)
            run_smaller([None], self.room, lambda _: [gather])
            self.in_room = rows.tensor
        return self.room

    def weight(self, role: str, parameter: Tensor, outputs: Rows, inputs: Rows) -> Grads:
        """Gradient of a matrix from those of its outputs, and its inputs; or nothing, added to a main gradient."""
        if role not in self.wanted:
            return {}
        main = self.mains.get(role)
        out = torch.empty_like(parameter) if main is None else main
        left, right = (inputs, outputs) if self.experts.is_transposed else (outputs, inputs)
        config = sums_config(self.device.capability, left.tensor.element_size(), self.device.shared_bytes)
        run_smaller(smaller_ones(config), out, self._weight_launch(left, right, out, add=main is not None))
        return {role: out} if main is None else {}

    def _weight_launch(self, left: Rows, right: Rows, out: Tensor, *, add: bool) -> Callable[[Config], list[Launch]]:
        if self.choice.is_large:
            rows = self.sorted(left), self.sorted(right)
            return lambda config: [gradient_launches.weight_large(config, *rows, self.ranges, out, add=add)]
        precision, tiles, ranges = self.choice.precision, self.tiles, self.ranges
        return lambda config: [gradient_launches.weight(config, precision, left, right, tiles, ranges, out, add=add)]

    def bias(self, role: str, parameter: Tensor | None, rows: Rows, weights: Tensor | None = None) -> Grads:
        """Gradient of a bias from the gradients of its rows."""
        if role not in self.wanted or parameter is None:
            return {}
        out = torch.empty_like(parameter)
        self.run(out, lambda _: [gradient_launches.bias(self.sizes, rows, weights, self.tiles, self.ranges, out)])
        return {role: out}

    def tokens(self, u_grad: Tensor) -> Grads:
        """Gradient of the tokens (T, H), summed over slots, from that of the first product (S, N)."""
        if "x" not in self.wanted:
            return {}
        sizes = self.sizes
        slots, out = self.room, self.empty(sizes.tokens, sizes.hidden)
        self.in_room = None
        self.run(
            slots,
            lambda choice: [
                mlp.rows_by_tile(sizes, choice, u_grad, self.matrix(up_matrix, choice), self.tiles, slots),
                mlp.weigh(slots, self.ids, None, out, sizes.experts),
            ],
        )
        return {"x": out}

    def first(self, x: Tensor, u_grad: Tensor) -> Grads:
        """Gradients of all that the first product is made of."""
        rows, experts = Rows(u_grad, 0), self.experts
        found = self.weight("up", experts.up_weight, rows, Rows(x, self.sizes.slots))
        return found | self.bias("up_bias", experts.up_bias, rows) | self.tokens(u_grad)

    def product(self, x: Tensor) -> Tensor:
        """The first product of tokens (T, H), once more: (S, N), sorted."""
        experts = self.experts
        out = self.empty(self.sizes.pairs, experts.intermediate_size * (1 + experts.has_gate))
        self.run(out, lambda choice: [mlp.up(experts, choice, x, self.ids, self.tiles, out, is_raw=True)])
        return out

    def units(
        self, u: Tensor, weights: Tensor, u_grad: Tensor | None, scaled: Tensor | None, routing: Tensor | None
    ) -> None:
        """Through second product and gate; see kernels/gradients.py. ``routing`` gets the routing weights' gradient."""

        def attempt(choice: Choice) -> Iterable[Launch]:
            shape = (gradient_launches.unit_parts(choice, self.sizes), self.sizes.pairs)
            partial = None if routing is None else torch.empty(shape, dtype=torch.float32, device=self.grad.device)
            yield from self._units_launches(choice, u, weights, (u_grad, scaled, partial))
            if partial is not None and routing is not None:
                yield gradient_launches.routing(self.experts, self.sizes, partial, self.ids, self.grad, routing)

        self.run(self.grad, attempt)

    def _units_launches(
        self, choice: Choice, u: Tensor, weights: Tensor, made: tuple[Tensor | None, Tensor | None, Tensor | None]
    ) -> Iterable[Launch]:
        experts, sizes, tiles = self.experts, self.sizes, self.tiles
        if not choice.is_large:
            yield gradient_launches.units(experts, choice, sizes, self.grad, tiles, u, weights, made)
            return
        rows, scaled, turned = self.sorted(Rows(self.grad, sizes.slots)), made[1], not experts.is_transposed
        back = self.empty(sizes.pairs, sizes.inner) if scaled is None else scaled
        yield mlp_large.rows_by_tile(
            sizes, choice, rows, experts.down_weight, None, turned, tiles, back, is_sorted=True
        )
        yield gradient_launches.through_gate(experts, sizes, back, tiles, self.ids, u, weights, made)
