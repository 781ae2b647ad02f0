"""The weighted sum over the slots of a token."""

from __future__ import annotations

import triton
import triton.language as tl

from routed_experts.kernels.rows import load_expert

# fmt: off
# One group of arguments a line: kernels have many, and a line each would hide what they are.


@triton.jit
def _slot_term(
    slots, ids, weights, token_T, slot, column_N, num_tokens, num_pairs,
    K: tl.constexpr, E: tl.constexpr, HIDDEN: tl.constexpr,
    IDS_T: tl.constexpr, IDS_K: tl.constexpr, WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):
    """One slot's rows of some tokens times their weights; 0 for a sentinel, whatever its row and weight hold."""
    pair_T = token_T * K + slot
    expert_T = load_expert(ids, pair_T, K, E, IDS_T, IDS_K, token_T < num_tokens)
    mask = (expert_T >= 0)[:, None] & (column_N < HIDDEN)[None, :]
    row = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for split in tl.static_range(SPLIT):
        place = slots + (split * num_pairs.to(tl.int64) + pair_T)[:, None] * HIDDEN + column_N[None, :]
        # From L2: another program wrote it, perhaps during this launch.
        row += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
    if weights is not None:
        place_T = weights + token_T.to(tl.int64) * WEIGHTS_T + slot * WEIGHTS_K
        row *= tl.load(place_T, mask=expert_T >= 0, other=0.0).to(tl.float32)[:, None]
    return row


@triton.jit
def weigh_block(
    slots, ids, weights, out, token_T, column_N, num_tokens, num_pairs,
    K: tl.constexpr, E: tl.constexpr, HIDDEN: tl.constexpr,
    IDS_T: tl.constexpr, IDS_K: tl.constexpr, WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):
    """Weighted sum over the slots of some tokens, in slot order, in float32."""
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    # Unrolled, the loads of all slots are under way together; K can be large, and then it is a loop.
    if K <= 16:
        for slot in tl.static_range(K):
            total += _slot_term(slots, ids, weights, token_T, slot, column_N, num_tokens, num_pairs, K, E, HIDDEN,
                                IDS_T, IDS_K, WEIGHTS_T, WEIGHTS_K, BLOCK_T, BLOCK_N, SPLIT)
    else:
        for slot in range(K):
            total += _slot_term(slots, ids, weights, token_T, slot, column_N, num_tokens, num_pairs, K, E, HIDDEN,
                                IDS_T, IDS_K, WEIGHTS_T, WEIGHTS_K, BLOCK_T, BLOCK_N, SPLIT)
    place = out + token_T[:, None].to(tl.int64) * HIDDEN + column_N[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(token_T < num_tokens)[:, None] & (column_N < HIDDEN)[None, :])


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["ids", "weights"])
def weigh(
    slots, ids, weights, out, num_tokens,
    E: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, IDS_T: tl.constexpr, IDS_K: tl.constexpr,
    WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Weighted sum over the slots of every token, in slot order, in float32; None are weights of 1."""
    # Blocks of columns on axis 1: axis 0 is the one that may be long.
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weigh_block(slots, ids, weights, out, token_T, column_N, num_tokens, num_tokens * K,
                 K, E, HIDDEN, IDS_T, IDS_K, WEIGHTS_T, WEIGHTS_K, BLOCK_T, BLOCK_N, 1)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["ids", "weights"])
def weigh_gradient(
    grad, slots, ids, weights, slots_grad, weights_grad, num_pairs,
    E: tl.constexpr, K: tl.constexpr, HIDDEN: tl.constexpr, IDS_T: tl.constexpr, IDS_K: tl.constexpr,
    WEIGHTS_T: tl.constexpr, WEIGHTS_K: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Gradients of ``weigh``, from grad (T, H): of slots (S, H) and weights (T, K), either None; 0 for sentinels."""
    pair_S = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    exists = pair_S < num_pairs
    real = load_expert(ids, pair_S, K, E, IDS_T, IDS_K, exists) >= 0
    token_S = (pair_S // K).to(tl.int64)
    place_S = weights + token_S * WEIGHTS_T + (pair_S % K) * WEIGHTS_K
    weight_S = tl.load(place_S, mask=real, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_S,), dtype=tl.float32)
    for start in range(0, HIDDEN, BLOCK_N):
        column_N = start + tl.arange(0, BLOCK_N)
        inside = (column_N < HIDDEN)[None, :]
        value = tl.load(grad + token_S[:, None] * HIDDEN + column_N[None, :], mask=real[:, None] & inside, other=0.0)
        value = value.to(tl.float32)
        offset = pair_S[:, None].to(tl.int64) * HIDDEN + column_N[None, :]
        if weights_grad is not None:
            row = tl.load(slots + offset, mask=real[:, None] & inside, other=0.0).to(tl.float32)
            total += tl.sum(value * row, axis=1)
        if slots_grad is not None:
            scaled = (value * weight_S[:, None]).to(slots_grad.dtype.element_ty)
            tl.store(slots_grad + offset, scaled, mask=exists[:, None] & inside)
    if weights_grad is not None:
        tl.store(weights_grad + pair_S, total.to(weights_grad.dtype.element_ty), mask=exists)
