//! Work in phases over threads that live for one call.
//!
//! There is no pool: starting a thread costs tens of microseconds beside milliseconds of work, and a process forked
//! after a call holds no dead threads and can call again.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Looks at a counter before the system is asked to run somebody else.
const SPINS: usize = 1 << 10;

/// One phase: its items are taken one by one, and all are done before the next phase begins.
struct Phase {
    items: usize,
    next: AtomicUsize,
    done: AtomicUsize,
}

/// Counts an item as done, also when its work panics: the others must not wait for ever.
struct Done<'a>(&'a AtomicUsize);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}

/// Runs `work(phase, item, own)` for every item of every phase on at most `workers` threads, this one among them.
///
/// `own` is what a thread keeps from one item to the next. If the system refuses a thread, those that run do its work.
pub fn in_phases<S>(
    workers: usize,
    phases: &[usize],
    own: impl Fn() -> S + Sync,
    work: impl Fn(usize, usize, &mut S) + Sync,
) {
    let phases: Vec<Phase> = phases
        .iter()
        .map(|&items| Phase { items, next: AtomicUsize::new(0), done: AtomicUsize::new(0) })
        .collect();
    let run = || {
        let mut own = own();
        for (index, phase) in phases.iter().enumerate() {
            loop {
                let item = phase.next.fetch_add(1, Ordering::Relaxed);
                if item >= phase.items {
                    break;
                }
                let _done = Done(&phase.done);
                work(index, item, &mut own);
            }
            wait(phase);
        }
    };
    if workers <= 1 {
        return run();
    }
    thread::scope(|scope| {
        for _ in 1..workers {
            if thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
}

/// Waits until every item of a phase is done; what was written for them is then seen here.
fn wait(phase: &Phase) {
    let mut spins = 0;
    while phase.done.load(Ordering::Acquire) < phase.items {
        if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        } else {
            thread::yield_now();
        }
    }
}
