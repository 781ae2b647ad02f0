"""The short way of a call whose like went through before: taken when nothing has changed, left when anything has."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from moe_inputs import inputs, make

import routed_experts as rx
from routed_experts import module_weights, moe, prepared
from routed_experts.calling import is_expert_parallel
from routed_experts.errors import (
    DeviceError,
    DtypeError,
    ExpertIndexError,
    GradientUnsupported,
    LayoutError,
    RoutedExpertsError,
    UnknownBackend,
    UnsupportedExperts,
)

NAME = "mine"


@pytest.fixture
def long_ways(monkeypatch):
    """The calls that went the long way."""
    calls = []

    def check(*args):
        calls.append(args)
        return original(*args)

    original = moe.check
    monkeypatch.setattr(moe, "check", check)
    return calls


@pytest.fixture
def register():
    """Register backends for one test."""
    names = []

    def add(fn, name=NAME, **spec):
        rx.register_backend(name, fn, spec=rx.Spec(name=name, auto=False, **spec))
        names.append(name)

    yield add
    for name in set(names) & set(rx.backends()):
        rx.unregister_backend(name)


def tokens_back(experts, x, index, weights):
    return x.clone()


@pytest.mark.parametrize("backend", ["auto", None, "eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_the_second_call_is_short_and_gives_the_same_bits(long_ways, backend, weights_on):
    experts, _ = make()
    first, second = (rx.run_experts(*inputs(), experts, backend=backend, weights_on=weights_on) for _ in range(2))
    assert len(long_ways) == 1
    assert torch.equal(first, second)


def test_no_tokens_and_no_slots(long_ways, register):
    register(lambda *_: pytest.fail("there is nothing to run"))
    experts, _ = make()
    for shape in ((0, 2), (3, 0)):
        for _ in range(2):
            x, index, weights = torch.ones(shape[0], 8), torch.zeros(shape, dtype=torch.long), torch.ones(shape)
            out = rx.run_experts(x, index, weights, experts, backend=NAME)
            assert out.shape == x.shape
            assert not out.any()
    assert len(long_ways) == 2


def change(position, value):
    """A call that differs in one tensor."""
    tensors = list(inputs())
    tensors[position] = value(tensors[position])
    return tensors


WRONG = [
    (change(0, lambda x: x[:, :7]), {}, LayoutError),
    (change(0, lambda x: x[:4]), {}, LayoutError),
    (change(0, lambda x: x[None]), {}, LayoutError),
    (change(0, lambda x: x.half()), {}, DtypeError),
    (change(0, lambda x: x.long()), {}, DtypeError),
    (change(0, lambda x: x.to("meta")), {}, DeviceError),
    (change(0, lambda x: x.tolist()), {}, DtypeError),
    (change(1, lambda index: index[:, :1]), {}, LayoutError),
    (change(1, lambda index: index.float()), {}, DtypeError),
    (change(1, lambda index: index.to("meta")), {}, DeviceError),
    (change(2, lambda weights: weights.T), {}, LayoutError),
    (change(2, lambda weights: weights.long()), {}, DtypeError),
    (change(2, lambda weights: weights.to("meta")), {}, DeviceError),
    (inputs(), {"weights_on": "both"}, LayoutError),
    (inputs(), {"weights_on": ["output"]}, LayoutError),
    (inputs(), {"backend": "other"}, UnknownBackend),
    (inputs(), {"backend": ["mine"]}, DtypeError),
    (change(1, lambda index: index + 9), {"checked": True}, ExpertIndexError),
]


@pytest.mark.parametrize(("tensors", "options", "error"), WRONG)
def test_refusals_are_neither_kept_nor_passed_over(tensors, options, error, register):
    register(tokens_back)
    call = {"backend": NAME, **options}
    said = []
    experts, _ = make()
    for _ in range(2):
        for _ in range(2):
            with pytest.raises(error) as caught:
                rx.run_experts(*tensors, experts, **call)
            said.append(str(caught.value))
        rx.run_experts(*inputs(), experts, backend=NAME)
        rx.run_experts(*inputs(), experts, backend=NAME)
    assert len(set(said)) == 1


def test_a_cast_that_was_allowed_is_not_allowed_for_ever():
    experts, _ = make(dtype=torch.bfloat16)
    for _ in range(2):
        assert rx.run_experts(*inputs(), experts, allow_cast=True).dtype == torch.float32
    with pytest.raises(DtypeError):
        rx.run_experts(*inputs(), experts)


def test_autocast_is_entered_and_left(register):
    seen = []

    def record(experts, x, index, weights):
        seen.append(x.dtype)
        return x.float()

    register(record)
    experts, _ = make()
    for _ in range(2):
        assert rx.run_experts(*inputs(), experts, backend=NAME).dtype == torch.float32
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert rx.run_experts(*inputs(), experts, backend=NAME).dtype == torch.float32
    assert seen == [torch.float32, torch.bfloat16, torch.float16] * 2


@pytest.mark.parametrize("position", [0, 2, "gate_up_proj", "down_proj"])
def test_gradients_wanted_and_not(position, register):
    register(tokens_back, requires=({"kind": "no_gradient"},))
    experts, tensors = make()
    call = inputs()
    tensor = tensors[position] if isinstance(position, str) else call[position]
    for _ in range(2):
        rx.run_experts(*call, experts, backend=NAME)
        tensor.requires_grad_()
        with pytest.raises(GradientUnsupported):
            rx.run_experts(*call, experts, backend=NAME)
        with torch.no_grad():
            rx.run_experts(*call, experts, backend=NAME)
        with torch.inference_mode():
            rx.run_experts(*call, experts, backend=NAME)
        tensor.requires_grad_(False)


def test_gradients_flow_after_calls_without():
    experts, tensors = make()
    call = inputs()
    for _ in range(2):
        rx.run_experts(*call, experts)
    tensors["down_proj"].requires_grad_()
    for _ in range(2):
        rx.run_experts(*call, experts).sum().backward()
    assert tensors["down_proj"].grad.any()


def test_the_registry_may_change(register):
    experts, _ = make()
    register(tokens_back)
    assert torch.equal(rx.run_experts(*inputs(), experts, backend=NAME), inputs()[0])
    rx.unregister_backend(NAME)
    with pytest.raises(UnknownBackend):
        rx.run_experts(*inputs(), experts, backend=NAME)
    register(lambda experts, x, index, weights: x * 2)
    assert torch.equal(rx.run_experts(*inputs(), experts, backend=NAME), inputs()[0] * 2)


def test_the_environment_is_read_every_time(monkeypatch):
    experts, _ = make()
    x, index, weights = inputs()
    index[0, 0] = 9
    rx.run_experts(x, index, weights, experts)
    monkeypatch.setenv("ROUTED_EXPERTS_CHECKED", "1")
    for _ in range(2):
        with pytest.raises(ExpertIndexError):
            rx.run_experts(x, index, weights, experts)
        rx.run_experts(x, index, weights, experts, checked=False)
        rx.run_experts(x, index, weights, experts, expert_parallel=True)
    monkeypatch.setenv("ROUTED_EXPERTS_CHECKED", "0")
    rx.run_experts(x, index, weights, experts)
    monkeypatch.setenv("ROUTED_EXPERTS_BATCHED_BYTES", "many")
    with pytest.raises(LayoutError, match="BATCHED_BYTES"):
        rx.run_experts(x, index, weights, experts)


def test_other_options_are_other_calls(long_ways, register):
    register(tokens_back, requires=({"kind": "process_group"},))
    experts, _ = make()
    for _ in range(2):
        rx.run_experts(*inputs(), experts, backend=NAME, process_group=object())
        rx.run_experts(*inputs(), experts, backend="eager")
        rx.run_experts(*inputs(), experts, backend="eager", expert_parallel=True)
        with pytest.raises((UnsupportedExperts, ValueError)) as caught:
            rx.run_experts(*inputs(), experts, backend=NAME)
        assert isinstance(caught.value, RoutedExpertsError)
    assert len(long_ways) == 3 + 2


def test_what_a_backend_gives_is_checked_every_time(register):
    given = []
    register(lambda *_: given.pop(0))
    experts, _ = make()
    x, index, weights = inputs()
    given += [x, x.double(), torch.nn.Parameter(x), x[:4], None, x]
    for _ in range(3):
        assert rx.run_experts(x, index, weights, experts, backend=NAME).dtype == x.dtype
    for found in ("shape", "NoneType"):
        with pytest.raises(LayoutError, match=NAME) as caught:
            rx.run_experts(x, index, weights, experts, backend=NAME)
        assert found in caught.value.found
    assert torch.equal(rx.run_experts(x, index, weights, experts, backend=NAME), x)


class Tagged(torch.Tensor):
    """A subclass, of which nothing is presumed."""


@pytest.mark.parametrize("position", [0, 1, 2])
def test_subclasses_go_the_long_way(position, long_ways):
    experts, _ = make()
    wanted = rx.run_experts(*inputs(), experts)
    for _ in range(2):
        out = rx.run_experts(*change(position, lambda t: t.as_subclass(Tagged)), experts)
        assert torch.equal(out.as_subclass(torch.Tensor), wanted)
    assert len(long_ways) == 3
    assert len(experts._prepared) == 1


def test_what_is_kept_is_plain_data():
    experts, _ = make(grad=True)
    module = rx.RoutedExperts(4, 8, 6)
    bound = [experts, module_weights.resolve(module)]
    for one in (experts, module):
        rx.run_experts(*inputs(), one)
        rx.run_experts(*inputs(), one, backend="eager", weights_on="input")
    plain = (str, bool, int, bytes, type(None), torch.dtype, torch.device)
    for weights in bound:
        keys = list(weights._prepared)
        assert len(keys) == 2
        for key in keys:
            flat = [part for item in key for part in (item if isinstance(item, tuple) else (item,))]
            assert all(isinstance(part, plain) for part in flat)


def test_ever_new_shapes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(prepared, "_MOST_PREPARED", 4)
    experts, _ = make()
    for tokens in range(12):
        rx.run_experts(*inputs(tokens), experts)
        assert len(experts._prepared) <= 4


def test_threads_share_what_is_prepared(monkeypatch, register):
    monkeypatch.setattr(prepared, "_MOST_PREPARED", 2)
    experts, _ = make()
    calls = [inputs(tokens) for tokens in range(1, 6)]
    wanted = [rx.run_experts(*call, experts) for call in calls]
    wrong = []

    def work():
        for _ in range(30):
            for call, right in zip(calls, wanted, strict=True):
                if not torch.equal(rx.run_experts(*call, experts), right):
                    wrong.append(call)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(10):
        register(tokens_back, f"mine{number}")
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_start_with_nothing_found_out(duplicate):
    experts, _ = make()
    wanted = rx.run_experts(*inputs(), experts)
    experts._plans["handle"] = threading.Lock()
    other = duplicate(experts)
    assert other._plans == other._prepared == other._choices == {}
    assert torch.equal(rx.run_experts(*inputs(), other), wanted)
    assert experts._plans


def test_a_prepared_call_compiles_too():
    experts, _ = make()
    with torch.no_grad():
        wanted = rx.run_experts(*inputs(), experts)
        compiled = torch.compile(lambda *call: rx.run_experts(*call, experts), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs()), wanted)


def test_transforms_of_torch_func(register):
    register(lambda experts, x, index, weights: x * weights.sum(-1, keepdim=True))
    experts, _ = make()
    x, index, weights = inputs()

    def call(x, weights):
        return rx.run_experts(x, index, weights, experts, backend=NAME)

    batch, wanted = torch.stack([x, 2 * x]), torch.ones_like(x) * weights.sum(-1, keepdim=True)
    for _ in range(2):
        torch.testing.assert_close(torch.func.vmap(call, (0, None))(batch, weights)[1], 2 * call(x, weights))
        torch.testing.assert_close(torch.func.grad(lambda x: call(x, weights).sum())(x), wanted)


class Silent(torch.nn.Module):
    pass


class Split(Silent):
    _is_expert_parallel = True


class Computed(Silent):
    _is_expert_parallel = property(lambda self: 0)


class Passing(Silent):
    def __getattr__(self, name):
        return name == "_is_expert_parallel" or super().__getattr__(name)


@pytest.mark.parametrize("default", [True, False])
def test_whether_experts_are_split(default):
    assert is_expert_parallel(Silent(), default) is default
    assert is_expert_parallel(Split(), default) is True
    assert is_expert_parallel(Computed(), default) is False
    assert is_expert_parallel(Passing(), default) is True
    for said in (True, False):
        module = Silent()
        module._is_expert_parallel = said
        assert is_expert_parallel(module, default) is said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_capture_is_another_call(register):
    register(tokens_back, requires=({"kind": "not_capturing"},))
    tensors = {name: tensor.cuda() for name, tensor in make()[1].items()}
    experts, call = rx.ExpertWeights(**tensors), [tensor.cuda() for tensor in inputs()]
    for _ in range(2):
        rx.run_experts(*call, experts, backend=NAME)
        with pytest.raises(RoutedExpertsError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            rx.run_experts(*call, experts, backend=NAME)
