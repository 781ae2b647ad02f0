//! Experts whose weights are codes: every level against the others, bit for bit, and against a loop in double precision.

use proptest::prelude::*;
use routed_experts_core::experts::format::{Code, E2M1, Format, ScaleDtype, Scales};
use routed_experts_core::experts::gate::{Activation, Gate};
use routed_experts_core::experts::levels::{Level, available};
use routed_experts_core::experts::number::{Bf16, Dtype, F16, Number};
use routed_experts_core::experts::operand::Grid;
use routed_experts_core::experts::{Address, Call, Layer, Routing, Weights};

/// Numbers in 0..1 that differ by place.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn signed(&mut self) -> f32 {
        (self.next() % 2001) as f32 / 1000.0 - 1.0
    }
}

/// Bytes of numbers of a type; one byte goes ahead, so that nothing is aligned.
fn stored(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let mut bytes = vec![0xFF];
    for value in values {
        match dtype {
            Dtype::F32 => bytes.extend(value.to_ne_bytes()),
            Dtype::Bf16 => bytes.extend(Bf16::narrow(*value).0.to_ne_bytes()),
            Dtype::F16 => bytes.extend(F16::narrow(*value).0.to_ne_bytes()),
        }
    }
    bytes
}

fn value(bytes: &[u8], dtype: Dtype, place: usize) -> f32 {
    let at = place * dtype.size();
    let half = || u16::from_ne_bytes([bytes[at], bytes[at + 1]]);
    match dtype {
        Dtype::F32 => f32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes")),
        Dtype::Bf16 => Bf16(half()).widen(),
        Dtype::F16 => F16(half()).widen(),
    }
}

