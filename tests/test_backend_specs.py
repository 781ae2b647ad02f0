"""The rules of the table, tried on machines that are not here."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from selection_helpers import CHEAP, LOCAL, ask, machine, make_experts, quantized, ready

import routed_experts as rx
from routed_experts import errors
from routed_experts.backends.spec import Spec
from routed_experts.facts import Facts

EXTERNAL = ("deepgemm", "deepgemm_megamoe", "sonicmoe")


def specs_of(name: str) -> list[Spec]:
    return ready(importlib.import_module(f"routed_experts.backends.{name}").BACKEND)


def refusal(name: str, facts: Facts, **changes: Any) -> errors.RoutedExpertsError:
    with pytest.raises(errors.RoutedExpertsError) as caught:
        ask(specs_of(name), facts, name, **changes)
    assert caught.value.found
    assert caught.value.needed
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize("name", EXTERNAL)
def test_a_kernel_from_nowhere_is_the_first_thing_the_machine_lacks(name):
    facts = machine((7, 5), packages={}, kernels={})
    refused = refusal(name, facts, **({"process_group": True} if name == "deepgemm_megamoe" else {}), **QUANT[name])
    assert type(refused) is errors.BackendUnavailable
    assert refused.found.startswith("kernels is not installed; SM75")
    assert f'register_kernel("{name}", module)' in refused.hint


# Weights that a backend takes, where it does not take plain ones.
QUANT = {name: {} for name in EXTERNAL}
QUANT["deepgemm_megamoe"] = {"experts": make_experts(quantization=quantized("mxfp4", torch.float8_e8m0fnu))}

TABLE = {
    (7, 5): (),
    (8, 0): (),
    (8, 9): (),
    (9, 0): ("deepgemm", "sonicmoe"),
    (10, 0): ("deepgemm", "deepgemm_megamoe", "sonicmoe"),
    (10, 3): ("deepgemm", "deepgemm_megamoe", "sonicmoe"),
    (11, 0): ("sonicmoe",),
    (12, 0): ("sonicmoe",),
    (12, 1): ("sonicmoe",),
}


@pytest.mark.parametrize("name", EXTERNAL)
@pytest.mark.parametrize(("capability", "able"), TABLE.items(), ids=str)
def test_capabilities(capability, able, name):
    changes = {"process_group": name == "deepgemm_megamoe"}
    experts = QUANT[name].get("experts")
    if name in able:
        assert ask(specs_of(name), machine(capability), name, experts, **changes)["name"] == name
        return
    refused = refusal(name, machine(capability), **QUANT[name], **changes)
    assert type(refused) is errors.BackendUnavailable
    assert "SM{}{}".format(*capability) in refused.found


@pytest.mark.parametrize("name", ["deepgemm", "sonicmoe"])
def test_auto_counts_a_kernel_only_if_no_network_is_needed(name):
    on_the_hub = machine(kernels={})
    assert ask(specs_of(name), on_the_hub, name)["name"] == name
    with pytest.raises(errors.BackendUnavailable, match="auto fetches nothing"):
        ask(specs_of(name), on_the_hub)
    assert ask(specs_of(name), machine())["name"] == name


def test_auto_never_takes_megamoe():
    experts = QUANT["deepgemm_megamoe"]["experts"]
    with pytest.raises(errors.BackendUnavailable, match="auto never picks it"):
        ask(specs_of("deepgemm_megamoe"), machine((10, 0)), "auto", experts, process_group=True)


@pytest.mark.parametrize("name", EXTERNAL)
def test_a_load_that_failed_and_a_hub_that_is_closed_are_reasons(name):
    said = {"found": "no moe in it", "needed": "a build with moe", "hint": "get one"}
    changes = {"process_group": True, **QUANT[name]}
    for key in ("source_refusal", "load_refusal"):
        kernels = {name: {**LOCAL, "source": None, key: said}}
        refused = refusal(name, machine((10, 0), kernels=kernels), **changes)
        assert type(refused) is errors.BackendUnavailable
        assert (refused.found, refused.needed) == ("no moe in it", "a build with moe")


def test_slices_and_expanded_stacks_are_refused_by_deepgemm():
    whole = torch.empty(16, 256, 256, dtype=torch.bfloat16, device="meta")
    for part in (whole[::2], whole[:1].expand(8, -1, -1)):
        refused = refusal("deepgemm", machine(), experts=make_experts(gate_up_proj=part))
        assert type(refused) is errors.UnsupportedExperts
        assert "slice" in refused.found


@pytest.mark.parametrize(("name", "capability"), [("deepgemm", (9, 0)), ("deepgemm", (10, 0)), ("sonicmoe", (9, 0))])
def test_a_machine_with_everything_is_accepted(name, capability):
    assert ask(specs_of(name), machine(capability), name)["name"] == name


@pytest.mark.parametrize(
    ("name", "changes", "error", "found"),
    [
        ("sonicmoe", {"has_gate": False}, errors.UnsupportedExperts, "without a gate"),
        ("sonicmoe", {"has_post_expert_norm": True}, errors.UnsupportedExperts, "norm"),
        ("sonicmoe", {"own_gate": True}, errors.UnsupportedExperts, "gate function"),
        ("sonicmoe", {"swiglu_limit": 0.0}, errors.UnsupportedExperts, "swiglu_limit=0"),
        ("sonicmoe", {"activation": "relu2"}, errors.UnsupportedExperts, "relu2"),
        ("sonicmoe", {"activation": None}, errors.UnsupportedExperts, "unknown formula"),
        ("sonicmoe", {"dtype": "float32"}, errors.UnsupportedExperts, "float32"),
        ("deepgemm", {"training": True}, errors.GradientUnsupported, "gradient"),
        ("deepgemm", {"has_post_expert_norm": True}, errors.UnsupportedExperts, "norm"),
        ("deepgemm", {"device_span": 2}, errors.DeviceError, "2 devices"),
        (
            "deepgemm_megamoe",
            {"experts": make_experts(quantization=quantized("mxfp4", torch.float8_e8m0fnu))},
            errors.UnsupportedExperts,
            "no process group",
        ),
        (
            "deepgemm_megamoe",
            {"training": True, "process_group": True},
            errors.GradientUnsupported,
            "gradient",
        ),
        ("deepgemm_megamoe", {"process_group": True}, errors.UnsupportedScheme, "unquantized"),
        ("fused", {"dtype": "float64"}, errors.UnsupportedExperts, "float64"),
    ],
)
def test_the_module_is_judged_before_the_machine(name, changes, error, found):
    # Neither a GPU nor a package: had the machine been asked first, these would be BackendUnavailable.
    refused = refusal(name, Facts(device="cpu", torch="2.13.0"), **changes)
    assert type(refused) is error
    assert found in refused.found


@pytest.mark.parametrize(
    ("capability", "nvcc", "found", "needed"),
    [
        ((9, 0), "12.1", "nvcc 12.1 in /opt/cuda", "12.3"),  # B49
        ((10, 0), "12.8", "nvcc 12.8 in /opt/cuda", "12.9"),  # B50
        ((10, 0), (12, 8), "nvcc 12.8", "12.9"),
        ((10, 0), None, "unreadable", "12.9"),
        ((12, 0), "13.0", "SM120", "SM9x or SM10x"),
        ((8, 0), "13.0", "SM80", "SM9x or SM10x"),
    ],
)
def test_deepgemm_states_toolkit_and_architecture(capability, nvcc, found, needed):
    refused = refusal("deepgemm", machine(capability, nvcc))
    assert type(refused) is errors.BackendUnavailable
    assert isinstance(refused, ImportError)
    assert found in refused.found
    assert needed in refused.needed


@pytest.mark.parametrize("nvcc", ["12.9", "12.10", "13.0", (13, 0)])  # B50, B51
def test_toolkits_new_enough_for_blackwell(nvcc):
    assert ask(specs_of("deepgemm"), machine((10, 0), nvcc), "deepgemm")["name"] == "deepgemm"


def test_a_runtime_without_compiler_is_no_toolkit():
    runtime = {"root": "/usr/local/cuda", "nvcc": None, "version": (13, 0)}
    assert "no nvcc in /usr/local/cuda" in refusal("deepgemm", machine(toolkit=runtime)).found
    assert "no CUDA toolkit" in refusal("deepgemm", machine(toolkit={"root": None})).found


@pytest.mark.parametrize(
    ("capability", "fmt", "scale", "accepted"),
    [
        ((9, 0), "fp8_block", torch.float32, True),
        ((9, 0), "fp8_block", torch.float8_e8m0fnu, True),
        ((9, 0), "mxfp4", torch.float8_e8m0fnu, False),
        ((10, 0), "fp8_block", torch.float32, False),
        ((10, 0), "fp8_block", torch.uint8, True),
        ((10, 0), "mxfp4", torch.float8_e8m0fnu, True),
    ],
)
def test_deepgemm_scales_by_architecture(capability, fmt, scale, accepted):
    experts = make_experts(quantization=quantized(fmt, scale))
    if accepted:
        assert ask(specs_of("deepgemm"), machine(capability), "deepgemm", experts)["name"] == "deepgemm"
        return
    refused = refusal("deepgemm", machine(capability), experts=experts)
    assert isinstance(refused, ValueError)
    assert isinstance(refused, NotImplementedError)
    assert fmt in refused.found


def test_static_scales_are_refused_when_selecting():  # B42
    experts = make_experts(quantization=quantized("fp8_block", torch.float32, "static"))
    plain = Spec(name="reference", cost={"cuda": CHEAP})
    with pytest.raises(errors.UnsupportedScheme) as caught:
        ask([*specs_of("deepgemm"), plain], machine(), "deepgemm", experts)
    assert "static" in caught.value.found
    assert "dynamic" in caught.value.needed
    assert "reference" in caught.value.hint


def test_deepgemm_refuses_other_blocks_and_biases_of_quantized_experts():
    for block in ((64, 64), None):
        experts = make_experts(quantization=quantized("fp8_block", torch.float32, block=block))
        assert type(refusal("deepgemm", machine(), experts=experts)) is errors.UnsupportedExperts
    experts = make_experts(quantization=quantized("fp8_block", torch.float32))
    for change in ({"has_bias": True}, {"is_transposed": True}):
        refused = refusal("deepgemm", machine(), experts=experts, **change)
        assert type(refused) is errors.UnsupportedExperts
        assert "for fp8_block" in refused.needed
        assert ask(specs_of("deepgemm"), machine(), "deepgemm", **change)["name"] == "deepgemm"


@pytest.mark.parametrize(
    ("capability", "reads_e4m3"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)]
)
def test_e4m3_is_converted_by_the_device_from_sm89_on(capability, reads_e4m3):  # B41
    """Below, `fused` runs too, and its kernels take the bytes apart themselves."""
    experts = make_experts(quantization=quantized("fp8_block", torch.float32))
    assert ask(specs_of("fused"), machine(capability), "fused", experts)["path"] == "triton_fp8"
    choice = pytest.importorskip("routed_experts.kernels.choice", reason="Triton is not installed")
    weights = rx.quantize_experts(
        rx.ExpertWeights(gate_up_proj=torch.ones(2, 256, 128), down_proj=torch.ones(2, 128, 128)), "fp8_block"
    )
    sizes = choice.sizes_of(weights, torch.zeros(3, 2, dtype=torch.long))
    chosen = choice.choose(weights, sizes, torch.bfloat16, choice.Device(capability, 101376))
    assert chosen.reads_e4m3 is reads_e4m3


@pytest.mark.parametrize(
    ("missing", "found"), [("c_compiler", "no C compiler"), ("python_headers", "no Python.h")], ids=str
)
def test_triton_needs_what_it_builds_its_launcher_with(missing, found):
    facts = machine(**{missing: None})
    refused = refusal("fused", facts)
    assert type(refused) is errors.BackendUnavailable
    assert refused.found == found
    assert "CC" in refused.hint
    specs = [*specs_of("fused"), *specs_of("deepgemm")]
    assert ask(specs, facts)["name"] == "deepgemm"


def test_fused_sorts_no_more_experts_than_it_can():
    refused = refusal("fused", machine(), experts=make_experts(num_experts=4097))
    assert type(refused) is errors.UnsupportedExperts
    assert "num_experts 4097" in refused.found
    assert ask(specs_of("fused"), machine(), "fused", make_experts(num_experts=4096))["path"] == "triton"


def test_an_old_package_stops_only_its_own_backend():  # B61
    facts = machine(packages={"kernels": "0.17.2", "nvidia-cutlass-dsl": "4.2.1", "apache-tvm-ffi": "0.1.10"})
    specs = [*specs_of("sonicmoe"), *specs_of("deepgemm")]
    refused = next(one for one in ask(specs, facts)["decisions"] if one["backend"] == "sonicmoe")
    assert refused["found"] == "nvidia-cutlass-dsl 4.2.1"
    assert refused["needed"] == "nvidia-cutlass-dsl 4.6 or newer"
    assert "pip install" in refused["hint"]
    assert ask(specs, facts)["name"] == "deepgemm"


def test_sonicmoe_runs_exact_gelu_only_by_name():  # B15
    specs, gelu = specs_of("sonicmoe"), make_experts(activation_name="gelu")
    with pytest.raises(errors.BackendUnavailable):
        ask(specs, machine(), "auto", gelu)
    assert ask(specs, machine(), "sonicmoe", gelu)["path"] == "approximate-gelu"
    assert ask(specs, machine(), "auto", make_experts(activation_name="gelu_tanh"))["path"] == ""


def grouped() -> list[Spec]:
    """Return rows like those of a backend with torch's grouped GEMM and a loop behind it."""
    fast = {"cpu": CHEAP, "cuda": CHEAP}
    slow = {kind: CHEAP.__class__(call_us=50.0, bytes_per_us=1e9, flops_per_us=1e9) for kind in fast}
    table = [
        {"torch_min": "2.8", "torch_below": "2.9", "capability_min": (9, 0), "capability_below": (9, 1)},
        {"torch_min": "2.9", "torch_below": "2.10", "capability_min": (8, 0), "capability_below": (12, 0)},
        {"torch_min": "2.10", "capability_min": (8, 0)},
    ]
    aligned = {"kind": "weights_aligned", "bytes": 16}
    half = {"kind": "dtype", "any_of": ["bfloat16"]}
    floats = {"kind": "dtype", "any_of": ["float32", "bfloat16", "float16"]}
    on_cpu = (
        floats,
        aligned,
        {"kind": "torch", "min": "2.9"},
        {"kind": "when", "compiling": True, "then": half},
    )
    on_cuda = (half, aligned, {"kind": "torch_capability", "rows": table})
    loop = ({"kind": "when", "device": "cuda", "then": {"kind": "not_capturing"}},)
    return [
        Spec(name="grouped", path="torch", devices=("cpu",), requires=on_cpu, cost=fast),
        Spec(name="grouped", path="torch", devices=("cuda",), requires=on_cuda, cost=fast),
        Spec(name="grouped", path="loop", requires=loop, cost=slow),
    ]


