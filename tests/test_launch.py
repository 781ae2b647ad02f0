"""Launch plans: what they refuse, what reaches the driver, and what the kernels compute on a device."""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from routed_experts import errors
from routed_experts._core import LaunchPlan


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


needs_no_driver = pytest.mark.skipif(has_driver(), reason="there is a CUDA driver; this is about machines without")
# Not the address of a function: no plan of these tests gets as far as asking the driver for it.
SOME = 4096
PARAMS = [("pointer", 0), ("int32", -1), ("int64", 1 << 40), ("float32", 0x3FC00000)]


def kernel(function=SOME, grid=(1, 1, 1), threads=128, shared=0, dependent=False, params=PARAMS):
    return (function, grid, threads, shared, dependent, params)


def check_whole(error):
    assert error.found
    assert error.needed
    assert error.hint


@needs_no_driver
def test_without_a_driver_the_plan_is_refused():
    for _ in range(2):
        with pytest.raises(errors.BackendUnavailable, match=r"the CUDA driver cannot be loaded") as caught:
            LaunchPlan([kernel()])
        check_whole(caught.value)
        assert "libcuda.so.1" in caught.value.needed


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"function": 0}, "kernel 1 .* null function"),
        ({"grid": (0, 1, 1)}, "kernel 1 .* grid x out of range"),
        ({"grid": (2**31, 1, 1)}, "grid x"),
        ({"grid": (1, 65536, 1)}, "grid y"),
        ({"grid": (1, 1, -1)}, "grid z"),
        ({"threads": 0}, "threads"),
        ({"threads": 1025}, "threads"),
        ({"shared": -1}, "shared bytes"),
        ({"params": [("pointer", 64)]}, "does not fit its kind, pointer"),
        ({"params": [("int32", 2**31)]}, "does not fit its kind, int32"),
        ({"params": [("float32", -1)]}, "does not fit its kind, float32"),
        ({"params": [("float64", 0)]}, "unknown kind"),
        ({"params": [("int32", 0)] * 65}, "too many parameters"),
    ],
    ids=str,
)
def test_what_no_kernel_has_is_refused_before_a_driver_is_needed(bad, words):
    with pytest.raises(errors.LayoutError, match=words) as caught:
        LaunchPlan([kernel(), kernel(**bad)])
    check_whole(caught.value)


def test_a_plan_has_kernels():
    with pytest.raises(errors.LayoutError, match="no kernels"):
        LaunchPlan([])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"function": -1}, OverflowError),
        ({"function": "kernel"}, TypeError),
        ({"grid": (1, 1)}, ValueError),
        ({"grid": (1, 1, 1.5)}, TypeError),
        ({"dependent": 1}, TypeError),
        ({"params": [("int64", 2**63)]}, OverflowError),
        ({"params": [("int64", None)]}, TypeError),
        ({"params": [(0, "pointer")]}, TypeError),
        ({"params": None}, TypeError),
    ],
    ids=str,
)
def test_types(bad, error):
    with pytest.raises(error):
        LaunchPlan([kernel(**bad)])


# Run in a process whose libcuda is fake_libcuda.c, which prints what reaches it; then one line for each refusal.
SCRIPT = """
import ctypes
from routed_experts import errors
from routed_experts._core import LaunchPlan

keep = []

def function(*sizes):
    keep.append((ctypes.c_size_t * (len(sizes) + 1))(len(sizes), *sizes))
    return ctypes.addressof(keep[-1])

def attempt(call, *args):
    try:
        call(*args)
    except Exception as error:
        print(type(error).__name__, getattr(error, "found", ""), sep=": ")

params = [("pointer", 1), ("int32", -1), ("int64", -2), ("float32", 0x3FC00000), ("pointer", 0)]
first = (function(8, 4, 8, 4, 8, 8, 8), (2, 3, 4), 128, 1000, False, params)
second = (function(8, 8), (2147483647, 65535, 65535), 1024, 0, True, [("pointer", 0)])
third = (*second[:2], 13, *second[3:])

plan = LaunchPlan((first, second))
plan.launch(7, (0xABC, 2**64 - 1))
plan.launch(stream=0, pointers=(1, 2, 3))
attempt(plan.launch, 0, (1,))
attempt(plan.launch, 0, (1, "2"))
attempt(plan.launch, 0, [1, 2])
attempt(plan.launch, 0, (1, -2))
attempt(LaunchPlan([second, third, first]).launch, 0, (5, 6))
for sizes in [(8, 4), (4,), (), (8, 8, 8, 8)]:
    attempt(LaunchPlan, [(function(*sizes), (1, 1, 1), 32, 0, False, [("pointer", 0)])])
"""

