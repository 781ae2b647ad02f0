//! What a row costs on one kind of device: launch time, then the larger of memory time and arithmetic time.

use serde::Deserialize;

use crate::facts::Problem;

/// Cost parameters of one row; microseconds, bytes, floating-point operations.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cost {
    /// Microseconds of every call.
    pub call_us: f64,
    /// The same inside a CUDA graph, where the host does nothing; `call_us` where it is not given.
    #[serde(default)]
    pub captured_us: Option<f64>,
    /// Microseconds for each distinct expert hit.
    pub expert_us: f64,
    /// Bytes moved in a microsecond.
    pub bytes_per_us: f64,
    /// Operations done in a microsecond.
    pub flops_per_us: f64,
    /// How often the weights are read.
    pub weight_passes: f64,
    /// One copy of an expert's weights for every (token, slot) pair.
    pub copies_weights: bool,
}

impl Cost {
    /// Predicted microseconds of `problem`.
    pub fn predict(&self, problem: &Problem) -> f64 {
        let hit = distinct_experts(problem.num_experts, problem.pairs());
        let copies = if self.copies_weights { problem.pairs() as f64 } else { hit };
        let bytes = copies * expert_bytes(problem) * self.weight_passes + activation_bytes(problem);
        let work = (bytes / self.bytes_per_us).max(flops(problem) / self.flops_per_us);
        let call = if problem.capturing { self.captured_us.unwrap_or(self.call_us) } else { self.call_us };
        call + self.expert_us * hit + work
    }

    /// Bytes of weights a call copies.
    pub fn copied_bytes(&self, problem: &Problem) -> f64 {
        if self.copies_weights { problem.pairs() as f64 * expert_bytes(problem) } else { 0.0 }
    }
}

/// Expected number of distinct experts that `pairs` even draws among `num_experts` hit.
pub fn distinct_experts(num_experts: u64, pairs: u64) -> f64 {
    let experts = num_experts as f64;
    if num_experts == 0 {
        return 0.0;
    }
    experts * (1.0 - (1.0 - 1.0 / experts).powf(pairs as f64))
}

/// Columns of the up projection: gate and up, or up alone.
fn up_width(problem: &Problem) -> f64 {
    let halves = if problem.has_gate { 2.0 } else { 1.0 };
    halves * problem.intermediate_size as f64
}

fn expert_elements(problem: &Problem) -> f64 {
    problem.hidden_size as f64 * (up_width(problem) + problem.intermediate_size as f64)
}

fn expert_bytes(problem: &Problem) -> f64 {
    // Two FP4 codes share a byte of storage; scales are a few percent and left out.
    let size = if problem.fmt() == "mxfp4" { 0.5 } else { item_size(&problem.weight_dtype) };
    expert_elements(problem) * size
}

fn flops(problem: &Problem) -> f64 {
    2.0 * problem.pairs() as f64 * expert_elements(problem)
}

/// Read x once a pair, write and read u and a, write d once a pair and y once a token.
fn activation_bytes(problem: &Problem) -> f64 {
    let (tokens, pairs) = (problem.num_tokens as f64, problem.pairs() as f64);
    let (hidden, inner) = (problem.hidden_size as f64, problem.intermediate_size as f64);
    let elements = pairs * (2.0 * hidden + 2.0 * up_width(problem) + 2.0 * inner) + tokens * hidden;
    elements * item_size(&problem.dtype)
}

fn item_size(dtype: &str) -> f64 {
    match dtype {
        "float64" => 8.0,
        "bfloat16" | "float16" => 2.0,
        name if name.starts_with("float8") || name.ends_with("int8") => 1.0,
        _ => 4.0,
    }
}

#[cfg(test)]
mod tests {
    use super::{Cost, distinct_experts};
    use crate::facts::{Problem, Quantization};

    fn cost(copies_weights: bool) -> Cost {
        Cost {
            call_us: 10.0,
            captured_us: Some(3.0),
            expert_us: 2.0,
            bytes_per_us: 100.0,
            flops_per_us: 1e9,
            weight_passes: 1.0,
            copies_weights,
        }
    }

    fn problem() -> Problem {
        Problem {
            num_tokens: 1,
            num_top_k: 1,
            num_experts: 4,
            hidden_size: 8,
            intermediate_size: 2,
            dtype: "bfloat16".into(),
            weight_dtype: "bfloat16".into(),
            has_gate: true,
            ..Problem::default()
        }
    }

    #[test]
    fn expected_experts_hit() {
        assert!((distinct_experts(4, 1) - 1.0).abs() < 1e-12);
        assert!((distinct_experts(4, 2) - 1.75).abs() < 1e-12);
        assert!((distinct_experts(2, 1000) - 2.0).abs() < 1e-12);
        assert!(distinct_experts(4, 0).abs() < 1e-12 && distinct_experts(0, 9).abs() < 1e-12);
    }

    #[test]
    fn hand_worked_prediction() {
        // One expert: 8 * (4 + 2) elements of 2 bytes = 96; activations (16 + 8 + 4 + 8) * 2 = 72.
        assert!((cost(false).predict(&problem()) - (10.0 + 2.0 + 1.68)).abs() < 1e-9);
        let twice = Cost { weight_passes: 2.0, ..cost(false) };
        assert!((twice.predict(&problem()) - (10.0 + 2.0 + 2.64)).abs() < 1e-9);
        let four_bit = Problem {
            quantization: Some(Quantization { fmt: "mxfp4".into(), ..Quantization::default() }),
            weight_dtype: "int8".into(),
            ..problem()
        };
        assert!((cost(false).predict(&four_bit) - (10.0 + 2.0 + 0.96)).abs() < 1e-9);
    }

    #[test]
    fn copies_count_every_pair() {
        // T=4096, K=8, H=2048, I=768 in bfloat16: 288 GiB of copies.
        let large = Problem {
            num_tokens: 4096,
            num_top_k: 8,
            num_experts: 128,
            hidden_size: 2048,
            intermediate_size: 768,
            ..problem()
        };
        let gib = cost(true).copied_bytes(&large) / f64::from(1u32 << 30);
        assert!((gib - 288.0).abs() < 1e-9);
        assert!(cost(false).copied_bytes(&large).abs() < 1e-9);
        assert!(cost(true).predict(&large) > 100.0 * cost(false).predict(&large));
    }

    #[test]
    fn a_captured_call_leaves_the_host_out() {
        let captured = Problem { capturing: true, ..problem() };
        assert!((cost(false).predict(&captured) - (3.0 + 2.0 + 1.68)).abs() < 1e-9);
        let unknown = Cost { captured_us: None, ..cost(false) };
        assert!((unknown.predict(&captured) - unknown.predict(&problem())).abs() < 1e-9);
    }

    #[test]
    fn nothing_to_do_costs_the_call() {
        let empty = Problem { num_tokens: 0, ..problem() };
        assert!((cost(true).predict(&empty) - 10.0).abs() < 1e-12);
    }
}
