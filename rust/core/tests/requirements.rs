//! Every sentence of the vocabulary, met and not met, on machines that are not here.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use routed_experts_core::error::ErrorKind::{self, *};
use routed_experts_core::facts::{Facts, Problem};
use routed_experts_core::requirements::Requirement;
use serde_json::{Value, json};

/// A Hopper machine with everything installed; `change` overrides top-level fields.
fn facts(change: &Value) -> Facts {
    merged(
        json!({"device": "cuda", "capability": [9, 0], "device_name": "H200", "device_count": 1,
            "torch": "2.10.0+cu130", "python": "3.12.4",
            "packages": {"kernels": "0.17.2", "nvidia-cutlass-dsl": "4.6.0", "deep_gemm": null},
            "c_compiler": "/usr/bin/gcc", "python_headers": "/usr/include/python3.12",
            "toolkit": {"root": "/opt/cuda", "nvcc": "/opt/cuda/bin/nvcc", "version": "12.9", "helpers": {}}}),
        change,
    )
}

/// Plain gated bfloat16 experts; `change` overrides top-level fields.
fn problem(change: &Value) -> Problem {
    merged(
        json!({"num_tokens": 8, "num_top_k": 2, "num_experts": 8, "hidden_size": 256, "intermediate_size": 128,
            "dtype": "bfloat16", "weight_dtype": "bfloat16", "has_gate": true, "is_transposed": false,
            "is_concatenated": true, "has_bias": false, "activation": "silu", "own_gate": false,
            "swiglu_limit": null, "swiglu_alpha": null, "has_post_expert_norm": false, "quantization": null,
            "weight_alignment": 64, "training": false, "compiling": false, "capturing": false,
            "expert_parallel": false, "process_group": false, "device_span": 1, "scratch_limit_bytes": 1000}),
        change,
    )
}

fn merged<T: serde::de::DeserializeOwned>(mut base: Value, change: &Value) -> T {
    for (key, value) in change.as_object().unwrap() {
        base[key] = value.clone();
    }
    serde_json::from_value(base).unwrap()
}

