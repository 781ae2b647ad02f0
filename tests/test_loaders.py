"""Where kernels of other projects come from, what a load does, and what is remembered of it."""

from __future__ import annotations

import dataclasses
import sys
import time
import types
from pathlib import Path

import pytest
from external_fakes import FakeDeepGemm, FakeSonicMoe

import routed_experts as rx
from routed_experts import errors
from routed_experts.loaders import KERNELS, bundles, kernel_facts, kernel_status, load_kernel, sources
from routed_experts.loaders import deepgemm_environment as around

VARIABLES = (
    *("LOCAL_KERNELS", "ROUTED_EXPERTS_PREFER_INSTALLED", "ROUTED_EXPERTS_KERNEL_REVISIONS", "USE_HUB_KERNELS"),
    *("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "KERNELS_CACHE", "HF_HUB_CACHE", "HF_KERNELS_CACHE"),
)


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("DG_JIT_CACHE_DIR", str(tmp_path / "dg"))
    rx.reset_kernels()
    yield
    rx.reset_kernels()


def fake_kernels(monkeypatch, get_kernel, **more):
    """A package `kernels` of our own."""
    module = types.ModuleType("kernels")
    module.get_kernel = get_kernel
    for name, value in more.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "kernels", module)


def write_variant(folder: Path, body: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(body)
    return folder


SONIC = (
    "from enum import Enum\n"
    "class enums:\n    class ActivationType(Enum):\n        SWIGLU = 1\n"
    "def moe_general_routing_inputs(*args, **kwargs): return 'local'\n"
)


def test_a_registered_module_comes_before_everything(monkeypatch, tmp_path):
    path = write_variant(tmp_path / "copy", SONIC)
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/sonic-moe={path}")
    assert load_kernel("sonicmoe").run() == "local"
    fake = FakeSonicMoe()
    rx.register_kernel("sonicmoe", fake)
    assert load_kernel("sonicmoe").module is fake
    rx.register_kernel("sonicmoe", None)
    assert load_kernel("sonicmoe").run() == "local"
    rx.register_kernel("kernels-community/sonic-moe", fake)
    rx.reset_kernels()
    assert load_kernel("sonicmoe").run() == "local"


def test_megamoe_is_found_in_a_registered_deepgemm():
    class Both(FakeDeepGemm):
        def get_symm_buffer_for_mega_moe(self): ...
        def transform_weights_for_mega_moe(self): ...
        def fp8_fp4_mega_moe(self): ...

    fake = Both()
    rx.register_kernel("deepgemm", fake)
    assert load_kernel("deepgemm_megamoe").module is fake
    other = Both()
    rx.register_kernel("deepgemm_megamoe", other)
    assert load_kernel("deepgemm_megamoe").module is other
    assert load_kernel("deepgemm").module is fake


def test_only_kernels_that_exist_are_registered():
    with pytest.raises(rx.UnknownBackend) as caught:
        rx.register_kernel("triton", FakeSonicMoe())
    assert "sonicmoe" in caught.value.needed


def test_an_installed_package_is_used_when_asked(monkeypatch, tmp_path):
    write_variant(tmp_path / "sonicmoe", SONIC.replace("local", "installed"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "sonicmoe", raising=False)
    fake_kernels(monkeypatch, lambda repository, revision=None: FakeSonicMoe())
    assert isinstance(load_kernel("sonicmoe").module, FakeSonicMoe)
    monkeypatch.setenv("ROUTED_EXPERTS_PREFER_INSTALLED", "1")
    assert load_kernel("sonicmoe").run() == "installed"
    copy = write_variant(tmp_path / "copy", SONIC)
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/sonic-moe={copy}")
    assert load_kernel("sonicmoe").run() == "local"


@pytest.mark.parametrize("nested", [False, True])
def test_a_variant_folder_needs_no_package(monkeypatch, tmp_path, nested):
    write_variant(tmp_path / "sonic_moe" if nested else tmp_path / "v", SONIC)
    path = tmp_path if nested else tmp_path / "v"
    monkeypatch.setenv("LOCAL_KERNELS", f"other/one=/nowhere:kernels-community/sonic-moe={path}")
    assert load_kernel("sonicmoe").run() == "local"
    assert str(path) in load_kernel("sonicmoe").source


def test_a_repository_is_left_to_the_package(monkeypatch, tmp_path):
    (tmp_path / "build" / "torch-cuda").mkdir(parents=True)
    seen = []
    fake_kernels(monkeypatch, None, get_local_kernel=lambda path: seen.append(path) or FakeSonicMoe())
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/sonic-moe={tmp_path}")
    load_kernel("sonicmoe")
    assert seen == [tmp_path]


@pytest.mark.parametrize("entry", ["kernels-community/sonic-moe", "=/x", "a=/x:", "a="])
def test_entries_that_cannot_be_read_are_named(monkeypatch, entry):
    monkeypatch.setenv("LOCAL_KERNELS", entry)
    with pytest.raises(rx.BackendUnavailable) as caught:
        load_kernel("sonicmoe")
    assert "entry" in caught.value.found
    assert kernel_facts()["sonicmoe"]["source_refusal"]["found"] == caught.value.found


def test_a_copy_that_is_not_there_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/sonic-moe={tmp_path / 'gone'}")
    with pytest.raises(rx.BackendUnavailable, match="gone"):
        load_kernel("sonicmoe")


class TestHub:
    def test_versions_of_the_package_that_differ_in_what_they_take(self, monkeypatch):
        seen = []

        def old(repo_id, revision="main"):
            seen.append((repo_id, {"revision": revision}))
            return FakeDeepGemm()

        def new(repo_id, *, revision=None, version=None, backend=None, trust_remote_code=False, check_arch=True):
            assert (revision is None) != (version is None)
            seen.append((repo_id, {"version": version, "check_arch": check_arch}))
            return FakeDeepGemm()

        for get_kernel in (old, new):
            fake_kernels(monkeypatch, get_kernel)
            rx.reset_kernels()
            load_kernel("deepgemm")
        repository = "kernels-community/deep-gemm"
        assert seen == [(repository, {"revision": "v2"}), (repository, {"version": 2, "check_arch": False})]

    def test_a_revision_can_be_required(self, monkeypatch):
        seen = []

        def get_kernel(repo_id, *, revision=None, version=None, check_arch=True):
            seen.append((revision, version))
            return FakeDeepGemm()

        fake_kernels(monkeypatch, get_kernel)
        monkeypatch.setenv("ROUTED_EXPERTS_KERNEL_REVISIONS", "kernels-community/deep-gemm=abc123, other/one=def")
        load_kernel("deepgemm")
        assert seen == [("abc123", None)]
        monkeypatch.setenv("ROUTED_EXPERTS_KERNEL_REVISIONS", "abc123")
        with pytest.raises(rx.BackendUnavailable, match="cannot be read"):
            load_kernel("deepgemm")

    @pytest.mark.parametrize("value", ["0", "false", "OFF"])
    def test_the_hub_can_be_switched_off(self, monkeypatch, value):
        fake_kernels(monkeypatch, lambda *a, **k: pytest.fail("the hub was asked"))
        monkeypatch.setenv("USE_HUB_KERNELS", value)
        with pytest.raises(rx.BackendUnavailable) as caught:
            load_kernel("deepgemm")
        assert caught.value.found == f"USE_HUB_KERNELS={value}"
        assert "LOCAL_KERNELS" in caught.value.hint

    def test_offline_fails_at_once_with_its_reason(self, monkeypatch):  # B59
        fake_kernels(monkeypatch, lambda *a, **k: time.sleep(60))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        before = time.monotonic()
        with pytest.raises(rx.BackendUnavailable) as caught:
            load_kernel("deepgemm")
        assert time.monotonic() - before < 1
        assert "HF_HUB_OFFLINE=1" in caught.value.found
        assert "cache" in caught.value.found

    @pytest.mark.parametrize("prefix", ["models", "kernels"])
    def test_offline_runs_what_the_cache_holds(self, monkeypatch, tmp_path, prefix):  # B59
        fake_kernels(monkeypatch, lambda repo_id, *, version=None: FakeDeepGemm())
        copy = tmp_path / "hf" / "hub" / f"{prefix}--kernels-community--deep-gemm"
        (copy / "snapshots" / "abc123").mkdir(parents=True)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        with pytest.raises(rx.BackendUnavailable):
            load_kernel("deepgemm")
        (copy / "refs").mkdir()
        (copy / "refs" / "v2").write_text("abc123")
        rx.reset_kernels()
        load_kernel("deepgemm")
        assert kernel_facts()["deepgemm"]["source"]
        monkeypatch.setenv("ROUTED_EXPERTS_KERNEL_REVISIONS", "kernels-community/deep-gemm=abc123")
        assert kernel_facts()["deepgemm"]["source"]
        monkeypatch.setenv("ROUTED_EXPERTS_KERNEL_REVISIONS", "kernels-community/deep-gemm=fff")
        assert kernel_facts()["deepgemm"]["source"] is None

    @pytest.mark.parametrize(
        "error",
        [
            FileNotFoundError("no build variant"),
            ValueError("publisher trust could not be verified"),
            RuntimeError("architecture"),
            ModuleNotFoundError("No module named 'einops'"),
            OSError("connection reset"),
            AssertionError(),
            KeyError("metadata"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_whatever_a_loader_raises_becomes_ours(self, monkeypatch, error):
        def get_kernel(repo_id, **kwargs):
            raise error

        fake_kernels(monkeypatch, get_kernel)
        with pytest.raises(rx.BackendUnavailable) as caught:
            load_kernel("sonicmoe")
        assert isinstance(caught.value, ImportError)
        assert caught.value.__cause__ is error
        assert type(error).__name__ in caught.value.found
        assert "kernels-community/sonic-moe at ep-support" in caught.value.found

    def test_no_package_at_all(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "kernels", None)
        with pytest.raises(rx.BackendUnavailable) as caught:
            load_kernel("deepgemm")
        assert isinstance(caught.value.__cause__, ModuleNotFoundError)


class TestMemory:
    def test_a_failed_load_is_tried_once_until_reset(self, monkeypatch):  # B60
        tries = []

        def get_kernel(repo_id, **kwargs):
            tries.append(repo_id)
            raise FileNotFoundError("no build variant")

        fake_kernels(monkeypatch, get_kernel)
        for _ in range(3):
            with pytest.raises(rx.BackendUnavailable, match="no build variant") as caught:
                load_kernel("deepgemm")
        assert len(tries) == 1
        assert isinstance(caught.value.__cause__, FileNotFoundError)
        rx.reset_kernels()
        with pytest.raises(rx.BackendUnavailable):
            load_kernel("deepgemm")
        assert len(tries) == 2

    def test_it_is_of_its_environment_and_sources(self, monkeypatch, tmp_path):
        fake_kernels(monkeypatch, lambda *a, **k: pytest.fail("the hub was asked"))
        monkeypatch.setenv("USE_HUB_KERNELS", "0")
        with pytest.raises(rx.BackendUnavailable):
            load_kernel("sonicmoe")
        monkeypatch.setenv("LOCAL_KERNELS", f"kernels-community/sonic-moe={write_variant(tmp_path / 'v', SONIC)}")
        assert load_kernel("sonicmoe").run() == "local"

    def test_a_success_is_kept_and_frozen(self):
        rx.register_kernel("sonicmoe", FakeSonicMoe())
        bundle = load_kernel("sonicmoe")
        assert load_kernel("sonicmoe") is bundle
        with pytest.raises(dataclasses.FrozenInstanceError):
            bundle.run = None

    def test_a_failure_is_a_fact_of_the_machine(self):
        rx.register_kernel("sonicmoe", types.SimpleNamespace())
        assert kernel_facts()["sonicmoe"] == {
            "source": "a module registered as 'sonicmoe'",
            "source_refusal": None,
            "load_refusal": None,
        }
        before = rx.current_facts()
        with pytest.raises(rx.BackendUnavailable):
            load_kernel("sonicmoe")
        assert "enums.ActivationType" in kernel_facts()["sonicmoe"]["load_refusal"]["found"]
        assert rx.current_facts() != before
        (row,) = [one for one in kernel_status() if one["kernel"] == "sonicmoe"]
        assert "enums.ActivationType" in row["problem"]
        rx.reset_kernels()
        assert kernel_facts()["sonicmoe"]["load_refusal"] is None


class Without:
    """A module without some of its symbols."""

    def __init__(self, module, *paths):
        self._module, self._paths = module, paths

    def __getattr__(self, name):
        inner = [path.partition(".")[2] for path in self._paths if path.partition(".")[0] == name]
        if "" in inner:
            raise AttributeError(name)
        value = getattr(self._module, name)
        return Without(value, *inner) if inner else value


@pytest.mark.parametrize("path", KERNELS["deepgemm"].symbols.values())
def test_each_symbol_of_deepgemm_is_missed(path):
    rx.register_kernel("deepgemm", Without(FakeDeepGemm(), path))
    with pytest.raises(rx.BackendUnavailable) as caught:
        load_kernel("deepgemm")
    assert caught.value.found.startswith(f"no {path} in ")
    assert "2.5.0" in caught.value.found


def test_a_build_whose_entry_point_lacks_an_argument_is_refused_at_the_load():
    class Older(FakeSonicMoe):
        __version__ = "0.1"

        def moe_general_routing_inputs(self, x, router_scores, is_inference_mode_enabled=False):
            pytest.fail("called")

    rx.register_kernel("sonicmoe", Older())
    with pytest.raises(errors.BackendUnavailable, match="lacks arguments") as caught:
        load_kernel("sonicmoe")
    assert "no moe_general_routing_inputs(concat_layout) in" in caught.value.found
    assert "version 0.1" in caught.value.found
    assert "kernels-community/sonic-moe" in caught.value.hint


@pytest.mark.parametrize(
    ("entry", "takes"),
    [(lambda concat_layout: None, True), (lambda **more: None, True), (getattr, True), (print, False)],
    ids=["by name", "any name", "a builtin that does not tell", "a builtin that tells"],
)
def test_an_argument_is_looked_for_in_the_signature(entry, takes):
    assert bundles._takes(entry, "concat_layout") is takes


def test_all_missing_symbols_are_named_at_once():
    paths = list(KERNELS["deepgemm"].symbols.values())
    rx.register_kernel("deepgemm", Without(FakeDeepGemm(), *paths))
    with pytest.raises(rx.BackendUnavailable) as caught:
        load_kernel("deepgemm")
    assert all(path in caught.value.found for path in paths)


def test_upstream_keeps_the_alignment_elsewhere():
    fake = Without(FakeDeepGemm(), "get_mk_alignment_for_contiguous_layout")
    fake._C = types.SimpleNamespace(get_mk_alignment_for_contiguous_layout=lambda: 64)
    rx.register_kernel("deepgemm", fake)
    assert load_kernel("deepgemm").mk_alignment() == 64


def test_symbols_are_those_of_the_published_builds():
    assert set(bundles.KERNELS) == {"deepgemm", "deepgemm_megamoe", "sonicmoe"}
    assert set(KERNELS["deepgemm"].symbols.values()) == {
        "m_grouped_bf16_gemm_nt_contiguous",
        "m_grouped_bf16_gemm_nn_contiguous",
        "m_grouped_fp8_fp4_gemm_nt_contiguous",
        "m_grouped_fp8_fp4_gemm_nn_contiguous",
        "fp8_fp4_gemm_nt",
        "utils.per_token_cast_to_fp8",
        "transform_sf_into_required_layout",
        "get_mk_alignment_for_contiguous_layout",
    }


class TestAroundDeepGemm:
    @pytest.fixture
    def toolkits(self, monkeypatch, tmp_path):
        from routed_experts.toolkit import forget_toolkits

        for name in ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER"):
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        forget_toolkits()
        real = tmp_path / "cuda-12.9"
        for name in ("nvcc", "cuobjdump"):
            (real / "bin").mkdir(parents=True, exist_ok=True)
            (real / "bin" / name).write_text("#!/bin/sh\n")
            (real / "bin" / name).chmod(0o755)
        (real / "include").mkdir()
        (real / "include" / "cuda.h").write_text("#define CUDA_VERSION 12090\n")
        (tmp_path / "usr" / "bin").mkdir(parents=True)
        (tmp_path / "usr" / "bin" / "nvcc").symlink_to(real / "bin" / "nvcc")
        yield real, tmp_path / "usr"
        forget_toolkits()

    def test_a_linked_compiler_is_handed_over_and_said(self, monkeypatch, toolkits, caplog):
        real, usr = toolkits
        monkeypatch.setenv("PATH", str(usr / "bin"))
        caplog.set_level("INFO", logger="routed_experts")
        rx.register_kernel("deepgemm", FakeDeepGemm())
        first = load_kernel("deepgemm")
        assert sources.os.environ["CUDA_HOME"] == str(real)
        assert f"CUDA_HOME={real}" in caplog.text
        assert str(usr) in caplog.text
        assert load_kernel("deepgemm") is first

    def test_nothing_is_handed_over_where_both_agree(self, monkeypatch, toolkits, caplog):
        real, _ = toolkits
        monkeypatch.setenv("PATH", str(real / "bin"))
        caplog.set_level("INFO", logger="routed_experts")
        rx.register_kernel("deepgemm", FakeDeepGemm())
        load_kernel("deepgemm")
        assert "CUDA_HOME" not in sources.os.environ
        assert "CUDA_HOME" not in caplog.text

    def test_other_kernels_are_left_alone(self, monkeypatch, toolkits):
        monkeypatch.setenv("PATH", str(toolkits[1] / "bin"))
        rx.register_kernel("sonicmoe", FakeSonicMoe())
        load_kernel("sonicmoe")
        assert "CUDA_HOME" not in sources.os.environ

    def test_a_missing_cuobjdump_is_warned_of_and_refuses_nothing(self, monkeypatch, toolkits, caplog):  # B54
        real, _ = toolkits
        (real / "bin" / "cuobjdump").unlink()
        monkeypatch.setenv("PATH", str(real / "bin"))
        rx.register_kernel("deepgemm", FakeDeepGemm())
        load_kernel("deepgemm")
        assert "no cuobjdump" in caplog.text
        assert rx.current_facts("cpu").toolkit["helpers"]["cuobjdump"] is None

    def test_a_build_that_does_not_need_it_is_not_warned_of(self, monkeypatch, toolkits, caplog):  # B54
        real, _ = toolkits
        (real / "bin" / "cuobjdump").unlink()
        monkeypatch.setenv("PATH", str(real / "bin"))
        new = FakeDeepGemm()
        new.__version__ = "2.8.1"
        rx.register_kernel("deepgemm", new)
        load_kernel("deepgemm")
        assert "cuobjdump" not in caplog.text

    @pytest.mark.parametrize("case", ["no home", "a file in the way", "a space"])
    def test_a_cache_that_cannot_be_written_gives_way(self, monkeypatch, tmp_path, case):  # B58
        monkeypatch.delenv("DG_JIT_CACHE_DIR")
        (tmp_path / "file").write_text("")
        home = {"no home": None, "a file in the way": tmp_path / "file", "a space": tmp_path / "my home"}[case]
        monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", str(home))
        rx.register_kernel("deepgemm", FakeDeepGemm())
        with pytest.warns(RuntimeWarning, match="DeepGEMM cannot keep") as caught:
            assert load_kernel("deepgemm").mk_alignment() == 128
        assert len(caught) == 1
        fresh = Path(around.os.environ["DG_JIT_CACHE_DIR"])
        assert fresh.is_dir()
        assert not any(letter.isspace() for letter in str(fresh))

    def test_a_cache_that_can_be_written_stays(self, monkeypatch, tmp_path):
        monkeypatch.delenv("DG_JIT_CACHE_DIR")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert around.settle_cache() == str(tmp_path / ".deep_gemm")
        assert "DG_JIT_CACHE_DIR" not in around.os.environ


def test_errors_of_the_package_survive_a_pickle():
    import pickle

    rx.register_kernel("sonicmoe", types.SimpleNamespace())
    with pytest.raises(errors.BackendUnavailable) as caught:
        load_kernel("sonicmoe")
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