/// By the definition of the format, not by the shifts and tables of the core.
fn e4m3(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f64::NAN,
        (0, _) => mantissa * 2_f64.powi(-9),
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

#[derive(Debug, Clone)]
struct Case {
    code: Code,
    scale: ScaleDtype,
    block: [usize; 2],
    /// One scale a half of the first product.
    per_tensor: bool,
    tokens: usize,
    slots: usize,
    experts: usize,
    hidden: usize,
    inner: usize,
    x: Dtype,
    transposed: bool,
    bias: Option<Dtype>,
    gate: Gate,
    seed: u64,
    /// A code of NaN in the first product of expert 0.
    poisoned: bool,
}

struct Linear {
    weights: Weights,
    codes: Vec<u8>,
    scales: Vec<u8>,
    bias: Vec<u8>,
}

impl Linear {
    /// (E, columns, depth) of random codes with random scales; `halves` columns' worth share one if per tensor.
    fn new(case: &Case, columns: usize, depth: usize, halves: usize, noise: &mut Noise) -> Self {
        let bytes = case.code.bytes(depth);
        let strides =
            if case.transposed { [columns * bytes, 1, columns] } else { [columns * bytes, bytes, 1] };
        let block = if case.per_tensor { [columns / halves, depth] } else { case.block };
        let grid = [columns.div_ceil(block[0]), depth.div_ceil(block[1])];
        let alternate = case.per_tensor && halves == 2 && !case.gate.is_concatenated;
        let mut codes: Vec<u8> = (0..case.experts * columns * bytes).map(|_| noise.next() as u8).collect();
        if case.code == Code::E4m3 {
            // Large numbers are rare, NaN never.
            for code in &mut codes {
                *code = if *code & 0x7F == 0x7F { 0 } else { *code };
            }
        }
        let count = case.experts * grid[0] * grid[1];
        let mean = 127 - depth.ilog2() / 2 - if case.code == Code::E4m3 { 6 } else { 1 };
        let scales = match case.scale {
            ScaleDtype::E8m0 => [0xFF]
                .into_iter()
                .chain((0..count).map(|_| (u64::from(mean) + noise.next() % 3) as u8))
                .collect(),
            ScaleDtype::F32 => {
                let unit = 2_f32.powi(mean as i32 - 127);
                stored(&(0..count).map(|_| unit * (1.2 + noise.signed())).collect::<Vec<_>>(), Dtype::F32)
            }
        };
        let bias_dtype = case.bias.unwrap_or(Dtype::F32);
        let bias: Vec<f32> = (0..case.experts * columns).map(|_| noise.signed()).collect();
        let scale_strides = [grid[0] * grid[1], grid[1], 1].map(|stride| stride as isize);
        Self {
            weights: Weights {
                columns,
                depth,
                strides: strides.map(|stride| stride as isize),
                bias_strides: [columns as isize, 1],
                bias: bias_dtype,
                format: Format::Codes(
                    case.code,
                    Scales { strides: scale_strides, dtype: case.scale, block, alternate },
                ),
            },
            codes,
            scales,
            bias: if case.bias.is_some() { stored(&bias, bias_dtype) } else { Vec::new() },
        }
    }

    fn address(&self) -> Address {
        Address {
            matrix: self.codes.as_ptr(),
            bias: if self.bias.is_empty() { std::ptr::null() } else { self.bias[1..].as_ptr() },
            scales: self.scales[1..].as_ptr(),
        }
    }

    fn dot(&self, expert: usize, column: usize, row: impl Fn(usize) -> f64) -> f64 {
        let Format::Codes(code, scales) = self.weights.format else { unreachable!("codes") };
        let [of_expert, of_column, step] = self.weights.strides.map(|stride| stride as usize);
        let scale_row = if scales.alternate { column % 2 } else { column / scales.block[0] };
        let mut sum = 0.0;
        for depth in 0..self.weights.depth {
            let place = if code == Code::E4m3 { depth } else { depth / 2 };
            let byte = self.codes[expert * of_expert + column * of_column + place * step];
            let number = match code {
                Code::E4m3 => e4m3(byte),
                Code::E2m1 => f64::from(E2M1[(byte >> (4 * (depth % 2)) & 15) as usize]),
            };
            let at = expert * scales.strides[0] as usize
                + scale_row * scales.strides[1] as usize
                + depth / scales.block[1];
            let scale = match scales.dtype {
                ScaleDtype::F32 => f64::from(value(&self.scales[1..], Dtype::F32, at)),
                ScaleDtype::E8m0 => 2_f64.powi(i32::from(self.scales[1 + at]) - 127),
            };
            sum += row(depth) * number * scale;
        }
        if self.bias.is_empty() {
            return sum;
        }
        sum + f64::from(value(&self.bias[1..], self.weights.bias, expert * self.weights.columns + column))
    }
}

struct Built {
    layer: Layer,
    linears: [Linear; 2],
    x: Vec<u8>,
    routing: Vec<f32>,
    ids: Vec<i16>,
}

impl Case {
    fn build(&self) -> Built {
        let mut noise = Noise(self.seed);
        let halves = if self.gate.has_gate { 2 } else { 1 };
        let mut up = Linear::new(self, halves * self.inner, self.hidden, halves, &mut noise);
        let down = Linear::new(self, self.hidden, self.inner, 1, &mut noise);
        if self.poisoned {
            up.codes[0] = 0xFF;
        }
        let pairs = self.tokens * self.slots;
        let x: Vec<f32> = (0..self.tokens * self.hidden).map(|_| noise.signed()).collect();
        Built {
            layer: Layer { up: up.weights, down: down.weights, gate: self.gate },
            linears: [up, down],
            x: stored(&x, self.x),
            routing: (0..pairs).map(|_| noise.signed()).collect(),
            ids: (0..pairs).map(|_| (noise.next() % (self.experts as u64 + 2)) as i16 - 1).collect(),
        }
    }

    fn run(&self, built: &Built, level: &Level, threads: usize) -> Vec<u8> {
        let mut out = vec![0xFF; self.tokens * self.hidden * self.x.size()];
        let slots = self.slots as isize;
        let call = Call {
            shape: [self.tokens, self.slots],
            x: Grid { data: built.x[1..].as_ptr(), dtype: self.x, strides: [self.hidden as isize, 1] },
            weights: Grid { data: built.routing.as_ptr().cast(), dtype: Dtype::F32, strides: [slots, 1] },
            addresses: [built.linears[0].address(), built.linears[1].address()],
            out: out.as_mut_ptr(),
            threads,
        };
        // SAFETY: there are T x K ids, and all tensors have the sizes of the case.
        unsafe {
            let routing =
                Routing::new(built.ids.as_ptr(), [slots, 1], [self.tokens, self.slots], self.experts)
                    .expect("sizes of a layout");
            built.layer.run(&routing, &call, Some(level));
        }
        out
    }

    fn wanted(&self, built: &Built) -> Vec<f64> {
        let mut out = vec![0.0; self.tokens * self.hidden];
        for (pair, expert) in built.ids.iter().enumerate() {
            let Some(expert) = usize::try_from(*expert).ok().filter(|expert| *expert < self.experts) else {
                continue;
            };
            let token = pair / self.slots;
            let x = |depth: usize| f64::from(value(&built.x[1..], self.x, token * self.hidden + depth));
            let up = |column: usize| built.linears[0].dot(expert, column, x);
            let silu = |x: f64| x / (1.0 + (-x).exp());
            let gated: Vec<f64> = (0..self.inner)
                .map(|unit| match (self.gate.has_gate, self.gate.is_concatenated) {
                    (false, _) => silu(up(unit)),
                    (true, true) => silu(up(unit)) * up(self.inner + unit),
                    (true, false) => silu(up(2 * unit)) * up(2 * unit + 1),
                })
                .collect();
            for column in 0..self.hidden {
                out[token * self.hidden + column] +=
                    f64::from(built.routing[pair]) * built.linears[1].dot(expert, column, |unit| gated[unit]);
            }
        }
        out
    }
}

/// Formats: block FP8 of any block, MXFP8, per tensor, MXFP4; the last is never transposed and its depths are even.
fn cases() -> impl Strategy<Value = Case> {
    let format = prop_oneof![
        (prop::sample::select(vec![[128, 128], [64, 64], [1, 64], [16, 96], [2, 2], [5, 48], [128, 256]]))
            .prop_map(|block| (Code::E4m3, block, false)),
        Just((Code::E4m3, [1, 32], false)),
        Just((Code::E4m3, [1, 1], true)),
        Just((Code::E2m1, [1, 32], false)),
    ];
    let sizes = (0..12_usize, 1..4_usize, 1..4_usize, 1..300_usize, 1..150_usize);
    let dtypes = prop::sample::select(vec![Dtype::F32, Dtype::Bf16, Dtype::F16]);
    (format, sizes, dtypes.clone(), prop::option::of(dtypes), any::<[bool; 4]>(), any::<u32>()).prop_map(
        |((code, block, per_tensor), (tokens, slots, experts, hidden, inner), x, bias, flags, seed)| {
            let [transposed, e8m0, has_gate, is_concatenated] = flags;
            let four = code == Code::E2m1;
            let even = |size: usize| if four { size.next_multiple_of(2) } else { size };
            let gate =
                Gate { has_gate, is_concatenated, activation: Activation::Silu, limit: None, alpha: None };
            Case {
                code,
                scale: if e8m0 { ScaleDtype::E8m0 } else { ScaleDtype::F32 },
                block,
                per_tensor,
                tokens,
                slots,
                experts,
                hidden: even(hidden),
                inner: even(inner),
                x,
                transposed: transposed && !four,
                bias,
                gate,
                seed: u64::from(seed),
                poisoned: false,
            }
        },
    )
}

fn compare(case: &Case, found: &[u8], wanted: &[f64], relative: f64) -> Result<(), TestCaseError> {
    let scale = wanted.iter().fold(1e-30_f64, |most, value| most.max(value.abs()));
    let bound = relative * if wanted.len() < 256 { 4.0 } else { 1.0 };
    for (place, wanted) in wanted.iter().enumerate() {
        let error = (f64::from(value(found, case.x, place)) - wanted).abs() / scale.max(0.05);
        prop_assert!(error <= bound, "{error} at {place}");
    }
    Ok(())
}

/// So many cases, or as few as `PROPTEST_CASES` says: under valgrind every one takes fifty times as long.
fn config(cases: u32) -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: cases.min(default.cases), failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config(128))]

    #[test]
    fn levels_and_threads_agree_in_every_bit(case in cases()) {
        let built = case.build();
        let [levels @ .., portable] = available() else { unreachable!("portable code is always there") };
        let wanted = case.run(&built, portable, 1);
        for level in levels {
            prop_assert_eq!(&case.run(&built, level, 1), &wanted, "{}", level.name);
        }
        prop_assert_eq!(&case.run(&built, &available()[0], 3), &wanted);
    }

    #[test]
    fn values_are_those_of_a_loop(case in cases()) {
        let built = case.build();
        let relative = match case.x { Dtype::Bf16 => 1.6e-2, Dtype::F16 => 2e-3, Dtype::F32 => 1e-5 };
        compare(&case, &case.run(&built, &available()[0], 2), &case.wanted(&built), relative)?;
    }
}