fn requirement(text: &Value) -> Requirement {
    serde_json::from_value(text.clone()).unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// The sentence holds for the base case and is refused after the change, with these words among the found ones.
fn refuses(sentence: &Value, fact: &Value, ask: &Value, kind: ErrorKind, found: &str) {
    let requirement = requirement(sentence);
    assert_eq!(
        requirement.check(&facts(&json!({})), &problem(&json!({}))),
        Ok(()),
        "{sentence} on the base case"
    );
    refuses_only(sentence, fact, ask, kind, found);
}

fn refuses_only(sentence: &Value, fact: &Value, ask: &Value, kind: ErrorKind, found: &str) {
    let rejection =
        requirement(sentence).check(&facts(fact), &problem(ask)).expect_err(&sentence.to_string());
    assert_eq!(rejection.kind, kind, "{sentence}");
    assert!(rejection.found.contains(found), "{sentence}: {rejection:?}");
    assert!(!rejection.needed.is_empty() && !rejection.hint.is_empty(), "{sentence}: {rejection:?}");
}

fn accepts(sentence: &Value, fact: &Value, ask: &Value) {
    assert_eq!(requirement(sentence).check(&facts(fact), &problem(ask)), Ok(()), "{sentence}");
}

#[test]
fn module_sentences() {
    let none = json!({});
    for (sentence, ask, kind, found) in [
        (json!({"kind": "gated"}), json!({"has_gate": false}), UnsupportedExperts, "without a gate"),
        (json!({"kind": "not_transposed"}), json!({"is_transposed": true}), UnsupportedExperts, "transposed"),
        (
            json!({"kind": "concatenated"}),
            json!({"is_concatenated": false}),
            UnsupportedExperts,
            "interleaved",
        ),
        (json!({"kind": "no_bias"}), json!({"has_bias": true}), UnsupportedExperts, "biases"),
        (
            json!({"kind": "no_post_expert_norm"}),
            json!({"has_post_expert_norm": true}),
            UnsupportedExperts,
            "norm",
        ),
        (json!({"kind": "no_own_gate"}), json!({"own_gate": true}), UnsupportedExperts, "own"),
        (act(&["silu"]), json!({"activation": "gelu"}), UnsupportedExperts, "gelu"),
        (act(&["silu"]), json!({"activation": null}), UnsupportedExperts, "unknown formula"),
        (
            json!({"kind": "no_swiglu_limit"}),
            json!({"swiglu_limit": 0.0}),
            UnsupportedExperts,
            "swiglu_limit=0",
        ),
        (json!({"kind": "no_swiglu_alpha"}), json!({"swiglu_alpha": 1.702}), UnsupportedExperts, "1.702"),
        (dtype("bfloat16"), json!({"dtype": "float64"}), UnsupportedExperts, "float64"),
        (
            json!({"kind": "weights_aligned", "bytes": 16}),
            json!({"weight_alignment": 4}),
            UnsupportedExperts,
            "hidden_size 256",
        ),
        (multiple(128), json!({"intermediate_size": 96}), UnsupportedExperts, "intermediate_size 96"),
        (
            json!({"kind": "at_most", "n": 4096, "dims": ["num_experts", "hidden_size"]}),
            json!({"num_experts": 4097}),
            UnsupportedExperts,
            "num_experts 4097",
        ),
        (json!({"kind": "unquantized"}), quantized("fp8_block", "float32"), UnsupportedScheme, "fp8_block"),
        (formats(&["none", "mxfp4"]), quantized("mxfp8", "ue8m0"), UnsupportedScheme, "mxfp8"),
        (
            json!({"kind": "block", "any_of": [[1, 128]]}),
            quantized("fp8_block", "float32"),
            UnsupportedExperts,
            "(128, 128)",
        ),
        (scales("ue8m0"), quantized("fp8_block", "float32"), UnsupportedScales, "fp8_block with float32"),
        (json!({"kind": "dynamic_activation_scales"}), static_scales(), UnsupportedScheme, "static"),
        (json!({"kind": "no_gradient"}), json!({"training": true}), GradientUnsupported, "gradient"),
        (json!({"kind": "single_device"}), json!({"device_span": 2}), DeviceError, "2 devices"),
        (json!({"kind": "not_compiling"}), json!({"compiling": true}), BackendUnavailable, "torch.compile"),
        (json!({"kind": "not_capturing"}), json!({"capturing": true}), BackendUnavailable, "captured"),
    ] {
        refuses(&sentence, &none, &ask, kind, found);
    }
    refuses_only(&json!({"kind": "process_group"}), &none, &none, UnsupportedExperts, "no process group");
    accepts(&json!({"kind": "process_group"}), &none, &json!({"process_group": true}));
    accepts(&scales("ue8m0"), &none, &quantized("fp8_block", "ue8m0"));
}

fn act(any_of: &[&str]) -> Value {
    json!({"kind": "activation", "any_of": any_of})
}
fn dtype(name: &str) -> Value {
    json!({"kind": "dtype", "any_of": [name]})
}
fn multiple(n: u64) -> Value {
    json!({"kind": "multiple_of", "n": n, "dims": ["hidden_size", "intermediate_size"]})
}
fn formats(any_of: &[&str]) -> Value {
    json!({"kind": "quantization", "any_of": any_of})
}
fn scales(scale: &str) -> Value {
    json!({"kind": "scales", "any_of": [["fp8_block", scale]]})
}
fn quantized(fmt: &str, scale: &str) -> Value {
    json!({"quantization":
        {"fmt": fmt, "block": [128, 128], "activation_scheme": "dynamic", "scale_dtype": scale}})
}
fn static_scales() -> Value {
    json!({"quantization":
        {"fmt": "fp8_block", "block": [128, 128], "activation_scheme": "static", "scale_dtype": "float32"}})
}

#[test]
fn machine_sentences() {
    let none = json!({});
    let old_dsl = json!({"packages": {"nvidia-cutlass-dsl": "4.2.1"}});
    for (sentence, fact, found) in [
        (json!({"kind": "torch", "min": "2.9"}), json!({"torch": "2.8.1"}), "torch 2.8.1"),
        (json!({"kind": "torch", "min": "2.9"}), json!({"torch": ""}), "unknown version"),
        (json!({"kind": "python", "min": "3.12"}), json!({"python": "3.9.18"}), "Python 3.9.18"),
        (
            json!({"kind": "capability_major", "any_of": [9, 10]}),
            json!({"capability": [12, 0]}),
            "SM120 (H200)",
        ),
        (
            json!({"kind": "capability_major", "any_of": [9, 10]}),
            json!({"capability": null}),
            "without a compute",
        ),
        (json!({"kind": "capability", "min": [8, 9]}), json!({"capability": [8, 6]}), "SM86"),
        (json!({"kind": "package", "name": "kernels"}), json!({"packages": {}}), "kernels is not installed"),
        (
            json!({"kind": "package", "name": "nvidia-cutlass-dsl", "min": "4.6.0"}),
            old_dsl,
            "nvidia-cutlass-dsl 4.2.1",
        ),
        (
            json!({"kind": "any_package", "any_of": ["deep_gemm", "kernels"]}),
            json!({"packages": {}}),
            "none of",
        ),
        (json!({"kind": "c_compiler"}), json!({"c_compiler": null}), "no C compiler"),
        (json!({"kind": "c_compiler"}), json!({"python_headers": null}), "no Python.h"),
        (json!({"kind": "toolkit"}), json!({"toolkit": null}), "no CUDA toolkit"),
        (json!({"kind": "toolkit"}), json!({"toolkit": {"root": null}}), "no CUDA toolkit"),
        (json!({"kind": "nvcc"}), json!({"toolkit": {"root": "/usr"}}), "no nvcc in /usr"),
        (minima(), toolkit(&json!("12.1")), "nvcc 12.1 in /opt/cuda"),
        (minima(), toolkit(&json!(null)), "unreadable"),
    ] {
        refuses(&sentence, &fact, &none, BackendUnavailable, found);
    }
}

fn minima() -> Value {
    json!({"kind": "toolkit_version", "rows": [{"major": 9, "min": "12.3"}, {"major": 10, "min": "12.9"}]})
}
fn toolkit(version: &Value) -> Value {
    json!({"toolkit": {"root": "/opt/cuda", "nvcc": "/opt/cuda/bin/nvcc", "version": version}})
}

#[test]
fn toolkit_minimum_depends_on_the_capability() {
    for (version, capability, enough) in [
        (json!("12.8"), [10, 0], false),
        (json!("12.9"), [10, 0], true),
        (json!("12.10"), [10, 0], true),
        (json!([12, 10]), [10, 3], true),
        (json!("13.0"), [10, 0], true),
        (json!("12.8"), [9, 0], true),
        (json!("12.1"), [9, 0], false),
    ] {
        let mut fact = toolkit(&version);
        fact["capability"] = json!(capability);
        let met = requirement(&minima()).check(&facts(&fact), &problem(&json!({}))).is_ok();
        assert_eq!(met, enough, "nvcc {version} on {capability:?}");
    }
}

#[test]
fn a_kernel_comes_from_somewhere_and_loads() {
    let none = json!({});
    let source = json!({"kind": "kernel", "name": "sums", "package": "kernels", "installed": "deep_gemm"});
    refuses(&source, &json!({"packages": {}}), &none, BackendUnavailable, "kernels is not installed");
    let state = |name: &str, value: Value| json!({"packages": {}, "kernels": {"sums": {name: value}}});
    accepts(&source, &state("source", json!("registered")), &none);
    let said = json!({"found": "USE_HUB_KERNELS=0", "needed": "the hub", "hint": "unset it"});
    refuses_only(
        &source,
        &state("source_refusal", said.clone()),
        &none,
        BackendUnavailable,
        "USE_HUB_KERNELS",
    );
    let installed = json!({"packages": {"deep_gemm": "2.8.1"}});
    let rejection = requirement(&source).check(&facts(&installed), &problem(&none)).unwrap_err();
    assert!(rejection.hint.contains("ROUTED_EXPERTS_PREFER_INSTALLED=1"), "{rejection:?}");

    let loads = json!({"kind": "kernel_loads", "name": "sums"});
    refuses(&loads, &state("load_refusal", said), &none, BackendUnavailable, "USE_HUB_KERNELS");

    let packed = json!({"kind": "experts_packed"});
    refuses(&packed, &none, &json!({"experts_scattered": true}), UnsupportedExperts, "slice");
}

#[test]
fn torch_and_capability_are_read_as_a_table() {
    let table = json!({"kind": "torch_capability", "rows": [
        {"torch_min": "2.8", "torch_below": "2.9", "capability_min": [9, 0], "capability_below": [9, 1]},
        {"torch_min": "2.9", "torch_below": "2.10", "capability_min": [8, 0], "capability_below": [12, 0]},
        {"torch_min": "2.10", "capability_min": [8, 0]}]});
    for (torch, capability, runs) in [
        ("2.8.0", [12, 0], false),
        ("2.8.0", [9, 0], true),
        ("2.8.0", [8, 0], false),
        ("2.9.1", [12, 0], false),
        ("2.9.1", [8, 0], true),
        ("2.10.0", [8, 0], true),
        ("2.10.0", [12, 0], true),
        ("2.10.0", [7, 5], false),
    ] {
        let fact = facts(&json!({"torch": torch, "capability": capability}));
        let met = requirement(&table).check(&fact, &problem(&json!({}))).is_ok();
        assert_eq!(met, runs, "torch {torch} on {capability:?}");
    }
    // Both windows leave their upper end out.
    let window = json!({"kind": "torch_capability", "rows": [table["rows"][0]]});
    for (torch, capability) in [("2.9.0", [9, 0]), ("2.8.0", [9, 1])] {
        let fact = json!({"torch": torch, "capability": capability});
        refuses_only(&window, &fact, &json!({}), BackendUnavailable, &format!("torch {torch} on SM9"));
    }
}

#[test]
fn a_condition_limits_where_a_sentence_counts() {
    let none = json!({});
    let compiled = json!({"kind": "when", "compiling": true, "then": dtype("bfloat16")});
    accepts(&compiled, &none, &json!({"dtype": "float32"}));
    let ask = json!({"dtype": "float32", "compiling": true});
    refuses_only(&compiled, &none, &ask, UnsupportedExperts, "float32");

    let blackwell = json!({"kind": "when", "major": 10, "device": "cuda", "then": scales("ue8m0")});
    accepts(&blackwell, &none, &quantized("fp8_block", "float32"));
    let fact = json!({"capability": [10, 0]});
    refuses_only(&blackwell, &fact, &quantized("fp8_block", "float32"), UnsupportedScales, "float32");
    accepts(&blackwell, &json!({"capability": [10, 0], "device": "cpu"}), &quantized("fp8_block", "float32"));

    let quantized_bias = json!({"kind": "when", "formats": ["fp8_block"], "then": {"kind": "no_bias"}});
    accepts(&quantized_bias, &none, &json!({"has_bias": true}));
    let mut ask = quantized("fp8_block", "float32");
    ask["has_bias"] = json!(true);
    let rejection = requirement(&quantized_bias).check(&facts(&none), &problem(&ask)).unwrap_err();
    assert_eq!(rejection.needed, "experts without biases (for fp8_block weights)");

    let training = json!({"kind": "when", "training": true, "then": {"kind": "unquantized"}});
    accepts(&training, &none, &quantized("mxfp4", "ue8m0"));
}

#[test]
fn sentences_outside_the_vocabulary_are_refused() {
    for text in [
        json!({"kind": "gated", "any_of": []}),
        json!({"kind": "has_gate"}),
        json!({"kind": "torch", "min": "new"}),
        json!({"kind": "package", "name": "kernels", "minimum": "1"}),
        json!({"kind": "multiple_of", "n": 8, "dims": ["width"]}),
        json!({"kind": "when", "majors": 9, "then": {"kind": "gated"}}),
        json!({"min": "2.9"}),
    ] {
        assert!(serde_json::from_value::<Requirement>(text.clone()).is_err(), "{text}");
    }
}