@pytest.mark.parametrize(
    ("version", "capability", "path"),
    [
        ("2.8.0", (12, 0), "loop"),  # B64
        ("2.9.1", (12, 0), "loop"),
        ("2.10.0", (8, 0), "torch"),
        ("2.10.0", (12, 0), "torch"),
        ("2.8.0", (9, 0), "torch"),
        ("2.8.0", (8, 0), "loop"),
        ("2.8.0", None, "loop"),  # B65
        ("2.9.0+cpu", None, "torch"),
    ],
)
def test_grouped_path_by_torch_and_capability(version, capability, path):
    cpu = Facts(device="cpu", torch=version)
    facts = cpu if capability is None else machine(capability, torch=version)
    assert ask(grouped(), facts, "grouped")["path"] == path


def test_grouped_path_by_dtype_alignment_and_state():
    cpu = Facts(device="cpu", torch="2.13.0")
    assert ask(grouped(), cpu, dtype="float32")["path"] == "torch"
    assert ask(grouped(), cpu, dtype="float32", compiling=True)["path"] == "loop"
    assert ask(grouped(), cpu, dtype="float64")["path"] == "loop"
    assert ask(grouped(), cpu, capturing=True, dtype="float64")["path"] == "loop"
    odd = make_experts(gate_up_proj=torch.empty(8, 254, 256, dtype=torch.bfloat16, device="meta"))
    assert ask(grouped(), cpu, experts=odd)["path"] == "loop"
    with pytest.raises(errors.BackendUnavailable, match="captured") as caught:
        ask(grouped(), machine(), "grouped", dtype="float32", capturing=True)
    assert "CUDA graph" in caught.value.found
