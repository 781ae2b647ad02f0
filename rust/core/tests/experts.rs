//! Every level of the CPU experts against the others, bit for bit, and against a loop in double precision.

use proptest::prelude::*;
use routed_experts_core::experts::format::Format;
use routed_experts_core::experts::gate::{Activation, Gate};
use routed_experts_core::experts::levels::{Level, available};
use routed_experts_core::experts::number::{Bf16, Dtype, F16, Number};
use routed_experts_core::experts::operand::Grid;
use routed_experts_core::experts::{Address, Call, Layer, Routing, RowsCall, Weights, check_sizes};

/// Numbers of a type, with `step` places to each.
#[derive(Debug, Clone)]
struct Numbers {
    bytes: Vec<u8>,
    dtype: Dtype,
    step: usize,
}

impl Numbers {
    /// Values between -1 and 1 times `scale` that differ by place and seed; gaps hold NaN, and one byte goes ahead, so
    /// that nothing is aligned.
    fn new(count: usize, dtype: Dtype, step: usize, seed: u64, scale: f32) -> Self {
        let mut bytes = vec![0xFF; 1 + count * step * dtype.size()];
        let mut state = seed.wrapping_mul(2) + 1;
        for place in 0..count {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let value = ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale;
            let at = 1 + place * step * dtype.size();
            match dtype {
                Dtype::F32 => bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes()),
                Dtype::Bf16 => bytes[at..at + 2].copy_from_slice(&Bf16::narrow(value).0.to_ne_bytes()),
                Dtype::F16 => bytes[at..at + 2].copy_from_slice(&F16::narrow(value).0.to_ne_bytes()),
            }
        }
        Self { bytes, dtype, step }
    }

    fn get(&self, place: usize) -> f32 {
        read(&self.bytes[1..], self.dtype, place * self.step)
    }

    fn data(&self) -> *const u8 {
        self.bytes[1..].as_ptr()
    }
}

fn read(bytes: &[u8], dtype: Dtype, place: usize) -> f32 {
    let at = place * dtype.size();
    let half = || u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
    match dtype {
        Dtype::F32 => f32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes")),
        Dtype::Bf16 => Bf16(half()).widen(),
        Dtype::F16 => F16(half()).widen(),
    }
}

/// One matrix of every expert: (E, columns, depth), or (E, depth, columns).
#[derive(Debug, Clone)]
struct Linear {
    weights: Weights,
    matrix: Numbers,
    bias: Option<Numbers>,
}

impl Linear {
    fn new(case: &Case, columns: usize, depth: usize, seed: u64) -> Self {
        let [column, depth_step] = if case.transposed { [1, columns] } else { [depth, 1] };
        let strides = [columns * depth, column, depth_step].map(|stride| (stride * case.step) as isize);
        let scale = 2.0 / (depth as f32).sqrt();
        Self {
            weights: Weights {
                columns,
                depth,
                strides,
                bias_strides: [columns as isize, 1],
                bias: case.weights,
                format: Format::Plain(case.weights),
            },
            matrix: Numbers::new(case.experts * columns * depth, case.weights, case.step, seed, scale),
            bias: case.bias.then(|| Numbers::new(case.experts * columns, case.weights, 1, seed + 1, 0.5)),
        }
    }

    fn address(&self) -> Address {
        Address {
            matrix: self.matrix.data(),
            bias: self.bias.as_ref().map_or(std::ptr::null(), Numbers::data),
            scales: std::ptr::null(),
        }
    }

    fn value(&self, expert: usize, column: usize, row: impl Fn(usize) -> f64) -> f64 {
        let [_, of_column, of_depth] = self.weights.strides.map(|stride| stride as usize / self.matrix.step);
        let first = expert * self.weights.columns * self.weights.depth + column * of_column;
        let dot: f64 =
            (0..self.weights.depth).map(|d| row(d) * f64::from(self.matrix.get(first + d * of_depth))).sum();
        dot + self
            .bias
            .as_ref()
            .map_or(0.0, |bias| f64::from(bias.get(expert * self.weights.columns + column)))
    }
}

#[derive(Debug, Clone)]
struct Case {
    tokens: usize,
    slots: usize,
    experts: usize,
    hidden: usize,
    inner: usize,
    x: Dtype,
    weights: Dtype,
    routing: Dtype,
    transposed: bool,
    step: usize,
    bias: bool,
    gate: Gate,
    seed: u64,
}

struct Built {
    layer: Layer,
    linears: [Linear; 2],
    x: Numbers,
    routing: Numbers,
    ids: Vec<i16>,
}

