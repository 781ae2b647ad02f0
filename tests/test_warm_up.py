"""Warming up loads a kernel and runs its backend on stand-ins; doctor says where kernels come from."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner
from external_fakes import FakeDeepGemm, FakeSonicMoe

import routed_experts as rx
from routed_experts import moe, selection
from routed_experts.backends import deepgemm
from routed_experts.cli import main
from routed_experts.loaders import kernel_status
from routed_experts.loaders.warmup import stand_in, warm_up_kernel

SHAPE = (4, 2, 256, 128)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path))
    for name in ("USE_HUB_KERNELS", "HF_HUB_OFFLINE", "LOCAL_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    rx.reset_kernels()
    yield
    rx.reset_kernels()


def test_shapes_are_run_once_each(monkeypatch):
    fake = FakeDeepGemm()
    rx.register_kernel("deepgemm", fake)
    monkeypatch.setattr(deepgemm, "capability_major", lambda device: 9)
    # Selection would ask for a GPU.
    monkeypatch.setattr(selection, "choose", lambda *args, **kwargs: None)
    monkeypatch.setattr(moe, "run_experts", lambda x, i, w, e, *, backend, process_group: deepgemm.run(e, x, i, w))
    schemes = (None, rx.Quantization("fp8_block", scale_dtype=torch.float32))
    for scheme in schemes:
        assert list(warm_up_kernel("deepgemm", SHAPE, (1, 64), quantization=scheme, device="cpu")) == [1, 64]
    assert len(fake.calls) == 8
    assert {call[1].dtype for call in fake.calls} == {torch.bfloat16, torch.float8_e4m3fn}


def test_without_tokens_it_only_loads():
    rx.register_kernel("sonicmoe", FakeSonicMoe())
    assert warm_up_kernel("sonicmoe", SHAPE, (), device="cpu") == {}
    assert next(one for one in kernel_status() if one["kernel"] == "sonicmoe")["loaded"]


def test_it_says_what_is_missing(monkeypatch):
    monkeypatch.setenv("USE_HUB_KERNELS", "0")
    for name in ("deepgemm", "deepgemm_megamoe", "sonicmoe"):
        with pytest.raises(rx.BackendUnavailable, match="USE_HUB_KERNELS=0"):
            warm_up_kernel(name, SHAPE, (1,), device="cpu")
    rx.register_kernel("deepgemm", FakeDeepGemm())
    with pytest.raises(rx.BackendUnavailable, match="device cpu"):
        warm_up_kernel("deepgemm", SHAPE, (1,), device="cpu")


@pytest.mark.parametrize("fmt", ["fp8_block", "mxfp4"])
def test_stand_ins_are_experts(fmt):
    experts = stand_in(SHAPE, rx.Quantization(fmt), torch.device("cpu"))
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (4, 256, 128)
    x, ids = torch.zeros(3, 256).bfloat16(), torch.zeros(3, 2, dtype=torch.long)
    assert (rx.run_experts(x, ids, torch.ones(3, 2), experts, backend="eager") == 0).all()


def doctor(**environment: str) -> str:
    result = CliRunner().invoke(main, ["doctor"], env=environment)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())


def test_doctor_says_where_kernels_come_from():
    assert "kernels-community/deep-gemm at version 2 on the hub" in doctor(COLUMNS="200")
    rx.register_kernel("sonicmoe", FakeSonicMoe())
    assert "a module registered as 'sonicmoe'" in doctor(COLUMNS="200")
    warm_up_kernel("sonicmoe", SHAPE, ())
    assert "loaded" in doctor(COLUMNS="200")
    assert "USE_HUB_KERNELS=0" in doctor(COLUMNS="200", USE_HUB_KERNELS="0")
