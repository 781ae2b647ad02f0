"""Every family of transformers' mixture models, tiny and at unit gain, against its own eager experts.

One model a family stays built while its tests run: its logits, and the gradients of the embeddings and of every
parameter of the experts, are compared on each backend that can run it here. The same comparison must see
experts that are wrong by a twentieth.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from family_compare import GRADIENT, NAMED, OUTPUT, assert_equal, backends_for, error, errors, run, scaled, tolerance
from family_configs import build, has_own_gate, installed
from torch import Tensor, nn
from torch.nn import functional

import routed_experts as rx
from routed_experts.parts import parts_of

# A norm follows the experts, so that nothing behind it sees a factor on all of their output.
NORM_FOLLOWS = {"axk1", "beam", "diffusion_gemma", "gemma4", "kolibri1", "muse_spark"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Subject:
    """A model of one family, and what its own experts give."""

    family: str
    model: nn.Module
    wanted: dict[str, Tensor]

    def experts(self) -> list[nn.Module]:
        return [experts.module for experts in parts_of(self.model).experts()]


@pytest.fixture(scope="module", params=installed())
def subject(request: pytest.FixtureRequest) -> Subject:
    model = build(request.param)
    return Subject(request.param, model, run(model))


def test_twenty_families_at_least():
    assert len(installed()) >= 20


def test_every_backend_equals_the_models_own_eager(subject):
    assert subject.wanted["output"].abs().max() < 5
    for backend in backends_for(subject.experts()[0]):
        rx.set_experts_implementation(subject.model, backend)
        assert set(rx.get_experts_implementation(subject.model).values()) == {backend}
        assert_equal(run(subject.model), subject.wanted)
    rx.set_experts_implementation(subject.model, "transformers:eager")
    assert torch.equal(run(subject.model)["output"], subject.wanted["output"])


def test_every_registered_name_equals_the_models_own_eager(subject, registered):
    for name in ("routed_experts", *(f"routed_experts_{backend}" for backend in sorted(NAMED))):
        subject.model.set_experts_implementation(name)
        assert set(subject.model.get_experts_implementation().values()) == {name}
        assert_equal(run(subject.model), subject.wanted)
    subject.model.set_experts_implementation("eager")


@pytest.fixture
def registered() -> Iterator[None]:
    rx.register_with_transformers()
    yield
    rx.unregister_from_transformers()


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_experts_off_by_a_twentieth_are_seen(subject, share):
    """The control: the comparison fails, at the experts and in the logits and gradients that follow."""
    rx.set_experts_implementation(subject.model, "grouped_mm")
    with scaled(subject.experts(), share):
        seen = errors(run(subject.model), subject.wanted)
    rx.set_experts_implementation(subject.model, "transformers:eager")
    at_experts = [seen[found.path] for found in parts_of(subject.model).experts() if found.path in seen]
    assert min(at_experts) > 100 * OUTPUT
    if share < 1 or subject.family not in NORM_FOLLOWS:
        assert seen["output"] > 5 * OUTPUT
        assert max(value for name, value in seen.items() if tolerance(name) == GRADIENT) > 5 * GRADIENT


def test_experts_alone_on_large_inputs_and_repeated_experts(subject):
    """Inputs that reach the clamps of the gates, one expert twice in a token, and idle experts."""
    module = subject.experts()[0]
    x, index, weights = alone(module)
    with torch.no_grad():
        wanted = module(x, index, weights)
        for backend in backends_for(module, index.shape[1]):
            found = rx.run_experts(x, index, weights, module, backend=backend)
            assert error(found, wanted) < OUTPUT, backend


def alone(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Large hidden states (7, H), ids (7, 3) and weights for one experts module."""
    generator = torch.Generator().manual_seed(5)
    hidden = module.down_proj.shape[-1 if module.is_transposed else -2]
    index = torch.randint(0, module.num_experts - 1, (7, 3), generator=generator)
    index[0] = 1
    return 16 * torch.randn(7, hidden, generator=generator), index, torch.rand(7, 3, generator=generator)


@pytest.mark.parametrize("family", [name for name in installed() if has_own_gate(name)])
def test_the_gate_of_a_family_is_the_one_that_runs(family):
    """The control of the test above: there, the stock gate in place of the family's own gives other numbers."""
    module = next(parts_of(build(family)).experts()).module
    x, index, weights = alone(module)
    with torch.no_grad():
        wanted = module(x, index, weights)
        module._apply_gate = lambda up: functional.silu(up.chunk(2, -1)[0]) * up.chunk(2, -1)[1]
        assert error(rx.run_experts(x, index, weights, module), wanted) > 100 * OUTPUT