impl Case {
    fn build(&self) -> Built {
        let halves = if self.gate.has_gate { 2 } else { 1 };
        let up = Linear::new(self, halves * self.inner, self.hidden, self.seed);
        let down = Linear::new(self, self.hidden, self.inner, self.seed + 7);
        let pairs = self.tokens * self.slots;
        let ids = (0..pairs as u64).map(|pair| {
            let hash = (pair + self.seed).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
            (hash % (self.experts as u64 + 2)) as i16 - 1
        });
        Built {
            layer: Layer { up: up.weights, down: down.weights, gate: self.gate },
            linears: [up, down],
            x: Numbers::new(self.tokens * self.hidden, self.x, 2, self.seed + 3, 1.0),
            routing: Numbers::new(pairs, self.routing, 1, self.seed + 5, 1.0),
            ids: ids.collect(),
        }
    }

    fn routing(&self, built: &Built) -> Routing {
        let strides = [self.slots as isize, 1];
        // SAFETY: there are T x K ids.
        unsafe { Routing::new(built.ids.as_ptr(), strides, [self.tokens, self.slots], self.experts) }
            .expect("sizes of a layout")
    }

    fn run(&self, built: &Built, level: &Level, threads: usize) -> Vec<u8> {
        let mut out = vec![0xFF; self.tokens * self.hidden * self.x.size()];
        let grid = |numbers: &Numbers, columns: usize| Grid {
            data: numbers.data(),
            dtype: numbers.dtype,
            strides: [(columns * numbers.step) as isize, numbers.step as isize],
        };
        let call = Call {
            shape: [self.tokens, self.slots],
            x: grid(&built.x, self.hidden),
            weights: grid(&built.routing, self.slots),
            addresses: [built.linears[0].address(), built.linears[1].address()],
            out: out.as_mut_ptr(),
            threads,
        };
        // SAFETY: all tensors have the sizes of the case.
        unsafe { built.layer.run(&self.routing(built), &call, Some(level)) };
        out
    }

    fn wanted(&self, built: &Built) -> Vec<f64> {
        let mut out = vec![0.0; self.tokens * self.hidden];
        for pair in 0..self.tokens * self.slots {
            let (token, expert) = (pair / self.slots, built.ids[pair]);
            if expert < 0 || expert as usize >= self.experts {
                continue;
            }
            let x = |d: usize| f64::from(built.x.get(token * self.hidden + d));
            let up = |column: usize| built.linears[0].value(expert as usize, column, x);
            let gated: Vec<f64> = (0..self.inner).map(|unit| self.gated(unit, up)).collect();
            for column in 0..self.hidden {
                let down = built.linears[1].value(expert as usize, column, |unit| gated[unit]);
                out[token * self.hidden + column] += f64::from(built.routing.get(pair)) * down;
            }
        }
        out
    }

    fn gated(&self, unit: usize, up: impl Fn(usize) -> f64) -> f64 {
        let act = |x: f64| match self.gate.activation {
            Activation::Relu2 => x.max(0.0).powi(2),
            _ => x / (1.0 + (-x).exp()),
        };
        if !self.gate.has_gate {
            return act(up(unit));
        }
        let (gate, linear) = if self.gate.is_concatenated {
            (up(unit), up(self.inner + unit))
        } else {
            (up(2 * unit), up(2 * unit + 1))
        };
        let limit = self.gate.limit.map_or(f64::INFINITY, f64::from);
        let (gate, linear) = (gate.min(limit), linear.clamp(-limit, limit));
        match self.gate.alpha {
            Some(alpha) => (linear + 1.0) * gate / (1.0 + (-f64::from(alpha) * gate).exp()),
            None => act(gate) * linear,
        }
    }
}

fn dtypes() -> impl Strategy<Value = Dtype> {
    prop::sample::select(vec![Dtype::F32, Dtype::Bf16, Dtype::F16])
}

fn gates() -> impl Strategy<Value = Gate> {
    let activations = prop::sample::select(vec![Activation::Silu, Activation::Relu2]);
    (
        any::<bool>(),
        any::<bool>(),
        activations,
        prop::option::of(0.3..1.0_f32),
        prop::option::of(1.0..2.0_f32),
    )
        .prop_map(|(has_gate, is_concatenated, activation, limit, alpha)| Gate {
            has_gate,
            is_concatenated,
            activation,
            limit,
            alpha: alpha.filter(|_| has_gate),
        })
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (0..20_usize, 1..4_usize, 1..4_usize, 1..150_usize, 1..90_usize);
    (sizes, dtypes(), dtypes(), dtypes(), any::<(bool, bool)>(), 1..3_usize, gates(), any::<u32>()).prop_map(
        |(
            (tokens, slots, experts, hidden, inner),
            x,
            weights,
            routing,
            (transposed, bias),
            step,
            gate,
            seed,
        )| Case {
            tokens,
            slots,
            experts,
            hidden,
            inner,
            x,
            weights,
            routing,
            transposed,
            step,
            bias,
            gate,
            seed: u64::from(seed),
        },
    )
}

