"""Experts over 1, 2 and 4 gloo ranks give what one rank gives: values, and gradients of inputs, routing and weights.

Every spawn of ranks runs many cases; a rank compares with all experts in its own memory and returns what it found.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_ranks import all_good, run_ranks

import routed_experts as rx

E, K, H, INNER = 8, 3, 32, 32
TOKENS = 13
ROUTINGS = ("even", "skewed", "idle rank", "no tokens on one rank", "sentinels", "nobody")
FORMATS = ("float32", "bfloat16", "fp8_block", "mxfp4")
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "fp8_block": 2e-2, "mxfp4": 2e-2}


def make_experts(fmt: str, *, grad: bool = True) -> rx.ExpertWeights:
    g = torch.Generator().manual_seed(0)
    dtype = torch.float32 if fmt == "float32" else torch.bfloat16
    up = torch.randn(E, 2 * INNER, H, generator=g) * H**-0.5
    down = torch.randn(E, H, INNER, generator=g) * INNER**-0.5
    is_floating = fmt in ("float32", "bfloat16")
    weights = rx.ExpertWeights(
        gate_up_proj=up.to(dtype).requires_grad_(grad and is_floating),
        down_proj=down.to(dtype).requires_grad_(grad and is_floating),
    )
    if is_floating:
        return weights
    return rx.quantize_experts(weights, fmt, **({"block": (16, 16)} if fmt == "fp8_block" else {}))


def make_batch(routing: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, H, generator=g).to(dtype)
    weights = 0.1 + torch.rand(TOKENS, K, generator=g)
    index = torch.randint(0, E, (TOKENS, K), generator=g)
    if routing == "skewed":
        index = torch.where(torch.rand(TOKENS, K, generator=g) < 0.9, E - 1, index)
    elif routing == "idle rank":
        index = index % (E // 4)  # the last of 2 and of 4 ranks gets no row
    elif routing == "sentinels":
        index = torch.where(torch.rand(TOKENS, K, generator=g) < 0.5, torch.tensor(-1), index)
        index[::2, 0] = E
    elif routing == "nobody":
        index = torch.full_like(index, E)
    return x, index, weights


def my_tokens(routing: str, dispatch: str, rank: int, world: int) -> slice:
    """Which tokens of the batch a rank holds: all, or a part of its own, uneven and for one rank none."""
    if dispatch == "all_reduce":
        return slice(None)
    if routing == "no tokens on one rank" and world > 1:
        return slice(0, 0) if rank == 0 else slice(TOKENS * (rank - 1) // (world - 1), TOKENS * rank // (world - 1))
    return slice(TOKENS * rank // world, TOKENS * (rank + 1) // world)


def error(found: torch.Tensor, whole: torch.Tensor, part: slice = slice(None)) -> float:
    """Largest difference from a part, over the largest value of the whole; shapes and dtypes must be equal."""
    wanted = whole[part]
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert found.isfinite().all()
    scale = max(float(whole.abs().max()), 1e-3)
    return float((found.double() - wanted.double()).abs().max()) / scale if wanted.numel() else 0.0


def one_rank(experts: rx.ExpertWeights, batch: tuple[torch.Tensor, ...], seed: torch.Tensor) -> list[torch.Tensor]:
    """Value and gradients of one rank that holds everything."""
    x, index, weights = batch[0].clone().requires_grad_(), batch[1], batch[2].clone().requires_grad_()
    out = rx.run_experts(x, index, weights, experts, backend="eager", expert_parallel=True)
    out.backward(seed)
    return [out.detach(), x.grad, weights.grad, *_take_grads(experts)]


def _take_grads(experts: rx.ExpertWeights) -> list[torch.Tensor]:
    grads = []
    for tensor in (experts.gate_up_proj, experts.down_proj):
        if tensor.requires_grad:
            grads.append(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
            tensor.grad = None
    return grads


def one_case(rank: int, case: tuple[str, ...], chunks: int | None) -> list[float]:
    """Errors of value, gradients of inputs and routing weights, and of the weights' gradients summed over ranks."""
    dispatch, routing, fmt, backend = case
    world = dist.get_world_size()
    experts = make_experts(fmt)
    dtype = torch.float32 if fmt == "float32" else torch.bfloat16
    batch = make_batch(routing, dtype)
    seed = torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(2)).to(dtype)
    wanted = one_rank(experts, batch, seed)
    mine = my_tokens(routing, dispatch, rank, world)
    layer = rx.parallel.ExpertParallel(experts, None, dispatch, backend=backend, timeout=30, chunks=chunks)
    runs = []
    for _ in range(2):
        x, weights = (batch[part][mine].clone().requires_grad_() for part in (0, 2))
        out = layer(x, batch[1][mine], weights)
        out.backward(seed[mine])
        runs.append([out.detach(), x.grad, weights.grad, *_take_grads(experts)])
    for first, second in zip(*runs, strict=True):
        assert torch.equal(first, second), "not the same bits again"
    out, *grads = runs[0]
    for grad in grads[2:]:
        dist.all_reduce(grad)
    if dispatch == "all_reduce":
        copies = [torch.empty_like(out) for _ in range(world)]
        dist.all_gather(copies, out)
        assert all(torch.equal(copy, out) for copy in copies), "ranks differ"
    parts = [mine] * 3 + [slice(None)] * len(grads[2:])
    return [error(found, *right) for found, *right in zip([out, *grads], wanted, parts, strict=True)]