fn case(code: Code, x: Dtype) -> Case {
    let gate = Gate {
        has_gate: true,
        is_concatenated: true,
        activation: Activation::Silu,
        limit: None,
        alpha: None,
    };
    Case {
        code,
        scale: ScaleDtype::E8m0,
        block: [1, 32],
        per_tensor: false,
        tokens: 9,
        slots: 2,
        experts: 2,
        hidden: 544,
        inner: 480,
        x,
        transposed: false,
        bias: None,
        gate,
        seed: 3,
        poisoned: false,
    }
}

#[test]
fn a_code_of_nan_reaches_every_row_of_its_expert_and_no_other() {
    for x in [Dtype::Bf16, Dtype::F32] {
        for block in [[1, 32], [2, 2]] {
            let case = Case { poisoned: true, block, slots: 1, tokens: 30, ..case(Code::E4m3, x) };
            let built = case.build();
            for level in available() {
                let out = case.run(&built, level, 1);
                for (token, id) in built.ids.iter().enumerate() {
                    let row = (0..case.hidden).map(|h| value(&out, x, token * case.hidden + h));
                    assert!(row.into_iter().all(|value| value.is_nan() == (*id == 0)), "{}", level.name);
                }
            }
        }
    }
}

#[test]
fn all_codes_of_eight_bits_are_exact() {
    // A single depth of one: the result of the first product is the code's number.
    for level in available() {
        for x in [Dtype::Bf16, Dtype::F32] {
            let gate = Gate {
                has_gate: false,
                is_concatenated: true,
                activation: Activation::Identity,
                limit: None,
                alpha: None,
            };
            let scales = |columns: usize| Scales {
                strides: [columns as isize, 1, 1],
                dtype: ScaleDtype::F32,
                block: [1, 1],
                alternate: false,
            };
            let weights = |columns: usize, depth: usize| Weights {
                columns,
                depth,
                strides: [0, depth as isize, 1],
                bias_strides: [0, 0],
                bias: Dtype::F32,
                format: Format::Codes(Code::E4m3, scales(columns)),
            };
            let codes: Vec<u8> = (0..=u8::MAX).collect();
            let ones = [1.0_f32; 256];
            let layer = Layer { up: weights(1, 1), down: weights(256, 1), gate };
            let one = stored(&[1.0], x);
            let mut out = vec![0xFF_u8; 256 * x.size()];
            let address = |codes: *const u8| Address {
                matrix: codes,
                bias: std::ptr::null(),
                scales: ones.as_ptr().cast(),
            };
            let call = Call {
                shape: [1, 1],
                x: Grid { data: one[1..].as_ptr(), dtype: x, strides: [1, 1] },
                weights: Grid { data: ones.as_ptr().cast(), dtype: Dtype::F32, strides: [1, 1] },
                addresses: [address([0x38].as_ptr()), address(codes.as_ptr())],
                out: out.as_mut_ptr(),
                threads: 1,
            };
            // SAFETY: one id, one token of one number, 256 columns of one code.
            unsafe {
                let routing = Routing::new([0_i32].as_ptr(), [1, 1], [1, 1], 1).expect("a layout");
                layer.run(&routing, &call, Some(level));
            }
            for code in 0..=u8::MAX {
                let (found, wanted) = (value(&out, x, code.into()), e4m3(code));
                let same = f64::from(found).to_bits() == wanted.to_bits();
                assert!(
                    same || found.is_nan() && wanted.is_nan() || matches!(code, 0 | 0x80),
                    "{code}: {found}"
                );
            }
        }
    }
}

