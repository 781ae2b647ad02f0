//! The floating types that tokens and weights come in, and their way to float32 and back.

/// A floating type in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// The upper half of an IEEE single.
    Bf16,
    /// IEEE half.
    F16,
}

impl Dtype {
    /// Bytes of a number.
    pub fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// A number as it lies in memory.
pub trait Number: Copy + Default {
    /// The same value.
    fn widen(self) -> f32;
    /// The nearest value, ties to even.
    fn narrow(value: f32) -> Self;
}

/// Bits of a bfloat16.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

/// Bits of a float16.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct F16(pub u16);

impl Number for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        value
    }
}

impl Number for Bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn narrow(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
        // Rounding could carry a NaN into infinity.
        let quiet = bits | 0x0040_0000;
        Self(((if value.is_nan() { quiet } else { rounded }) >> 16) as u16)
    }
}

impl Number for F16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.0);
        // The exponents differ by 112 in their bias; a product puts subnormals right as well.
        let scaled = f32::from_bits((bits & 0x7FFF) << 13) * f32::from_bits((112 + 127) << 23);
        let special = if bits & 0x7C00 == 0x7C00 { 0x7F80_0000 } else { 0 };
        f32::from_bits(scaled.to_bits() | special | ((bits & 0x8000) << 16))
    }

    fn narrow(value: f32) -> Self {
        let sign = (value.to_bits() >> 16) & 0x8000;
        let bits = value.to_bits() & 0x7FFF_FFFF;
        let half = if bits > 0x7F80_0000 {
            0x7E00
        } else if bits >= 0x4780_0000 {
            0x7C00 // 2^16 and above
        } else if bits < 0x3880_0000 {
            // Below 2^-14 the unit is 2^-24, that of 0.5: the sum rounds.
            (f32::from_bits(bits) + 0.5).to_bits() - 0x3F00_0000
        } else {
            (bits - (112 << 23) + 0xFFF + ((bits >> 13) & 1)) >> 13
        };
        Self((sign | half) as u16)
    }
}

/// Calls a function generic over a [`Number`] with the type of a [`Dtype`].
macro_rules! with_number {
    ($dtype:expr, $function:ident::<_>($($argument:expr),* $(,)?)) => {
        match $dtype {
            $crate::experts::number::Dtype::F32 => $function::<f32>($($argument),*),
            $crate::experts::number::Dtype::Bf16 => $function::<$crate::experts::number::Bf16>($($argument),*),
            $crate::experts::number::Dtype::F16 => $function::<$crate::experts::number::F16>($($argument),*),
        }
    };
}
pub(super) use with_number;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_go_to_float32_and_back() {
        for bits in 0..=u16::MAX {
            let (brain, half) = (Bf16(bits), F16(bits));
            if brain.widen().is_nan() {
                assert!(Bf16::narrow(brain.widen()).widen().is_nan());
            } else {
                assert_eq!(Bf16::narrow(brain.widen()), brain);
            }
            if half.widen().is_nan() {
                assert!(F16::narrow(half.widen()).widen().is_nan());
            } else {
                assert_eq!(F16::narrow(half.widen()), half);
            }
        }
    }

    #[test]
    fn values_of_halves() {
        let cases = [
            (0x3C00, 1.0),
            (0xC000, -2.0),
            (0x7BFF, 65504.0),
            (0x0001, 2_f32.powi(-24)),
            (0x0400, 2_f32.powi(-14)),
        ];
        for (bits, value) in cases {
            assert_eq!(F16(bits).widen().to_bits(), value.to_bits());
        }
        assert_eq!(F16(0x7C00).widen().to_bits(), f32::INFINITY.to_bits());
        assert_eq!(F16::narrow(65519.0), F16(0x7BFF));
        assert_eq!(F16::narrow(65520.0), F16(0x7C00));
        assert_eq!(F16::narrow(2_f32.powi(-25)), F16(0)); // a tie goes to even
        assert_eq!(F16::narrow(1.5 * 2_f32.powi(-24)), F16(2));
        assert_eq!(Bf16::narrow(1.0 + 2_f32.powi(-8)), Bf16(0x3F80));
        assert_eq!(Bf16::narrow(1.0 + 3.0 * 2_f32.powi(-8)), Bf16(0x3F82));
        assert_eq!(Bf16::narrow(f32::MAX), Bf16(0x7F80));
    }
}