def grid(rank: int, cases: list[tuple[tuple[str, ...], int | None]]) -> dict[Any, list[float]]:
    return {(*case, chunks): one_case(rank, case, chunks) for case, chunks in cases}


def pick() -> list[tuple[tuple[str, ...], int | None]]:
    """All dispatches and routings on floats; formats, backends and chunks on some of them."""
    floats = [
        ((dispatch, routing, "float32", "auto"), 3 if number % 2 else None)
        for number, (routing, dispatch) in enumerate(itertools.product(ROUTINGS, ("all_reduce", "all_to_all")))
    ]
    chunked = [(("all_to_all", routing, "float32", "eager"), 3) for routing in ROUTINGS]
    formats = [
        ((dispatch, routing, fmt, backend), None)
        for dispatch in ("all_reduce", "all_to_all")
        for routing, fmt, backend in (
            ("even", "bfloat16", "grouped_mm"),
            ("idle rank", "fp8_block", "auto"),
            ("sentinels", "fp8_block", "grouped_mm"),
            ("skewed", "mxfp4", "batched_mm"),
        )
    ]
    return floats + chunked + formats


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_equal_one_rank(world, tmp_path):
    cases = pick()
    for results in all_good(run_ranks(grid, world, tmp_path, cases)):
        assert len(results) == len(cases)
        for (dispatch, routing, fmt, backend, chunks), errors in results.items():
            where = f"{dispatch}, {routing}, {fmt}, {backend}, chunks={chunks}"
            # Partial sums of ranks are rounded to the dtype once more; gradients see that twice.
            limits = [TOLERANCE[fmt], *[2 * TOLERANCE[fmt]] * (len(errors) - 1)]
            assert len(errors) == (5 if fmt in ("float32", "bfloat16") else 3), where
            assert all(found <= limit for found, limit in zip(errors, limits, strict=True)), f"{where}: {errors}"


