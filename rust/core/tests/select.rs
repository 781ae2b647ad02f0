//! The choice over made-up tables of backends.

#![allow(clippy::unwrap_used, reason = "helpers of tests may panic")]

use proptest::prelude::*;
use routed_experts_core::error::ErrorKind;
use routed_experts_core::facts::{Facts, Kernel, Problem};
use routed_experts_core::profile::Curve;
use routed_experts_core::select::{Decision, Spec, machine_decisions, select, select_measured};
use serde_json::{Value, json};

fn spec(name: &str, change: &Value) -> Spec {
    let mut base = json!({"name": name, "path": "", "devices": ["cpu", "cuda"], "takes": "routing",
        "gives": "tokens", "alignment": 1, "requires": [], "cost": {"cpu": cost(10.0)}, "auto": true});
    for (key, value) in change.as_object().unwrap() {
        base[key] = value.clone();
    }
    serde_json::from_value(base).unwrap()
}

fn cost(call_us: f64) -> Value {
    json!({"call_us": call_us, "expert_us": 1.0, "bytes_per_us": 1000.0, "flops_per_us": 1e6,
        "weight_passes": 1.0, "copies_weights": false})
}

fn cpu() -> Facts {
    Facts { device: "cpu".into(), torch: "2.13.0".into(), ..Facts::default() }
}

fn problem() -> Problem {
    Problem {
        num_tokens: 4,
        num_top_k: 2,
        num_experts: 8,
        hidden_size: 16,
        intermediate_size: 8,
        dtype: "float32".into(),
        weight_dtype: "float32".into(),
        device_span: 1,
        ..Problem::default()
    }
}

fn decision<'a>(decisions: &'a [Decision], name: &str) -> &'a Decision {
    decisions.iter().find(|decision| decision.backend == name).unwrap()
}

#[test]
fn auto_takes_the_cheapest_and_every_backend_is_reported() {
    let specs = [
        spec("slow", &json!({"cost": {"cpu": cost(50.0)}})),
        spec("two", &json!({"path": "a", "cost": {"cpu": cost(40.0)}})),
        spec("two", &json!({"path": "b", "cost": {"cpu": cost(30.0)}})),
        spec("gpu", &json!({"devices": ["cuda"]})),
    ];
    let selection = select(&specs, &cpu(), &problem(), "auto").unwrap();
    assert_eq!((selection.name.as_str(), selection.path.as_str(), selection.row), ("two", "b", 2));
    let names: Vec<_> = selection.decisions.iter().map(|decision| decision.backend.as_str()).collect();
    assert_eq!(names, ["slow", "two", "gpu"]);
    assert_eq!(decision(&selection.decisions, "two").path, "b");
    let refused = decision(&selection.decisions, "gpu");
    assert_eq!(refused.found.as_deref(), Some("device cpu"));
    assert!(!refused.accepted && refused.hint.as_deref().unwrap().contains("cuda"));
}

#[test]
fn auto_passes_over_what_it_may_not_take() {
    let mut copying = cost(0.0);
    copying["copies_weights"] = json!(true);
    let specs = [
        spec("plain", &json!({})),
        spec("manual", &json!({"auto": false, "cost": {"cpu": cost(0.0)}})),
        spec("unpriced", &json!({"cost": {}})),
        spec("copying", &json!({"cost": {"cpu": copying}})),
    ];
    let tight = Problem { scratch_limit_bytes: 8 * (16 * 16) * 4 - 1, ..problem() };
    let selection = select(&specs, &cpu(), &tight, "auto").unwrap();
    assert_eq!(selection.name, "plain");
    for (name, why) in [("manual", "never picks"), ("unpriced", "cost on cpu"), ("copying", "copies")] {
        let decision = decision(&selection.decisions, name);
        assert!(decision.accepted && decision.hint.as_deref().unwrap().contains(why), "{decision:?}");
        assert_eq!(select(&specs, &cpu(), &tight, name).unwrap().name, name);
    }
    let wide = Problem { scratch_limit_bytes: tight.scratch_limit_bytes + 1, ..tight };
    assert_eq!(select(&specs, &cpu(), &wide, "auto").unwrap().name, "copying");
}

#[test]
fn cheap_questions_come_first_in_whatever_order_they_are_written() {
    let requires = json!([{"kind": "package", "name": "kernels"},
        {"kind": "kernel", "name": "sums", "package": "kernels", "installed": "sums"},
        {"kind": "not_capturing"}, {"kind": "gated"}]);
    let specs = [spec("one", &json!({"devices": ["cuda"], "requires": requires}))];
    let refusal = |problem: &Problem| select(&specs, &cpu(), problem, "one").unwrap_err();
    let gated = Problem { has_gate: true, ..problem() };
    let ungated = refusal(&problem());
    assert_eq!(ungated.kind, ErrorKind::UnsupportedExperts);
    assert!(ungated.needed.unwrap().starts_with("gated experts (gate_up_proj)"));
    let capturing = refusal(&Problem { capturing: true, ..gated.clone() });
    assert!(capturing.found.unwrap().contains("graph"));
    let unready = refusal(&gated);
    assert_eq!(unready.kind, ErrorKind::BackendUnavailable);
    let found = unready.found.unwrap();
    assert_eq!(found, "kernels is not installed; device cpu");
}

