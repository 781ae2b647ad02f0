"""Compile the fused kernels for devices that are not here; run by test_fused_compile.py in a process of its own.

Prints one line a kernel: capability, name, bytes of shared memory, bytes the device has.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import routed_experts as rx
from routed_experts.kernels import fused
from routed_experts.kernels.choice import Device, choose, sizes_of
from routed_experts.kernels.launch import options_of
from routed_experts.kernels.memory import cut, places

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
SHARED = {80: 166912, 90: 232448, 120: 101376}


def type_of(argument):
    if isinstance(argument, torch.Tensor):
        return "*" + TYPES[argument.dtype]
    if isinstance(argument, int):
        return "i32"
    # Gluon's descriptors have a layout.
    layout = f",{argument.layout!r}" if hasattr(argument, "layout") else ""
    return f"tensordesc<{TYPES[argument.base.dtype]}{list(argument.block_shape)}{layout}>"


def compile_launch(one, capability):
    names = one.kernel.arg_names
    constants = dict(one.constants)
    signature = dict.fromkeys(names, "constexpr")
    aligned = {}
    for position, (name, argument) in enumerate(zip(names, one.arguments, strict=False)):
        if argument is None:
            constants[name] = None
            continue
        signature[name] = type_of(argument)
        if isinstance(argument, torch.Tensor):
            aligned[(position,)] = [["tt.divisibility", 16]]
    if getattr(one.kernel, "is_gluon", lambda: False)():
        # Imported here: older Tritons have no Gluon, nor a kernel that asks for it.
        from triton.experimental.gluon._runtime import GluonASTSource

        constants = {(names.index(name),): value for name, value in constants.items()}
        source = GluonASTSource(one.kernel, signature, constants, aligned)
    else:
        source = ASTSource(fn=one.kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options_of(one))


def launches(capability, dtype, tokens, slots, experts, hidden, inner):
    up, down = (torch.empty(*shape, dtype=dtype) for shape in ((experts, 2 * inner, hidden), (experts, hidden, inner)))
    weights = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
    x = torch.empty(tokens, hidden, dtype=dtype)
    ids, scale = torch.zeros(tokens, slots, dtype=torch.int64), torch.empty(tokens, slots)
    device = Device(divmod(capability, 10), SHARED[capability])
    sizes = sizes_of(weights, ids)
    choice = choose(weights, sizes, dtype, device)
    pieces = fused.pieces_of(choice, sizes, dtype)
    made = cut(torch.empty(places(pieces)[1], dtype=torch.uint8), pieces)
    return fused.launches_of(weights, choice, x, ids, scale, made, torch.empty_like(x))


def main():
    # 24 experts: unsorted; a mean of 3, 8, 21 and 170 rows an expert, one for each row of a table; and a large call.
    calls = [(1, 4), (18, 4), (48, 4), (128, 4), (1024, 4), (4096, 4)]
    for capability in map(int, sys.argv[1:]):
        for dtype, shape in ((torch.bfloat16, (24, 1024, 512)), (torch.float32, (24, 72, 40))):
            for tokens, slots in calls:
                for one in launches(capability, dtype, tokens, slots, *shape):
                    made = compile_launch(one, capability)
                    print(capability, one.kernel.__name__, made.metadata.shared, SHARED[capability])


if __name__ == "__main__":
    main()