fn tolerance(case: &Case) -> f64 {
    match (case.x, case.weights) {
        (Dtype::Bf16, _) => 1.6e-2,
        (Dtype::F16, _) => 2e-3,
        _ => 1e-5,
    }
}

/// So many cases, or as few as `PROPTEST_CASES` says: under valgrind every one takes fifty times as long.
fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: cases.min(default.cases), failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn levels_and_threads_agree_in_every_bit(case in cases()) {
        let built = case.build();
        let [levels @ .., portable] = available() else { unreachable!("portable code is always there") };
        prop_assert_eq!(portable.name, "portable");
        let wanted = case.run(&built, portable, 1);
        for level in levels {
            prop_assert_eq!(&case.run(&built, level, 1), &wanted, "{}", level.name);
        }
        let fastest = &available()[0];
        prop_assert_eq!(&case.run(&built, fastest, 3), &wanted);
    }

    #[test]
    fn values_are_those_of_a_loop(case in cases()) {
        let built = case.build();
        let wanted = case.wanted(&built);
        let found = case.run(&built, &available()[0], 2);
        let scale = wanted.iter().fold(1e-30_f64, |most, value| most.max(value.abs()));
        // With few numbers the largest may itself be what is left of a cancelled sum.
        let bound = tolerance(&case) * if wanted.len() < 256 { 4.0 } else { 1.0 };
        for (place, value) in wanted.iter().enumerate() {
            let error = (f64::from(read(&found, case.x, place)) - value).abs() / scale.max(0.05);
            prop_assert!(error <= bound, "{error} at {place} of {}", wanted.len());
        }
    }
}

/// A layer large enough for several items and threads.
#[test]
fn large_layers_agree_on_any_number_of_threads() {
    for (transposed, weights) in [(false, Dtype::Bf16), (true, Dtype::F32)] {
        let gate = Gate {
            has_gate: true,
            is_concatenated: false,
            activation: Activation::Silu,
            limit: None,
            alpha: None,
        };
        let case = Case {
            tokens: 70,
            slots: 2,
            experts: 3,
            hidden: 500,
            inner: 700,
            x: Dtype::Bf16,
            weights,
            routing: Dtype::F32,
            transposed,
            step: 1,
            bias: true,
            gate,
            seed: 11,
        };
        let built = case.build();
        let wanted = case.run(&built, &available()[0], 1);
        for threads in [2, 5, 16] {
            assert!(case.run(&built, &available()[0], threads) == wanted);
        }
    }
}

#[test]
fn one_product_gives_rows_in_pair_order_and_zeros_for_sentinels() {
    let gate = Gate {
        has_gate: false,
        is_concatenated: true,
        activation: Activation::Silu,
        limit: None,
        alpha: None,
    };
    let case = Case {
        tokens: 5,
        slots: 3,
        experts: 2,
        hidden: 37,
        inner: 20,
        x: Dtype::F32,
        weights: Dtype::F32,
        routing: Dtype::F32,
        transposed: false,
        step: 1,
        bias: true,
        gate,
        seed: 4,
    };
    let built = case.build();
    let up = &built.linears[0];
    assert!(built.ids.iter().any(|id| *id < 0) && built.ids.contains(&1));
    for level in available() {
        let mut out = vec![f32::NAN; 15 * 20];
        let x = Grid { data: built.x.data(), dtype: case.x, strides: [74, 2] };
        let out_bytes = out.as_mut_ptr().cast();
        let call = RowsCall { x, repeats: 3, address: up.address(), out: out_bytes, threads: 1 };
        // SAFETY: x holds 5 rows of 37 numbers, the result 15 of 20.
        unsafe { up.weights.run(&case.routing(&built), &call, Some(level)) };
        for (pair, row) in out.chunks(20).enumerate() {
            for (column, value) in row.iter().enumerate() {
                let wanted = match usize::try_from(built.ids[pair]) {
                    Ok(expert) if expert < 2 => {
                        up.value(expert, column, |d| f64::from(built.x.get(pair / 3 * 37 + d)))
                    }
                    _ => 0.0,
                };
                assert!((f64::from(*value) - wanted).abs() < 1e-5, "{value} for {wanted}");
            }
        }
    }
}

#[test]
fn sizes_beyond_memory_are_refused() {
    assert!(check_sizes(1 << 20, 1 << 20, 1 << 10).is_ok());
    let error = check_sizes(usize::MAX, 2, 2).unwrap_err();
    assert!(error.found.is_some() && error.needed.is_some() && error.hint.is_some());
}