def shapes_and_modes(rank: int) -> None:
    """Odd inputs: other dtypes and strides, one slot, no slots, a module, a share, frozen experts, no gradients."""
    world = dist.get_world_size()
    experts = make_experts("float32")
    x, index, weights = make_batch("even", torch.float32)
    wanted = rx.run_experts(x, index, weights, experts).detach()
    share = experts.shard(rank, world)
    module = rx.RoutedExperts(E, H, INNER)
    with torch.no_grad():
        module.gate_up_proj.copy_(experts.gate_up_proj)
        module.down_proj.copy_(experts.down_proj)
    strided = (x.t().contiguous().t(), index.t().contiguous().t().to(torch.int16), weights.double())
    for dispatch, whole in itertools.product(("all_reduce", "all_to_all"), (experts, share, module)):
        layer = rx.parallel.ExpertParallel(whole, dist.group.WORLD, dispatch, timeout=30)
        assert layer.num_experts == E
        for batch in ((x, index, weights), strided):
            with torch.no_grad():
                assert error(layer(*batch), wanted) < 1e-5
            assert error(layer(*batch).detach(), wanted) < 1e-5
        assert error(layer(x, index[:, :1], weights[:, :1]).detach(), _first_slot(experts)) < 1e-5
        none = layer(x.requires_grad_(), index[:, :0], weights[:, :0])
        assert none.shape == x.shape
        assert not none.any()
        none.sum().backward()
        assert not x.grad.any()
        x = x.detach()
    # A module that is changed is read again.
    layer = rx.parallel.ExpertParallel(module, None, "all_to_all", timeout=30)
    first = layer(x, index, weights)
    module.down_proj = torch.nn.Parameter(2 * module.down_proj.detach())
    assert torch.equal(layer(x, index, weights), 2 * first)
    module.double()
    assert layer(x.double(), index, weights).dtype == torch.float64


def _first_slot(experts: rx.ExpertWeights) -> torch.Tensor:
    x, index, weights = make_batch("even", torch.float32)
    return rx.run_experts(x, index[:, :1], weights[:, :1], experts).detach()


def gradients_where_only_some_ask(rank: int) -> None:
    """Ranks that differ in what wants gradients still have part in each other's backward."""
    x, index, weights = make_batch("even", torch.float32)
    frozen = make_experts("float32", grad=False)
    for dispatch in ("all_reduce", "all_to_all"):
        for asks_x, asks_weights in ((True, False), (False, True)):
            layer = rx.parallel.ExpertParallel(frozen, None, dispatch, timeout=30)
            a, w = x.clone().requires_grad_(asks_x), weights.clone().requires_grad_(asks_weights)
            layer(a, index, w).sum().backward()
            assert (a.grad is not None, w.grad is not None) == (asks_x, asks_weights)
    # Only rank 0 asks, and of its input alone; the other rank's output goes through the graph all the same.
    layer = rx.parallel.ExpertParallel(frozen, None, "all_to_all", timeout=30)
    a = x.clone().requires_grad_(rank == 0)
    layer(a, index, weights).sum().backward()
    assert (a.grad is not None) == (rank == 0)
    if rank == 0:
        b = x.clone().requires_grad_()
        rx.run_experts(b, index, weights, frozen).sum().backward()
        assert error(a.grad, b.grad) < 1e-5
    # Only the experts of rank 1 train.
    layer = rx.parallel.ExpertParallel(
        make_experts("float32", grad=rank == 1).shard(rank, 2), None, "all_to_all", timeout=30
    )
    layer(x, index, weights).sum().backward()


