//! What was measured on this machine, in place of what a row's cost parameters predict.

use serde::Deserialize;

/// Between two measured counts further apart than this, nothing is said: too much may happen there.
const WIDEST_GAP: f64 = 16.0;

/// Measured microseconds of one row, by token counts that ascend.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Curve {
    /// Name of the row's backend.
    pub backend: String,
    /// The row's path.
    pub path: String,
    /// Token counts.
    pub tokens: Vec<u64>,
    /// Microseconds at each count.
    pub us: Vec<f64>,
}

impl Curve {
    /// Microseconds at `tokens`, on a line between logarithms; none outside of what was measured.
    pub fn at(&self, tokens: u64) -> Option<f64> {
        let points: Vec<_> = self.tokens.iter().copied().zip(self.us.iter().copied()).collect();
        if let Some((_, us)) = points.iter().find(|(count, _)| *count == tokens) {
            return Some(*us);
        }
        points.windows(2).find_map(|pair| between(pair[0], pair[1], tokens as f64))
    }
}

fn between(low: (u64, f64), high: (u64, f64), tokens: f64) -> Option<f64> {
    let (from, to) = (low.0 as f64, high.0 as f64);
    if from <= 0.0 || !(from < tokens && tokens < to) || to > WIDEST_GAP * from {
        return None;
    }
    let share = (tokens / from).ln() / (to / from).ln();
    Some(low.1 * (high.1 / low.1).powf(share))
}

/// The measured time of a row at `tokens`, where there is one.
pub fn measured(curves: &[Curve], backend: &str, path: &str, tokens: u64) -> Option<f64> {
    curves.iter().find(|curve| curve.backend == backend && curve.path == path)?.at(tokens)
}

#[cfg(test)]
mod tests {
    use super::{Curve, measured};

    fn curve(tokens: &[u64], us: &[f64]) -> Curve {
        Curve { backend: "one".into(), path: "a".into(), tokens: tokens.into(), us: us.into() }
    }

    #[test]
    fn lines_between_logarithms() {
        let curve = curve(&[1, 4, 16], &[10.0, 40.0, 40.0]);
        assert_eq!(curve.at(4), Some(40.0));
        assert!((curve.at(2).unwrap_or(0.0) - 20.0).abs() < 1e-9);
        assert!((curve.at(8).unwrap_or(0.0) - 40.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_outside_and_nothing_in_wide_gaps() {
        let curve = curve(&[2, 4, 65], &[1.0, 2.0, 3.0]);
        assert_eq!((curve.at(1), curve.at(66), curve.at(0), curve.at(32)), (None, None, None, None));
        assert_eq!(curve.at(65), Some(3.0));
        assert_eq!(self::curve(&[], &[]).at(1), None);
        assert_eq!(self::curve(&[0, 8], &[1.0, 1.0]).at(2), None);
    }

    #[test]
    fn a_row_is_found_by_name_and_path() {
        let curves = [curve(&[1], &[5.0])];
        assert_eq!(measured(&curves, "one", "a", 1), Some(5.0));
        assert_eq!(measured(&curves, "one", "b", 1), None);
        assert_eq!(measured(&curves, "two", "a", 1), None);
    }
}
