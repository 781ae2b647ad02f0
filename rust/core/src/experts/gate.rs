//! Activations and gates between the two products, in float32.
//!
//! Written without branches and without fused multiply-adds, so that compilers run them on registers of any width with
//! the same bits.

/// An activation by its name in Python.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of gates.py, which says what they are")]
pub enum Activation {
    Silu,
    Gelu,
    GeluTanh,
    QuickGelu,
    Relu,
    Relu2,
    Sigmoid,
    Tanh,
    Identity,
}

impl Activation {
    /// The activation of a name of gates.py.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "silu" => Self::Silu,
            "gelu" => Self::Gelu,
            "gelu_tanh" => Self::GeluTanh,
            "quick_gelu" => Self::QuickGelu,
            "relu" => Self::Relu,
            "relu2" => Self::Relu2,
            "sigmoid" => Self::Sigmoid,
            "tanh" => Self::Tanh,
            "identity" => Self::Identity,
            _ => return None,
        })
    }
}

/// What stands between the products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gate {
    /// Whether the first product has a gate and a linear half.
    pub has_gate: bool,
    /// Halves one after the other; else column by column.
    pub is_concatenated: bool,
    /// The function of the gate, or of all where there is none.
    pub activation: Activation,
    /// Clamps the gate from above and the linear half on both sides.
    pub limit: Option<f32>,
    /// The gate is (linear + 1) * gate * sigmoid(alpha * gate).
    pub alpha: Option<f32>,
}

/// One row of the first product: where the two halves begin, and the step within them.
#[derive(Clone, Copy)]
pub struct Halves<'a> {
    /// Gate values, or all values where there is no gate.
    pub gate: &'a [f32],
    /// Linear values; unread where there is no gate.
    pub linear: &'a [f32],
    /// 1, or 2 where gate and linear values alternate.
    pub step: usize,
}

/// Fills `out` with the gated values of one row.
#[inline(always)]
pub fn apply(gate: &Gate, row: Halves<'_>, out: &mut [f32]) {
    match gate.activation {
        _ if gate.has_gate && gate.alpha.is_some() => {
            let alpha = gate.alpha.unwrap_or_default();
            each(gate, row, out, |g, l| (l + 1.0) * (g * sigmoid(alpha * g)));
        }
        Activation::Silu => each(gate, row, out, |g, l| g * sigmoid(g) * l),
        Activation::Gelu => each(gate, row, out, |g, l| gelu(g) * l),
        Activation::GeluTanh => each(gate, row, out, |g, l| gelu_tanh(g) * l),
        Activation::QuickGelu => each(gate, row, out, |g, l| g * sigmoid(1.702 * g) * l),
        Activation::Relu => each(gate, row, out, |g, l| relu(g) * l),
        Activation::Relu2 => each(gate, row, out, |g, l| relu(g) * relu(g) * l),
        Activation::Sigmoid => each(gate, row, out, |g, l| sigmoid(g) * l),
        Activation::Tanh => each(gate, row, out, |g, l| tanh(g) * l),
        Activation::Identity => each(gate, row, out, |g, l| g * l),
    }
}

#[inline(always)]
fn each(gate: &Gate, row: Halves<'_>, out: &mut [f32], formula: impl Fn(f32, f32) -> f32) {
    let limit = gate.limit.unwrap_or(f32::INFINITY);
    let both = |g: f32, l: f32| formula(at_most(g, limit), -at_most(-at_most(l, limit), limit));
    if !gate.has_gate {
        for (value, out) in row.gate.iter().zip(out) {
            *out = formula(*value, 1.0);
        }
    } else if row.step == 1 {
        for ((g, l), out) in row.gate.iter().zip(row.linear).zip(out) {
            *out = both(*g, *l);
        }
    } else {
        for ((g, l), out) in row.gate.iter().step_by(2).zip(row.linear.iter().step_by(2)).zip(out) {
            *out = both(*g, *l);
        }
    }
}

/// The smaller, and NaN where the value is: `f32::min` would drop it.
#[inline(always)]
fn at_most(value: f32, limit: f32) -> f32 {
    if value > limit { limit } else { value }
}

#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// x times the integral of the normal density. Both tails keep their relative precision: the smaller one is computed
/// and the larger one is 1 minus it (Abramowitz and Stegun 7.1.26, off by 1.5e-7 at most).
#[inline(always)]
fn gelu(x: f32) -> f32 {
    const P: f32 = 0.327_591_1;
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + P * z);
    let series =
        t * (0.254_829_6 + t * (-0.284_496_72 + t * (1.421_413_8 + t * (-1.453_152_1 + t * 1.061_405_4))));
    let tail = 0.5 * series * exp(-(z * z));
    x * if x < 0.0 { tail } else { 1.0 - tail }
}