#[test]
fn auto_fetches_nothing() {
    let kernel = json!({"kind": "kernel", "name": "sums", "package": "kernels", "installed": "sums"});
    let specs = [spec("one", &json!({"requires": [kernel]}))];
    let packages = [("kernels".to_string(), Some("0.17.2".to_string()))].into();
    let mut facts = Facts { packages, ..cpu() };
    assert_eq!(select(&specs, &facts, &problem(), "one").unwrap().name, "one");
    let refused = select(&specs, &facts, &problem(), "auto").unwrap_err();
    assert!(refused.message.contains("auto fetches nothing"), "{refused:?}");
    facts.kernels =
        [("sums".to_string(), Kernel { source: Some("here".into()), ..Kernel::default() })].into();
    assert_eq!(select(&specs, &facts, &problem(), "auto").unwrap().name, "one");
}

#[test]
fn reshaped_weights_are_run_by_their_own_backend_alone() {
    let specs = [spec("one", &json!({})), spec("two", &json!({}))];
    let reshaped = Problem { reshaped_by: Some("two".into()), ..problem() };
    assert_eq!(select(&specs, &cpu(), &reshaped, "auto").unwrap().name, "two");
    let error = select(&specs, &cpu(), &reshaped, "one").unwrap_err();
    assert_eq!(error.kind, ErrorKind::SwitchError);
    assert_eq!(error.found.unwrap(), "weights that two has reshaped");
}

#[test]
fn the_refusal_that_got_furthest_speaks_for_a_backend() {
    let specs = [
        spec("one", &json!({"path": "gpu", "devices": ["cuda"]})),
        spec("one", &json!({"path": "strict", "requires": [{"kind": "gated"}]})),
        spec("one", &json!({"path": "loop", "requires": [{"kind": "not_capturing"}]})),
    ];
    let capturing = Problem { capturing: true, ..problem() };
    let error = select(&specs, &cpu(), &capturing, "one").unwrap_err();
    assert!(error.found.unwrap().contains("graph"));
    assert!(error.message.contains("one: found a call captured"));
}

#[test]
fn a_refused_name_lists_every_candidate_and_is_not_replaced() {
    let specs = [spec("able", &json!({})), spec("gpu", &json!({"devices": ["cuda"]}))];
    let error = select(&specs, &cpu(), &problem(), "gpu").unwrap_err();
    assert_eq!(error.kind, ErrorKind::BackendUnavailable);
    assert!(error.message.contains("\"gpu\"") && error.message.contains("able: can run, predicted"));
    assert!(error.hint.unwrap().contains("these can run it: able"));

    let error = select(&specs[1..], &cpu(), &problem(), "auto").unwrap_err();
    assert_eq!(error.kind, ErrorKind::BackendUnavailable);
    assert!(error.message.contains("gpu: found device cpu, needed cuda"), "{error:?}");
    assert!(error.found.is_some() && error.needed.is_some() && error.hint.is_some());
}

#[test]
fn an_unknown_name_gets_the_list_and_a_suggestion() {
    let specs = [spec("grouped_mm", &json!({})), spec("eager", &json!({}))];
    let error = select(&specs, &cpu(), &problem(), "group_mm").unwrap_err();
    assert_eq!(error.kind, ErrorKind::UnknownBackend);
    assert!(error.message.contains("auto, grouped_mm, eager"));
    assert_eq!(error.hint.as_deref(), Some("did you mean \"grouped_mm\"?"));
    let error = select(&specs, &cpu(), &problem(), "zzz").unwrap_err();
    assert!(error.hint.unwrap().contains("register_backend"));
}

#[test]
fn the_machine_is_judged_without_a_problem() {
    let requires = json!([{"kind": "gated"}, {"kind": "not_compiling"}, {"kind": "torch", "min": "3"}]);
    let specs =
        [spec("one", &json!({"requires": requires})), spec("two", &json!({"requires": [{"kind": "gated"}]}))];
    let decisions = machine_decisions(&specs, &cpu());
    assert_eq!(decision(&decisions, "one").found.as_deref(), Some("torch 2.13.0"));
    assert!(decision(&decisions, "two").accepted && decision(&decisions, "two").predicted_us.is_none());
}

