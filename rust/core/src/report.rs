//! The words of a refused choice.

use crate::error::{CoreError, ErrorKind};
use crate::select::{AUTO, Decision};

/// A name closer than this, of 1, is worth suggesting.
const LIKENESS: f64 = 0.7;

/// The error for a name that is not registered.
pub fn unknown(backend: &str, names: &[&str]) -> CoreError {
    let names: Vec<&str> = std::iter::once(AUTO).chain(names.iter().copied()).collect();
    let likeness = |name: &&str| strsim::jaro_winkler(name, backend);
    let close = names.iter().copied().max_by(|one, two| likeness(one).total_cmp(&likeness(two)));
    let hint = match close.filter(|name| likeness(name) >= LIKENESS) {
        Some(name) => format!("did you mean {name:?}?"),
        None => "register it first with register_backend, or use one of the names".into(),
    };
    CoreError {
        kind: ErrorKind::UnknownBackend,
        message: format!("unknown backend {backend:?}; registered: {}", names.join(", ")),
        found: Some(format!("{backend:?}")),
        needed: Some(format!("one of {}", names.join(", "))),
        hint: Some(hint),
    }
}

/// The error for a named backend that cannot run, or for `auto` without a candidate.
pub fn refused(backend: &str, decisions: &[Decision]) -> CoreError {
    let lines: Vec<_> = decisions.iter().map(line).collect();
    let candidates = format!("candidates:\n    {}", lines.join("\n    "));
    let able: Vec<_> = decisions.iter().filter(|one| one.accepted).map(|one| one.backend.as_str()).collect();
    let Some(named) = decisions.iter().find(|decision| decision.backend == backend) else {
        return none_for_auto(&candidates, &able);
    };
    let instead =
        if able.is_empty() { String::new() } else { format!("; these can run it: {}", able.join(", ")) };
    CoreError {
        kind: named.error.unwrap_or(ErrorKind::BackendUnavailable),
        message: format!("backend {backend:?} cannot run this call: {}; {candidates}", reason(named)),
        found: named.found.clone(),
        needed: named.needed.clone(),
        hint: Some(format!("{}{instead}", named.hint.as_deref().unwrap_or_default())),
    }
}

fn none_for_auto(candidates: &str, able: &[&str]) -> CoreError {
    let hint = if able.is_empty() {
        "read the reasons above; `routed-experts doctor` checks the machine".into()
    } else {
        format!("auto does not pick {}: ask for it by name", able.join(" or "))
    };
    CoreError {
        kind: ErrorKind::BackendUnavailable,
        message: format!("no backend that auto may choose can run this call; {candidates}"),
        found: Some("no candidate for auto".into()),
        needed: Some("one backend whose requirements are met and whose cost is known".into()),
        hint: Some(hint),
    }
}

fn line(decision: &Decision) -> String {
    let verdict = match (decision.accepted, decision.predicted_us, &decision.hint) {
        (false, ..) => reason(decision),
        (true, _, Some(hint)) => format!("can run; {hint}"),
        (true, Some(us), None) => format!("can run, predicted {us:.0} us"),
        (true, None, None) => "can run".into(),
    };
    format!("{}: {verdict}", decision.backend)
}

fn reason(decision: &Decision) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    format!("found {}, needed {}", text(&decision.found), text(&decision.needed))
}
