"""The CPU row of `fused`: values against the float64 oracle, bits against itself, threads, forks, the interpreter."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
import threading
import time

import pytest
import torch
from cases import BASE_CASE as BASE
from cases import build, pairwise
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import TOLERANCE, experts_oracle, relative_error

import routed_experts as rx
from routed_experts import fused_cpu
from routed_experts.gates import ACTIVATIONS

FORWARD = [case for case in pairwise() if case.dtype != torch.float64]


@pytest.fixture
def restored_threads():
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def call(experts, x, index, weights, **how):
    return rx.run_experts(x, index, weights, experts, backend="fused", **how)


def check(case, seed=0, **how):
    x, index, weights, tensors, flags = build(case, seed)
    wanted = experts_oracle(x, index, weights, tensors, flags, weights_on=case.weights_on)
    experts = rx.ExpertWeights(**tensors, **flags)
    out = call(experts, x, index, weights, weights_on=case.weights_on, **how)
    assert (out.dtype, out.shape, out.is_contiguous()) == (x.dtype, x.shape, True)
    assert relative_error(out, wanted) <= TOLERANCE[case.dtype]
    assert torch.equal(out, call(experts, x, index, weights, weights_on=case.weights_on, **how))
    return out


def layer(tokens=64, top_k=4, experts=16, hidden=256, inner=192, dtype=torch.bfloat16):
    case = dataclasses.replace(
        BASE, tokens=tokens, top_k=top_k, num_experts=experts, sizes=(hidden, inner), dtype=dtype, routing="sentinels"
    )
    x, index, weights, tensors, flags = build(case)
    return rx.ExpertWeights(**tensors, **flags), x, index, weights


@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_every_pair_of_factors_without_gradients(case, poisoned):
    poisoned()
    check(case)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(
    tokens=st.integers(1, 140),
    top_k=st.integers(1, 9),
    num_experts=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 130), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    flags=st.fixed_dictionaries(
        {name: st.booleans() for name in ("is_transposed", "is_concatenated", "bias", "strided")}
    ),
    seed=st.integers(0, 2**16),
)
def test_odd_sizes(tokens, top_k, num_experts, sizes, dtype, flags, seed):
    sampled = {"tokens": tokens, "top_k": top_k, "num_experts": num_experts, "sizes": sizes, "dtype": dtype, **flags}
    case = dataclasses.replace(BASE, routing="sentinels", gate="oai", **sampled)
    x, index, weights, tensors, gate = build(case, seed)
    out = call(rx.ExpertWeights(**tensors, **gate), x, index, weights)
    few = 4 if out.numel() < 64 else 1  # the largest of a few sums may itself be a cancelled one
    assert relative_error(out, experts_oracle(x, index, weights, tensors, gate)) <= few * TOLERANCE[dtype]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_concatenated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layouts_over_several_items(is_transposed, is_concatenated, dtype, poisoned):
    """Sizes beyond one block of columns, rows beyond one tile and one chunk."""
    poisoned()
    flags = {"is_transposed": is_transposed, "is_concatenated": is_concatenated, "dtype": dtype}
    check(dataclasses.replace(BASE, tokens=90, sizes=(200, 300), num_experts=2, bias=True, gate="oai", **flags))


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation, has_gate):
    g = torch.Generator().manual_seed(0)
    up = 3 * torch.randn(3, 16 * (1 + has_gate), 8, generator=g)
    down = torch.randn(3, 8, 16, generator=g)
    experts = rx.ExpertWeights(**{"gate_up_proj" if has_gate else "up_proj": up}, down_proj=down, activation=activation)
    x, index, weights = torch.randn(40, 8, generator=g), torch.randint(0, 3, (40, 2), generator=g), torch.rand(40, 2)
    wanted = rx.run_experts(x.double(), index, weights, double(experts), backend="eager")
    assert relative_error(call(experts, x, index, weights), wanted) < 2e-6


def double(experts):
    tensors = {name: t if t is None else t.double() for name, t in experts._tensors.items()}
    return experts.with_tensors(tensors, dtype=torch.float64, _choices={}, _prepared={}, _plans={})


def test_numbers_at_the_ends_of_their_range():
    """Large values become what torch makes of them: infinity and NaN are passed on, sentinels hide them."""
    experts = rx.ExpertWeights(gate_up_proj=torch.ones(2, 2, 1), down_proj=torch.ones(2, 1, 1))
    x = torch.tensor([[1e30], [-1e30], [float("nan")], [float("inf")], [0.0]])
    index, weights = torch.tensor([[0, 1]] * 5), torch.ones(5, 2)
    out = call(experts, x, index, weights).flatten()
    assert out[0] == float("inf")
    assert out[1] == 0
    assert out[2].isnan()
    assert out[3] == float("inf")
    assert out[4] == 0
    gone = torch.full_like(index, -1)
    assert torch.equal(call(experts, x, gone, torch.full_like(weights, float("nan"))), torch.zeros(5, 1))


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_with_weights_of_another_dtype(weights_dtype, dtype):
    x, index, weights, tensors, flags = build(dataclasses.replace(BASE, dtype=torch.float32, bias=True))
    tensors = {name: t.to(weights_dtype) for name, t in tensors.items()}
    wanted = experts_oracle(x, index, weights, {name: t.float() for name, t in tensors.items()}, flags)
    experts = rx.ExpertWeights(**tensors, **flags)
    with torch.autocast("cpu", dtype):
        out = call(experts, x, index, weights)
    assert out.dtype == torch.float32
    assert relative_error(out, wanted) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_routing_weights_of_any_dtype(dtype):
    experts, x, index, weights = layer(tokens=5, dtype=torch.float32)
    wanted = call(experts, x, index, weights.to(dtype).float())
    assert torch.equal(call(experts, x, index, weights.to(dtype)), wanted)


def test_unaligned_and_strided_memory():
    """Weights that begin at an odd byte of a mapped file, and none of whose strides is 1."""
    experts, x, index, weights = layer(dtype=torch.float32)
    wanted = call(experts, x, index, weights)
    odd = {name: None if t is None else odd_copy(t) for name, t in experts._tensors.items()}
    unaligned = rx.ExpertWeights(**{name: t for name, t in odd.items() if t is not None})
    assert unaligned.down_proj.data_ptr() % 4 == 1
    assert torch.equal(call(unaligned, odd_copy(x), index, odd_copy(weights)), wanted)
    spread = {name: torch.stack([t, t], -1)[..., 0] for name, t in odd.items() if t is not None}
    assert torch.equal(call(rx.ExpertWeights(**spread), x, index, weights), wanted)


def odd_copy(tensor):
    buffer = torch.empty(tensor.numel() * tensor.element_size() + 1, dtype=torch.uint8)
    address = torch.frombuffer(buffer.numpy(), dtype=tensor.dtype, count=tensor.numel(), offset=1)
    return address.view(tensor.shape).copy_(tensor)


def test_expert_of_stride_zero():
    """All experts are one matrix."""
    experts, x, index, weights = layer(dtype=torch.float32)
    shared = {name: t[:1].expand(t.shape) for name, t in experts._tensors.items() if t is not None}
    copied = {name: t.contiguous() for name, t in shared.items()}
    assert torch.equal(
        call(rx.ExpertWeights(**shared), x, index, weights), call(rx.ExpertWeights(**copied), x, index, weights)
    )


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_changes_no_bit(dtype, poisoned):
    poisoned()
    experts, x, index, weights = layer(hidden=512, inner=384, dtype=dtype)
    torch.set_num_threads(1)
    serial = call(experts, x, index, weights)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert torch.equal(call(experts, x, index, weights), serial)


def test_a_token_does_not_depend_on_the_others():
    """Tiles differ with the number of rows; sums do not."""
    experts, x, index, weights = layer()
    alone = [call(experts, x[t : t + 1], index[t : t + 1], weights[t : t + 1]) for t in range(8)]
    assert torch.equal(torch.cat(alone), call(experts, x, index, weights)[:8])


def test_gradients_are_those_of_grouped_mm():
    experts, x, index, weights = layer(tokens=5, dtype=torch.float32)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    outs = [
        rx.run_experts(leaf, index, weights, experts, backend=name)
        for leaf, name in zip(leaves, ("fused", "grouped_mm"), strict=True)
    ]
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)
    with torch.no_grad():
        assert torch.equal(call(experts, leaves[0], index, weights), call(experts, x, index, weights))


@pytest.mark.parametrize("gate", ["silu", "oai", "own", "no gate, relu2"])
@pytest.mark.parametrize("norm", [False, True])
def test_compiled_without_a_break(gate, norm):
    torch.compiler.reset()  # the variants share one lambda, and so its limit of recompilations
    case = dataclasses.replace(BASE, gate=gate, norm=norm, dtype=torch.float32)
    x, index, weights, tensors, flags = build(case)
    experts = rx.ExpertWeights(**tensors, **flags)
    compiled = torch.compile(lambda *inputs: call(experts, *inputs), fullgraph=True, backend="aot_eager")
    wanted = experts_oracle(x, index, weights, tensors, flags)
    assert relative_error(compiled(x, index, weights), wanted) < 1e-5
    assert compiled(x[:0], index[:0], weights[:0]).shape == (0, x.shape[1])
    leaf = x.clone().requires_grad_()
    compiled(leaf, index, weights).sum().backward()
    eager = x.clone().requires_grad_()
    call(experts, eager, index, weights).sum().backward()
    torch.testing.assert_close(leaf.grad, eager.grad)


def test_operators_obey_their_declarations():
    experts, x, index, weights = layer(tokens=3)
    tensors, text = experts.tensors(), fused_cpu.declared(experts)
    ops = torch.ops.routed_experts
    torch.library.opcheck(ops.fused_cpu.default, (x, index, weights, tensors, text), test_utils="test_faketensor")
    torch.library.opcheck(ops.fused_cpu_rows.default, (x, index, tensors, text, False), test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("is_transposed", "tokens", "name"),
    [(False, 1, "fused"), (False, 512, "fused"), (True, 64, "fused"), (True, 512, "grouped_mm")],
)
def test_auto_goes_to_the_faster_one(is_transposed, tokens, name):
    """The crossovers that were measured, at the sizes of Qwen1.5-MoE."""
    up, down = torch.empty(60, 2816, 2048, device="meta"), torch.empty(60, 2048, 1408, device="meta")
    if is_transposed:
        up, down = up.mT, down.mT
    experts = rx.ExpertWeights(gate_up_proj=up, down_proj=down, is_transposed=is_transposed)
    facts = rx.current_facts("cpu")
    assert rx.select_backend(experts, num_tokens=tokens, num_top_k=4, facts=facts).name == name


def test_weights_that_are_copied_take_no_plan_along():
    experts, x, index, weights = layer()
    wanted = call(experts, x, index, weights)
    assert experts._plans
    other = copy.deepcopy(experts)
    assert not other._plans
    assert torch.equal(call(other, x, index, weights), wanted)


FORK = """
import os, signal, torch, routed_experts as rx
torch.set_num_threads(4)
g = torch.Generator().manual_seed(0)
up, down = torch.randn(8, 512, 512, generator=g), torch.randn(8, 512, 256, generator=g)
experts = rx.ExpertWeights(gate_up_proj=up, down_proj=down)
x, ids, weights = torch.randn(6, 512, generator=g), torch.arange(12).view(6, 2) % 8, torch.ones(6, 2)
read = lambda: rx.run_experts(x, ids, weights, experts, backend="fused").numpy().tobytes()
before = read()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if read() == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_can_run_after_its_parent_did():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("restored_threads")
def test_other_threads_run_meanwhile():
    experts, x, index, weights = layer(hidden=1024, inner=512)
    torch.set_num_threads(1)
    call(experts, x, index, weights)
    # Nobody is forced off the interpreter: whoever runs between two reads below was let in by the call.
    sys.setswitchinterval(60)
    ticks, advanced, stop = [0], [], threading.Event()

    def count():
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    counter = threading.Thread(target=count)
    counter.start()
    try:
        plan = fused_cpu._plan(experts)
        given = (index.shape, fused_cpu._grid(x, fused_cpu.CODES), fused_cpu._grid(index, fused_cpu.ID_CODES))
        out = torch.empty_like(x)
        addresses = (experts.gate_up_proj.data_ptr(), 0, 0), (experts.down_proj.data_ptr(), 0, 0)
        for _ in range(20):
            before = ticks[0]
            plan.run(*given, fused_cpu._grid(weights, fused_cpu.CODES), addresses, out.data_ptr(), 1)
            advanced.append(ticks[0] > before)
    finally:
        stop.set()
        counter.join(timeout=60)
    assert sum(advanced) >= 8  # with the interpreter held it would be none


def test_codes_that_rust_does_not_know():
    sizes, plain = ((2, 2, 4, 2, 1, 0, 0),) * 2, (0, 0, None)
    silu = ("silu", False, True, None, None)
    scales = [(3, 0, (9, 1, 1, 1, 1, 1, False)), (3, 0, (0, 1, 1, 1, 0, 1, False)), (1, 0, (0, 1, 1, 1, 1, 1, False))]
    for wrong in [(9, 0, None), (0, 9, None), (3, 0, None), scales[0], scales[2]]:
        with pytest.raises(rx.DtypeError, match="dtype"):
            fused_cpu._core.CpuExperts(1, sizes, (plain, wrong), silu)
    with pytest.raises(rx.LayoutError, match="block"):
        fused_cpu._core.CpuExperts(1, sizes, (plain, scales[1]), silu)
    with pytest.raises(rx.LayoutError, match="activation"):
        fused_cpu._core.CpuExperts(1, sizes, (plain, plain), ("no such", False, True, None, None))