/// With tanh in place of erf: (1 + tanh(z)) / 2 is the sigmoid of 2 z.
#[inline(always)]
fn gelu_tanh(x: f32) -> f32 {
    const SQRT_8_OVER_PI: f32 = 1.595_769;
    x * sigmoid(SQRT_8_OVER_PI * (x + 0.044_715 * (x * x * x)))
}

/// Near 0 a polynomial, for 1 minus something close to 1 has no digits left there.
#[inline(always)]
fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();
    let s = x * x;
    let series = s
        * (-0.333_332_8 + s * (0.133_314_42 + s * (-0.053_739_715 + s * (0.020_639_09 - s * 0.005_704_989))));
    let near = x * (1.0 + series);
    let far = (1.0 - 2.0 / (1.0 + exp(2.0 * magnitude))).copysign(x);
    if magnitude < 0.625 { near } else { far }
}

/// 2 to the whole part of x / ln 2, times a polynomial of the rest; within 2 units in the last place, 0 and infinity
/// beyond what normal numbers hold.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LARGEST: f32 = 88.722_83;
    const SMALLEST: f32 = -87.336_54;
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves a whole number in the low bits
    let inside = if x > LARGEST { LARGEST } else { x };
    let inside = if inside < SMALLEST { SMALLEST } else { inside };
    let shifted = inside * std::f32::consts::LOG2_E + ROUND;
    let whole = shifted - ROUND;
    // ln 2 in two parts, the first with zeros at its end, so that the product is exact.
    let rest = (inside - whole * 0.693_359_4) + whole * 2.121_944_4e-4;
    let series = 0.5
        + rest
            * (0.166_666_65
                + rest
                    * (0.041_665_795
                        + rest * (0.008_333_452 + rest * (0.001_398_2 + rest * 1.987_569_1e-4))));
    let value = 1.0 + rest + rest * rest * series;
    // In two steps, for 2^128 is no number while half of it times 2 may be one.
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = exponent >> 1;
    let power = |exponent: i32| f32::from_bits((exponent.wrapping_add(127) as u32) << 23);
    let scaled = value * power(half) * power(exponent.wrapping_sub(half));
    let bounded = if x > LARGEST { f32::INFINITY } else { scaled };
    if x < SMALLEST { 0.0 } else { bounded }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_close_to_double_precision() {
        for step in -200_000..=200_000 {
            let x = step as f32 * 5e-4;
            let d = f64::from(x);
            close(exp(x), d.exp(), 3e-7);
            close(sigmoid(x), 1.0 / (1.0 + (-d).exp()), 4e-7);
            close(tanh(x), d.tanh(), 4e-7);
            let z = (8.0 / std::f64::consts::PI).sqrt() * (d + 0.044_715 * d * d * d);
            close(gelu_tanh(x), d / (1.0 + (-z).exp()), 2e-5);
        }
    }

    fn close(found: f32, wanted: f64, relative: f64) {
        if wanted.abs() > 1e-37 && wanted.abs() < 3e38 {
            assert!((f64::from(found) - wanted).abs() <= relative * wanted.abs(), "{found} for {wanted}");
        }
    }

    #[test]
    fn values_of_gelu() {
        let values = [
            (0.0, 0.0),
            (1.0, 0.841_344_7),
            (-1.0, -0.158_655_3),
            (3.0, 2.995_950_3),
            (-3.0, -0.004_049_694),
        ];
        for (x, wanted) in values {
            assert!((gelu(x) - wanted).abs() <= 2e-7 * x.abs(), "{x}");
        }
    }

    #[test]
    fn ends_of_the_line() {
        assert_eq!((exp(1000.0), exp(-1000.0), exp(0.0)), (f32::INFINITY, 0.0, 1.0));
        assert!(exp(88.7).is_finite());
        for function in [exp, sigmoid, tanh, gelu, gelu_tanh, relu] {
            assert!(function(f32::NAN).is_nan());
        }
        assert_eq!((sigmoid(-200.0), sigmoid(200.0)), (0.0, 1.0));
        assert_eq!((tanh(-50.0), tanh(50.0), tanh(-0.0).to_bits()), (-1.0, 1.0, (-0.0_f32).to_bits()));
    }
}