SEEN = """
plain 2,3,4 128,1,1 1000 7 ffffffffffffffff ffffffff fffffffffffffffe 3fc00000 abc 0 0
dependent 2147483647,65535,65535 1024,1,1 0 7 abc 0
plain 2,3,4 128,1,1 1000 0 2 ffffffff fffffffffffffffe 3fc00000 1 0 0
dependent 2147483647,65535,65535 1024,1,1 0 0 1 0
LayoutError: 1 pointers
TypeError:
TypeError:
OverflowError:
dependent 2147483647,65535,65535 1024,1,1 0 0 5 0
DeviceError: CUDA_ERROR_INVALID_HANDLE (400): invalid resource handle
BackendUnavailable: parameters of [8, 4] bytes in the compiled kernel
BackendUnavailable: parameters of [4] bytes in the compiled kernel
BackendUnavailable: parameters of [] bytes in the compiled kernel
BackendUnavailable: parameters of [8, 8, 8, 8] bytes in the compiled kernel
"""


@needs_no_driver
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_what_reaches_the_driver(tmp_path):
    source = Path(__file__).with_name("fake_libcuda.c")
    build = ["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source]
    subprocess.run(build, check=True)
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-u", "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == SEEN.strip().splitlines()


def add_and_scale(dependent=False, of_sum=True):
    """A plan of y = x + 3, then z = y * 1.5 (x * 1.5 unless of_sum) over 1000 floats; slots x, y, z.

    The compiled kernels come along: a plan does not keep them loaded.
    """
    import triton
    from launch_kernels import add, scale

    x = torch.empty(1000, device="cuda")
    compiled = [jit[(4,)](x, x, value, 1000, BLOCK=256) for jit, value in ((add, 3), (scale, 1.5))]
    source = 1 if of_sum else 0
    bits = struct.unpack("<I", struct.pack("<f", 1.5))[0]
    values = [
        [("pointer", 0), ("pointer", 1), ("int32", 3), ("int32", 1000)],
        [("pointer", source), ("pointer", 2), ("float32", bits), ("int32", 1000)],
    ]
    kernels = [
        (ck.function, (triton.cdiv(1000, 256), 1, 1), 32 * ck.metadata.num_warps, ck.metadata.shared, late, params)
        for ck, params, late in zip(compiled, values, (False, dependent), strict=True)
    ]
    return LaunchPlan(kernels), compiled


def tensors(seed=0):
    x = torch.randn(1000, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    return x, torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))


def launch(plan, *arguments):
    plan.launch(torch.cuda.current_stream().cuda_stream, tuple(t.data_ptr() for t in arguments))


def on_gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    return pytest.mark.gpu(skip(test))


@on_gpu
def test_kernels_of_a_plan_compute():
    plan, _compiled = add_and_scale()
    for seed in range(3):
        x, y, z = tensors(seed)
        launch(plan, x, y, z)
        assert torch.equal(y, x + 3)
        assert torch.equal(z, (x + 3) * 1.5)


@on_gpu
def test_dependent_kernels_compute():
    plan, _compiled = add_and_scale(dependent=True, of_sum=False)
    x, y, z = tensors()
    launch(plan, x, y, z)
    assert torch.equal(y, x + 3)
    assert torch.equal(z, x * 1.5)


@on_gpu
@pytest.mark.parametrize("dependent", [False, True])
def test_a_captured_plan_replays_with_new_inputs(dependent):
    plan, _compiled = add_and_scale(dependent=dependent, of_sum=not dependent)
    x, y, z = tensors()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(plan, x, y, z)
    for value in (1.0, -2.0):
        x.fill_(value)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, x + 3)
        assert torch.equal(z, (x if dependent else y) * 1.5)


@on_gpu
def test_other_parameters_than_compiled_are_unavailable():
    _plan, compiled = add_and_scale()
    function, threads = compiled[0].function, 32 * compiled[0].metadata.num_warps
    for params in ([("pointer", 0), ("pointer", 1), ("int64", 3), ("int32", 1000)], [("pointer", 0)]):
        with pytest.raises(errors.BackendUnavailable, match="declares other parameters") as caught:
            LaunchPlan([(function, (4, 1, 1), threads, 0, False, params)])
        check_whole(caught.value)


@on_gpu
def test_a_thread_that_has_not_used_the_device_can_launch():
    plan, _compiled = add_and_scale()
    x, y, z = tensors()
    arguments = torch.cuda.current_stream().cuda_stream, (x.data_ptr(), y.data_ptr(), z.data_ptr())
    with ThreadPoolExecutor(1) as threads:
        threads.submit(plan.launch, *arguments).result()
    assert torch.equal(z, (x + 3) * 1.5)


@on_gpu
def test_what_the_device_cannot_launch_names_the_kernel():
    _plan, compiled = add_and_scale()
    params = [("pointer", 0), ("pointer", 1), ("int32", 3), ("int32", 1000)]
    good = (compiled[0].function, (4, 1, 1), 128, 0, False, params)
    x, y, _z = tensors()
    plan = LaunchPlan([good, (*good[:3], 2**30, *good[4:])])
    with pytest.raises(errors.DeviceError, match="kernel 1") as caught:
        launch(plan, x, y)
    assert "CUDA_ERROR_INVALID_VALUE" in caught.value.found
    torch.cuda.synchronize()
    assert torch.equal(y, x + 3)
