"""Compile the kernels of quantized experts for devices that are not here; as compile_kernels.py."""

from __future__ import annotations

import itertools
import sys

import torch
from compile_kernels import SHARED, TYPES, compile_launch

import routed_experts as rx
from routed_experts.kernels import fused
from routed_experts.kernels.choice import Device, choose, sizes_of
from routed_experts.kernels.memory import cut, places

TYPES |= {torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8"}
SHARED |= {89: 101376}
E8M0 = torch.float8_e8m0fnu


def stack(scheme, experts, rows, columns, halves):
    width = columns // 2 if scheme.is_fp4 else columns
    scale = torch.full(scheme.scale_shape(experts, rows, columns, halves), 127, dtype=torch.uint8)
    weight = torch.zeros(experts, rows, width, dtype=torch.uint8).view(scheme.weight_dtype)
    return weight, scale.float() / 127 if scheme.scale_dtype == torch.float32 else scale.view(E8M0)


def launches(capability, multiprocessors, scheme, dtype, tokens, slots, experts, hidden, inner):
    up, up_scale = stack(scheme, experts, 2 * inner, hidden, True)
    down, down_scale = stack(scheme, experts, hidden, inner, False)
    weights = rx.ExpertWeights(
        gate_up_proj=up,
        down_proj=down,
        gate_up_proj_scale_inv=up_scale,
        down_proj_scale_inv=down_scale,
        quantization=scheme,
    )
    x = torch.empty(tokens, hidden, dtype=dtype)
    ids, routing = torch.zeros(tokens, slots, dtype=torch.int64), torch.empty(tokens, slots)
    sizes = sizes_of(weights, ids)
    device = Device(divmod(capability, 10), SHARED[capability], multiprocessors)
    choice = choose(weights, sizes, dtype, device, may_quantize=True)
    pieces = fused.pieces_of(choice, sizes, dtype)
    made = cut(torch.empty(places(pieces)[1], dtype=torch.uint8), pieces)
    return fused.launches_of(weights, choice, x, ids, routing, made, torch.empty_like(x))


SCHEMES = [
    rx.Quantization("fp8_block"),
    rx.Quantization("fp8_block", block=(32, 48), scale_dtype=E8M0),
    rx.Quantization("mxfp8"),
    rx.Quantization("fp8_tensor"),
    rx.Quantization("mxfp4"),
]


def main():
    # 24 experts: unsorted; a mean of 3, 8 and 21 rows an expert; and a large call.
    calls = [(1, 4), (18, 4), (48, 4), (128, 4), (8192, 4)]
    done = set()
    for capability in map(int, sys.argv[1:]):
        for scheme in SCHEMES:
            for dtype, shape, few in ((torch.bfloat16, (24, 1024, 512), 5), (torch.float32, (24, 96, 64), 2)):
                for (tokens, slots), multiprocessors in itertools.product(calls[:few], (0, 132)):
                    for one in launches(capability, multiprocessors, scheme, dtype, tokens, slots, *shape):
                        key = (capability, one.kernel.__name__, str(one.constants), one.num_warps, one.num_stages)
                        if key in done or one.kernel.__module__.endswith("layout_kernels"):
                            continue
                        done.add(key)
                        made = compile_launch(one, capability)
                        print(capability, one.kernel.__name__, made.metadata.shared, SHARED[capability], flush=True)


if __name__ == "__main__":
    main()
