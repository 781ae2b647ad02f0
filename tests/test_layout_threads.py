"""Layouts and threads: the same bits on any number, a forked child, the interpreter released, interrupts."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from routed_experts import _core
from routed_experts.layout import build_layout

PAIRS = 2_000_000


@pytest.fixture
def restored_threads() -> Iterator[None]:
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    yield
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


def many_ids() -> torch.Tensor:
    return torch.randint(-1, 70, (PAIRS // 8, 8), generator=torch.Generator().manual_seed(7))


@pytest.mark.usefixtures("restored_threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    ids = many_ids()
    torch.set_num_threads(1)
    serial = build_layout(ids, 64, alignment=128)
    assert (
        serial.order[: int(serial.rows)]
        .long()
        .equal(
            torch.where((ids < 0) | (ids > 63), 64, ids).flatten().argsort(stable=True)[: int(serial.rows)]
        )
    )
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        parallel = build_layout(ids, 64, alignment=128)
        assert all(torch.equal(one, other) for one, other in zip(serial, parallel, strict=True))


# Torch's own thread pool does not survive a fork, so the child compares bytes without it.
FORK = """
import os, signal, torch
from routed_experts.layout import build_layout
torch.set_num_threads(4)
ids = torch.arange(2_000_000).remainder_(61).view(-1, 8)
read = lambda: [part.numpy().tobytes() for part in build_layout(ids, 61)[:5]]
before = read()
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if read() == before else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_can_sort_after_its_parent_did() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("restored_threads")
def test_other_threads_run_while_one_sorts() -> None:
    ids = many_ids()
    # Nobody is forced off the interpreter: whoever runs between two reads below was let in by the sort.
    sys.setswitchinterval(60)
    ticks, advanced, stop = [0], [], threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)

    def sort() -> None:
        out = torch.empty(2 * (PAIRS + 64), dtype=torch.int32)
        arguments = (ids.data_ptr(), 4, PAIRS, 64, 1, 1, out.data_ptr(), out.numel())
        for _ in range(5):
            before = ticks[0]
            _core.layout_build(*arguments)
            advanced.append(ticks[0] > before)

    counter = threading.Thread(target=count)
    sorters = [threading.Thread(target=sort) for _ in range(4)]
    for thread in (counter, *sorters):
        thread.start()
    for thread in sorters:
        thread.join(timeout=60)
    stop.set()
    counter.join(timeout=60)
    assert not any(thread.is_alive() for thread in (counter, *sorters))
    assert len(advanced) == 20
    assert sum(advanced) >= 15


def test_a_signal_gets_through_between_sorts() -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    ids = many_ids()

    def sort_until_interrupted() -> None:
        for _ in range(2000):
            build_layout(ids, 64)

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupted):
            sort_until_interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