/// A row over few names, so that names repeat; (name, call cost or none, auto, device kinds, needs a gate).
fn rows() -> impl Strategy<Value = Vec<Spec>> {
    let row = ("[a-d]", prop::option::of(0_u32..50), any::<bool>(), any::<bool>(), any::<bool>());
    let row = row.prop_map(|(name, price, auto, on_cpu, gated)| {
        let devices = if on_cpu { json!(["cpu"]) } else { json!(["cuda"]) };
        let requires = if gated { json!([{"kind": "gated"}]) } else { json!([]) };
        let cost = price.map_or(json!({}), |us| json!({"cpu": cost(f64::from(us))}));
        spec(&name, &json!({"devices": devices, "requires": requires, "cost": cost, "auto": auto}))
    });
    prop::collection::vec(row, 1..8)
}

fn runs(spec: &Spec, problem: &Problem) -> bool {
    spec.devices == ["cpu"] && (spec.requires.is_empty() || problem.has_gate)
}

proptest! {
    #[test]
    fn auto_is_the_cheapest_accepted(specs in rows(), has_gate: bool, num_tokens in 0_u64..4096) {
        let problem = Problem { has_gate, num_tokens, ..problem() };
        let price = |spec: &Spec| spec.cost.get("cpu").map(|cost| cost.predict(&problem));
        let open = specs.iter().filter(|spec| spec.auto && runs(spec, &problem)).filter_map(price);
        let lowest = open.reduce(f64::min);
        match select(&specs, &cpu(), &problem, "auto") {
            Ok(selection) => {
                let chosen = &specs[selection.row];
                prop_assert!(chosen.auto && runs(chosen, &problem) && chosen.name == selection.name);
                prop_assert_eq!(price(chosen), lowest);
                prop_assert_eq!(decision(&selection.decisions, &selection.name).predicted_us, lowest);
            }
            Err(error) => {
                prop_assert_eq!(lowest, None);
                prop_assert_eq!(error.kind, ErrorKind::BackendUnavailable);
            }
        }
    }

    #[test]
    fn a_named_backend_is_never_replaced(specs in rows(), has_gate: bool, name in "[a-d]") {
        let problem = Problem { has_gate, ..problem() };
        let own: Vec<_> = specs.iter().filter(|spec| spec.name == name).collect();
        match select(&specs, &cpu(), &problem, &name) {
            Ok(selection) => {
                prop_assert_eq!(&selection.name, &name);
                prop_assert_eq!(&specs[selection.row].name, &name);
                prop_assert!(runs(&specs[selection.row], &problem));
            }
            Err(error) if own.is_empty() => prop_assert_eq!(error.kind, ErrorKind::UnknownBackend),
            Err(error) => {
                prop_assert!(own.iter().all(|spec| !runs(spec, &problem)));
                prop_assert!(error.found.is_some() && error.needed.is_some() && error.hint.is_some());
            }
        }
    }
}

fn curve(backend: &str, path: &str, us: f64) -> Curve {
    Curve { backend: backend.into(), path: path.into(), tokens: vec![2, 8], us: vec![us, us] }
}

#[test]
fn a_measured_time_stands_for_the_default_one() {
    let specs = [
        spec("one", &json!({"cost": {"cpu": cost(50.0)}})),
        spec("two", &json!({"path": "a", "cost": {"cpu": cost(40.0)}})),
        spec("two", &json!({"path": "b", "cost": {"cpu": cost(30.0)}})),
    ];
    let curves = [curve("one", "", 20.0), curve("two", "a", 1.0), curve("nobody", "", 0.1)];
    let ask = |tokens, curves: &[Curve]| {
        select_measured(&specs, &cpu(), &Problem { num_tokens: tokens, ..problem() }, "auto", curves).unwrap()
    };
    let tuned = ask(4, &curves);
    assert_eq!((tuned.name.as_str(), tuned.path.as_str()), ("two", "a"));
    let found: Vec<_> = tuned.decisions.iter().map(|one| (one.predicted_us, one.tuned)).collect();
    assert_eq!(found, [(Some(20.0), true), (Some(1.0), true)]);
    let outside = ask(9, &curves);
    assert_eq!((outside.name.as_str(), outside.path.as_str()), ("two", "b"));
    assert!(outside.decisions.iter().all(|one| !one.tuned));
    assert_eq!(ask(4, &[]), select(&specs, &cpu(), &Problem { num_tokens: 4, ..problem() }, "auto").unwrap());
}

#[test]
fn a_measured_time_allows_nothing() {
    let specs = [
        spec("plain", &json!({})),
        spec("refused", &json!({"devices": ["cuda"]})),
        spec("by_name", &json!({"auto": false})),
        spec("costless", &json!({"cost": {}})),
    ];
    let curves = [curve("refused", "", 0.1), curve("by_name", "", 0.1), curve("costless", "", 0.2)];
    let selection = select_measured(&specs, &cpu(), &problem(), "auto", &curves).unwrap();
    // A row without a default cost is known once it was measured.
    assert_eq!(selection.name, "costless");
    let refused = decision(&selection.decisions, "refused");
    assert_eq!((refused.accepted, refused.predicted_us, refused.tuned), (false, None, false));
    assert_eq!(decision(&selection.decisions, "by_name").predicted_us, Some(0.1));
}