/// A layer large enough for several items, threads, tiles and chunks.
#[test]
fn large_layers_agree_on_any_number_of_threads() {
    for (code, transposed) in [(Code::E4m3, false), (Code::E4m3, true), (Code::E2m1, false)] {
        let case = Case { tokens: 70, transposed, inner: 736, ..case(code, Dtype::Bf16) };
        let built = case.build();
        let wanted = case.run(&built, &available()[0], 1);
        for threads in [2, 5, 16] {
            assert!(case.run(&built, &available()[0], threads) == wanted);
        }
    }
}

/// Packing transposed columns changes no bit.
#[test]
fn transposed_weights_give_the_same_bits() {
    let case = Case { hidden: 333, inner: 77, ..case(Code::E4m3, Dtype::Bf16) };
    let mut built = case.build();
    let wanted = case.run(&built, &available()[0], 2);
    for linear in &mut built.linears {
        let Weights { columns, depth, .. } = linear.weights;
        let mut codes = vec![0; linear.codes.len()];
        for (place, code) in linear.codes.iter().enumerate() {
            let (expert, column, at) = (place / (columns * depth), place / depth % columns, place % depth);
            codes[(expert * depth + at) * columns + column] = *code;
        }
        linear.codes = codes;
        linear.weights.strides = [columns * depth, 1, columns].map(|stride| stride as isize);
    }
    built.layer = Layer { up: built.linears[0].weights, down: built.linears[1].weights, gate: case.gate };
    for level in available() {
        assert!(case.run(&built, level, 2) == wanted, "{}", level.name);
    }
}