def groups_of_two(rank: int) -> float:
    """Two groups side by side: ranks of a group and ranks of the world are not the same numbers."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group = groups[rank % 2]
    x, index, weights = make_batch("even", torch.float32)
    experts = make_experts("float32", grad=False)
    layer = rx.parallel.ExpertParallel(experts, group, "all_to_all", timeout=30)
    mine = slice(0, 5) if dist.get_rank(group) == 0 else slice(5, None)
    wanted = rx.run_experts(x, index, weights, experts)[mine]
    return error(layer(x[mine] * (1 + rank % 2), index[mine], weights[mine]), _scaled(wanted, x, mine, rank % 2))


def _scaled(wanted: torch.Tensor, x: torch.Tensor, mine: slice, scale: int) -> torch.Tensor:
    if not scale:
        return wanted
    _, index, weights = make_batch("even", torch.float32)
    return rx.run_experts(2 * x, index, weights, make_experts("float32", grad=False))[mine]


def test_inputs_of_every_kind(tmp_path):
    all_good([result or "good" for result in run_ranks(shapes_and_modes, 2, tmp_path / "shapes")])
    all_good([result or "good" for result in run_ranks(gradients_where_only_some_ask, 2, tmp_path / "asks")])
    assert max(all_good(run_ranks(groups_of_two, 4, tmp_path / "groups"))) < 1e-5


def loads(rank: int) -> tuple[Any, Any, int]:
    x, _, weights = make_batch("even", torch.float32)
    index = torch.tensor([[0, 1, 2]] * TOKENS)
    index[0, 0] = E  # nobody's
    layer = rx.parallel.ExpertParallel(
        make_experts("float32", grad=False), None, "all_to_all", timeout=30, report_load=True
    )
    layer(x, index, weights)
    shared = rx.parallel.ExpertParallel(make_experts("float32", grad=False), None, timeout=30).load(index)
    return layer.last_load, shared, sum(layer.last_load.tokens_per_expert)


def test_load_report(tmp_path):
    for report, shared, total in all_good(run_ranks(loads, 2, tmp_path)):
        assert report.tokens_per_expert == (24, 26, 26, 0, 0, 0, 0, 0)
        assert report.tokens_per_rank == (76, 0)
        assert (report.imbalance, report.idle_experts, total) == (2.0, 5, 76)
        assert shared.tokens_per_expert == (12, 13, 13, 0, 0, 0, 0, 0)
        assert "rank 0: 76, rank 1: 0" in str(report)


def compiled(rank: int) -> float:
    """The graph breaks around a layer, and goes on after it."""
    x, index, weights = make_batch("even", torch.float32)
    experts = make_experts("float32", grad=False)
    wanted = rx.run_experts(2 * x, index, weights, experts) + 1
    worst = 0.0
    for dispatch in ("all_reduce", "all_to_all"):
        layer = rx.parallel.ExpertParallel(experts, None, dispatch, timeout=60)
        program = torch.compile(
            lambda x, index, weights, layer=layer: layer(2 * x, index, weights) + 1, backend="eager"
        )
        leaf = x.clone().requires_grad_()
        out = program(leaf, index, weights)
        out.sum().backward()
        assert leaf.grad.any()
        worst = max(worst, error(out.detach(), wanted))
    return worst


def test_compiled_programs_call_a_layer(tmp_path):
    assert max(all_good(run_ranks(compiled, 2, tmp_path))) < 1e-5


def hands_over_to_megamoe(rank: int) -> tuple[Any, ...]:
    """What the backend is called with; the kernel itself needs its hardware."""
    from routed_experts.parallel import expert_parallel

    seen: dict[str, Any] = {}

    def run(x: Any, index: Any, weights: Any, experts: Any, **how: Any) -> Any:
        seen.update(how, index=index, experts=experts)
        return x

    def choose(experts: Any, **asked: Any) -> None:
        seen["asked"] = (asked["backend"], asked["process_group"], asked["expert_parallel"])

    expert_parallel.run_experts = run
    expert_parallel.selection.choose = choose
    x, index, weights = make_batch("even", torch.float32)
    layer = rx.parallel.ExpertParallel(make_experts("float32", grad=False), None, "megamoe", timeout=30)
    assert layer(x, index, weights) is x
    assert seen["index"] is index
    assert seen["process_group"] is dist.group.WORLD
    return seen["backend"], seen["expert_parallel"], tuple(seen["experts"].shard), seen["asked"]


def test_megamoe_gets_global_ids_the_share_and_the_group(tmp_path):
    for rank, seen in enumerate(all_good(run_ranks(hands_over_to_megamoe, 2, tmp_path))):
        assert seen == ("deepgemm_megamoe", True, (rank, 2), ("deepgemm_megamoe", True, True))


def test_every_dtype_that_a_rank_may_bring_has_a_name():
    from routed_experts.parallel import header

    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        assert header._READABLE["weights_dtype"](header.dtype_code(dtype))
