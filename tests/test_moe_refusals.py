"""What run_experts refuses, and how: the error's class, what was found and what is needed."""

from __future__ import annotations

import pytest
import torch
from moe_inputs import RUNNABLE, inputs, make
from oracle import TOLERANCE, experts_oracle, relative_error
from torch import nn

import routed_experts as rx


@pytest.fixture(params=RUNNABLE)
def backend(request):
    return request.param


class TestRefusals:
    """Bad input: the contract's class, with found and needed, before anything runs."""

    def check(self, error, *args, **kwargs):
        with pytest.raises(error) as caught:
            rx.run_experts(*args, **kwargs)
        assert caught.value.found
        assert caught.value.needed
        return caught.value

    def test_three_axes(self):
        x, index, w = inputs()
        error = self.check(ValueError, x[None], index, w, make()[0])
        assert "(T, 8)" in error.needed

    def test_wrong_width(self):
        x, index, w = inputs(hidden=9)
        self.check(ValueError, x, index, w, make()[0])

    def test_scores_over_all_experts(self):
        x, index, _ = inputs()
        self.check(ValueError, x, index, torch.rand(5, 4), make()[0])

    def test_flat_ids(self):
        x, index, w = inputs()
        self.check(ValueError, x, index.reshape(-1), w.reshape(-1), make()[0])

    @pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
    def test_ids_that_are_no_ids(self, dtype):
        x, index, w = inputs()
        self.check(TypeError, x, index.to(dtype), w, make()[0])

    def test_integer_weights(self):
        x, index, w = inputs()
        self.check(TypeError, x, index, w.long(), make()[0])

    def test_no_tensor(self):
        x, index, w = inputs()
        self.check(TypeError, x, index.tolist(), w, make()[0])

    def test_no_experts(self):
        self.check(ValueError, *inputs(), nn.Linear(8, 8))
        self.check(ValueError, *inputs(), {"gate_up_proj": 1})

    @pytest.mark.parametrize("name", RUNNABLE)
    def test_dtypes_must_agree(self, name):
        x, index, w = inputs()
        error = self.check(TypeError, x, index, w, make(dtype=torch.bfloat16)[0], backend=name)
        assert "float32" in error.found
        assert "bfloat16" in error.found

    @pytest.mark.parametrize("name", RUNNABLE)
    def test_allow_cast(self, name):
        x, index, w = inputs()
        weights, tensors = make(dtype=torch.bfloat16)
        out = rx.run_experts(x, index, w, weights, backend=name, allow_cast=True)
        assert out.dtype == torch.float32
        assert relative_error(out, experts_oracle(x, index, w, tensors, {})) < TOLERANCE[torch.bfloat16]

    def test_meta_weights_name_the_parameter(self):
        """B69."""
        weights = rx.ExpertWeights(
            gate_up_proj=torch.empty(4, 12, 8, device="meta"), down_proj=torch.empty(4, 8, 6, device="meta")
        )
        error = self.check(RuntimeError, *inputs(), weights)
        assert "gate_up_proj on meta" in error.found
        assert "hidden_states on cpu" in error.found

    def test_unknown_weights_on(self):
        self.check(ValueError, *inputs(), make()[0], weights_on="both")

    @pytest.mark.parametrize("kind", [KeyError, ValueError])
    def test_unknown_backend(self, kind):
        error = self.check(kind, *inputs(), make()[0], backend="group_mm")
        assert "grouped_mm" in str(error)

    def test_out_of_range_in_checked_mode(self, backend):
        x, index, w = inputs()
        index[3, 1] = 9
        index[4, 0] = -2
        error = self.check(IndexError, x, index, w, make()[0], backend=backend, checked=True)
        assert isinstance(error, ValueError)
        assert error.found == "top_k_index[3, 1] = 9"
        assert "4" in error.needed
        rx.run_experts(x, index, w, make()[0], backend=backend, checked=True, expert_parallel=True)

    @pytest.mark.parametrize(("text", "raises"), [("1", True), ("0", False), ("", False)])
    def test_checked_from_the_environment(self, monkeypatch, text, raises):
        monkeypatch.setenv("ROUTED_EXPERTS_CHECKED", text)
        x, index, w = inputs()
        index[0, 0] = 4
        if raises:
            self.check(rx.ExpertIndexError, x, index, w, make()[0])
        else:
            rx.run_experts(x, index, w, make()[0])


@pytest.mark.parametrize("name", ["deepgemm", "deepgemm_megamoe", "sonicmoe"])
def test_external_kernels_are_refused_by_name(name):
    with pytest.raises((ImportError, ValueError, NotImplementedError)) as caught:
        rx.run_experts(*inputs(), make()[0], backend=name)
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint
