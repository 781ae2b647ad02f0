//! The choice: a decision for every registered backend, then the cheapest of those that may be chosen.
//! A pure function of specs, facts and problem; the names of backends are data here.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::cost::Cost;
use crate::error::{CoreError, ErrorKind};
use crate::facts::{Facts, Problem};
use crate::profile::{Curve, measured};
use crate::report;
use crate::requirements::{self, Class, Rejection, Requirement};

/// The name that leaves the choice to the cost model.
pub const AUTO: &str = "auto";

/// One row of the backend table, as the Python side writes it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Spec {
    /// Name of the backend; several rows may share it.
    pub name: String,
    /// Which way to the same numbers this row is.
    pub path: String,
    /// Kinds of device the row runs on.
    pub devices: Vec<String>,
    /// What must hold.
    pub requires: Vec<Requirement>,
    /// Cost on each kind of device.
    pub cost: BTreeMap<String, Cost>,
    /// Whether `auto` may choose the row.
    pub auto: bool,
}

/// What was decided about one backend.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Decision {
    /// Its name.
    pub backend: String,
    /// The row the decision is about.
    pub path: String,
    /// Whether it can run.
    pub accepted: bool,
    /// What was found, if it cannot.
    pub found: Option<String>,
    /// What it needs, if it cannot.
    pub needed: Option<String>,
    /// What to do; for an accepted backend, why `auto` passes it over.
    pub hint: Option<String>,
    /// Kind of the refusal.
    pub error: Option<ErrorKind>,
    /// Predicted microseconds, where a cost is known.
    pub predicted_us: Option<f64>,
    /// Whether they were measured on this machine.
    pub tuned: bool,
}

/// A choice and how it came about.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Selection {
    /// The chosen backend.
    pub name: String,
    /// The chosen row's path.
    pub path: String,
    /// Index of the chosen row among the specs.
    pub row: usize,
    /// One decision for each backend, in the order of registration.
    pub decisions: Vec<Decision>,
}

/// One row looked at: refused, or accepted with a prediction and perhaps a reason to keep it from `auto`.
struct Candidate<'a> {
    row: usize,
    spec: &'a Spec,
    on_device: bool,
    refusal: Option<(Class, Rejection)>,
    predicted_us: Option<f64>,
    tuned: bool,
    only_by_name: Option<String>,
}

/// Chooses among `specs` for `problem` on the machine of `facts`; times are those of the rows' cost parameters.
///
/// # Errors
/// As [`select_measured`].
pub fn select(
    specs: &[Spec],
    facts: &Facts,
    problem: &Problem,
    backend: &str,
) -> Result<Selection, CoreError> {
    select_measured(specs, facts, problem, backend, &[])
}

/// Chooses among `specs` for `problem` on the machine of `facts`; times are those of `curves` where they have any.
///
/// # Errors
/// `UnknownBackend` for a name that no spec has; the refusal's own kind when the named backend cannot run;
/// `BackendUnavailable` when `auto` finds none. A named backend is never replaced by another.
pub fn select_measured(
    specs: &[Spec],
    facts: &Facts,
    problem: &Problem,
    backend: &str,
    curves: &[Curve],
) -> Result<Selection, CoreError> {
    check_name(specs, backend)?;
    let judge = |(row, spec)| Candidate::judge(row, spec, facts, problem, curves);
    let candidates: Vec<_> = specs.iter().enumerate().map(judge).collect();
    let groups = by_name(&candidates);
    let chosen = if backend == AUTO {
        cheapest(candidates.iter().filter(|candidate| candidate.for_auto()))
    } else {
        cheapest(candidates.iter().filter(|candidate| candidate.accepted() && candidate.spec.name == backend))
    };
    let decisions: Vec<_> = groups.iter().map(|group| representative(group, chosen).decision()).collect();
    let Some(chosen) = chosen else { return Err(report::refused(backend, &decisions)) };
    Ok(Selection {
        name: chosen.spec.name.clone(),
        path: chosen.spec.path.clone(),
        row: chosen.row,
        decisions,
    })
}

/// Whether `backend` is registered, or `auto`.
///
/// # Errors
/// `UnknownBackend` with the names there are and the one most like it.
pub fn check_name(specs: &[Spec], backend: &str) -> Result<(), CoreError> {
    if backend == AUTO || specs.iter().any(|spec| spec.name == backend) {
        return Ok(());
    }
    let mut names: Vec<_> = specs.iter().map(|spec| spec.name.as_str()).collect();
    names.dedup();
    Err(report::unknown(backend, &names))
}

/// What the machine alone allows: every backend's decision by the requirements on device and environment.
pub fn machine_decisions(specs: &[Spec], facts: &Facts) -> Vec<Decision> {
    let candidates: Vec<_> =
        specs.iter().enumerate().map(|(row, spec)| Candidate::on_machine(row, spec, facts)).collect();
    by_name(&candidates).iter().map(|group| representative(group, None).decision()).collect()
}

impl<'a> Candidate<'a> {
    fn judge(row: usize, spec: &'a Spec, facts: &Facts, problem: &Problem, curves: &[Curve]) -> Self {
        let refusal = refusal(spec, facts, problem, Class::Module);
        let cost = spec.cost.get(&facts.device).filter(|_| refusal.is_none());
        let tuned =
            measured(curves, &spec.name, &spec.path, problem.num_tokens).filter(|_| refusal.is_none());
        let predicted_us = tuned.or_else(|| cost.map(|cost| cost.predict(problem)));
        let only_by_name =
            if refusal.is_some() { None } else { by_name_only(spec, cost, predicted_us, facts, problem) };
        let on_device = spec.devices.contains(&facts.device);
        Self { row, spec, on_device, refusal, predicted_us, tuned: tuned.is_some(), only_by_name }
    }

    fn on_machine(row: usize, spec: &'a Spec, facts: &Facts) -> Self {
        let refusal = refusal(spec, facts, &Problem::default(), Class::Source);
        let on_device = spec.devices.contains(&facts.device);
        Self { row, spec, on_device, refusal, predicted_us: None, tuned: false, only_by_name: None }
    }

    fn accepted(&self) -> bool {
        self.refusal.is_none()
    }

    fn for_auto(&self) -> bool {
        self.accepted() && self.only_by_name.is_none()
    }

    fn decision(&self) -> Decision {
        let rejection = self.refusal.as_ref().map(|(_, rejection)| rejection.clone());
        let hint = rejection.as_ref().map(|rejection| rejection.hint.clone());
        Decision {
            backend: self.spec.name.clone(),
            path: self.spec.path.clone(),
            accepted: self.accepted(),
            hint: hint.or_else(|| self.only_by_name.clone()),
            error: rejection.as_ref().map(|rejection| rejection.kind),
            found: rejection.as_ref().map(|rejection| rejection.found.clone()),
            needed: rejection.map(|rejection| rejection.needed),
            predicted_us: self.predicted_us,
            tuned: self.tuned,
        }
    }
}

/// The first requirement of `spec` that does not hold, in the order of the classes from `first` on.
fn refusal(spec: &Spec, facts: &Facts, problem: &Problem, first: Class) -> Option<(Class, Rejection)> {
    let device = (Class::Device, requirements::device(&spec.devices, facts).err());
    let owner = (Class::Module, requirements::belongs(&spec.name, problem).err());
    let mut checks: Vec<_> = [owner]
        .into_iter()
        .chain(
            spec.requires
                .iter()
                .map(|requirement| (requirement.class(), requirement.check(facts, problem).err())),
        )
        .chain([device])
        .filter(|(class, _)| *class >= first)
        .collect();
    checks.sort_by_key(|(class, _)| *class);
    let mut failed = checks.into_iter().filter_map(|(class, rejection)| Some((class, rejection?)));
    let (class, rejection) = failed.next()?;
    // Who is told to get a kernel also hears what else this machine lacks.
    let also = failed.next().filter(|_| class == Class::Source);
    Some((class, also.map_or_else(|| rejection.clone(), |(_, also)| rejection.clone().and(also))))
}

impl Rejection {
    fn and(self, other: Self) -> Self {
        let join = |one: String, two: String| if one == two { one } else { format!("{one}; {two}") };
        Self {
            kind: self.kind,
            found: join(self.found, other.found),
            needed: join(self.needed, other.needed),
            hint: join(self.hint, other.hint),
        }
    }
}

/// Why `auto` passes an accepted row over, if it does.
fn by_name_only(
    spec: &Spec,
    cost: Option<&Cost>,
    predicted_us: Option<f64>,
    facts: &Facts,
    problem: &Problem,
) -> Option<String> {
    let gib = |bytes: f64| bytes / f64::from(1_u32 << 30);
    let (limit, copied) =
        (problem.scratch_limit_bytes as f64, cost.map_or(0.0, |cost| cost.copied_bytes(problem)));
    if !spec.auto {
        Some("auto never picks it: ask for it by name".into())
    } else if predicted_us.is_none() {
        Some(format!("auto does not know its cost on {}: ask for it by name", facts.device))
    } else if let Some(name) = spec.requires.iter().find_map(|requirement| requirement.fetches(facts)) {
        Some(format!(
            "auto fetches nothing, and the kernel {name} is not on this machine: ask for it by name"
        ))
    } else if copied > limit {
        let (copied, limit) = (gib(copied), gib(limit));
        Some(format!("auto passes it over: it copies {copied:.2} GiB of weights, limit {limit:.2} GiB"))
    } else {
        None
    }
}

/// Rows grouped by name, in order of first appearance.
fn by_name<'a>(candidates: &'a [Candidate<'a>]) -> Vec<Vec<&'a Candidate<'a>>> {
    let mut groups: Vec<Vec<&Candidate>> = Vec::new();
    for candidate in candidates {
        match groups.iter_mut().find(|group| group[0].spec.name == candidate.spec.name) {
            Some(group) => group.push(candidate),
            None => groups.push(vec![candidate]),
        }
    }
    groups
}

/// The row that speaks for a backend: the chosen one, else its cheapest, else the refusal that says most.
fn representative<'a>(group: &[&'a Candidate<'a>], chosen: Option<&'a Candidate<'a>>) -> &'a Candidate<'a> {
    let own = chosen.filter(|chosen| group.iter().any(|candidate| candidate.row == chosen.row));
    own.or_else(|| cheapest(group.iter().copied().filter(|candidate| candidate.accepted())))
        .unwrap_or_else(|| most_telling(group))
}

/// The lowest prediction; rows without one come last, and the first of equals wins.
fn cheapest<'a>(rows: impl Iterator<Item = &'a Candidate<'a>>) -> Option<&'a Candidate<'a>> {
    let price = |candidate: &Candidate| candidate.predicted_us.unwrap_or(f64::INFINITY);
    rows.reduce(|best, next| if price(next) < price(best) { next } else { best })
}

/// A row for this kind of device before others, then the one that got furthest, then the first.
fn most_telling<'a>(group: &[&'a Candidate<'a>]) -> &'a Candidate<'a> {
    let rank =
        |candidate: &Candidate| candidate.refusal.as_ref().map(|(class, _)| (candidate.on_device, *class));
    group
        .iter()
        .copied()
        .reduce(|best, next| if rank(next) > rank(best) { next } else { best })
        .expect("no row")
}
