"""deepgemm on a GPU with the real kernel, where one loads without a network: numbers, repeats, graphs, refusals.

LOCAL_KERNELS=kernels-community/deep-gemm=FOLDER names a build for it.
"""

from __future__ import annotations

import pytest
import torch
from external_experts import E, error_of, plain, quantized, routed

import routed_experts as rx
from routed_experts.loaders import kernel_status, load_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def kernel():
    """The kernel; skips with the loader's own reason where there is none."""
    status = next(one for one in kernel_status() if one["kernel"] == "deepgemm")
    if status["needs_network"]:
        pytest.skip(f"DeepGEMM would have to be fetched: {status['source']}")
    try:
        return load_kernel("deepgemm")
    except rx.BackendUnavailable as error:
        pytest.skip(f"no DeepGEMM: {error}")


def on_device(experts):
    return experts.with_tensors({n: None if t is None else t.cuda() for n, t in experts._tensors.items()})


def run(experts, x, ids, weights):
    return rx.run_experts(x, ids, weights, experts, backend="deepgemm", expert_parallel=True)


def expected(experts, x, ids, weights):
    return rx.run_experts(x, ids, weights, experts, backend="eager", expert_parallel=True, allow_cast=True)


def fp8():
    """Experts in the FP8 that this device takes, and what they stand for."""
    return quantized("fp8_block", (128, 128), torch.cuda.get_device_capability()[0] >= 10)


@pytest.mark.parametrize("tokens", [1, 33, 700])
@pytest.mark.parametrize("flags", [{}, {"is_transposed": True}, {"bias": True}], ids=lambda f: "-".join(f) or "plain")
def test_bf16_equals_eager(flags, tokens):
    experts, call = plain(**flags), routed(tokens, sentinels=tokens > 1)
    with torch.no_grad():
        on_gpu = on_device(experts), *(t.cuda() for t in call)
        got = run(*on_gpu)
        assert error_of(got.cpu(), expected(experts, *call)) < 1e-2
        assert torch.equal(got, run(*on_gpu))


@pytest.mark.parametrize("tokens", [1, 33, 700])
def test_fp8_is_within_the_rounding_of_its_rows(tokens):
    (experts, stood_for), call = fp8(), routed(tokens, sentinels=tokens > 1)
    with torch.no_grad():
        got = run(on_device(experts), *(t.cuda() for t in call))
    # e4m3 rows, twice.
    assert error_of(got.cpu(), expected(stood_for, *call)) < 6e-2


def test_rows_nobody_owns_are_exactly_zero():
    x, ids, weights = (t.cuda() for t in routed(33))
    ids[::3], ids[1] = -1, E
    with torch.no_grad():
        got = run(on_device(plain()), x, ids, weights)
    assert (got[::3] == 0).all()
    assert (got[1] == 0).all()
    assert got.isfinite().all()


def test_a_graph_gives_the_same_bits():
    experts, call = on_device(plain()), [t.cuda() for t in routed(33)]
    with torch.no_grad():
        wanted, side = run(experts, *call), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run(experts, *call)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(experts, *call)
        got.zero_()
        graph.replay()
    assert torch.equal(got, wanted)


def test_a_gradient_is_refused():
    x, ids, weights = (t.cuda() for t in routed(3))
    with pytest.raises(rx.GradientUnsupported):
        run(on_device(plain()), x.requires_grad_(), ids, weights)
