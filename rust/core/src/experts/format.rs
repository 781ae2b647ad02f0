//! How the numbers of a matrix are stored: as they are, or as codes of 8 or 4 bits beside scales.
//!
//! A value is the code's number times the scale of its block. Every 64 bytes of a column are one chunk; within it the
//! operand rows lie in the order in which registers unfold the codes, so that no code is moved between lanes.

use super::number::{Dtype, F16, Number};

/// Bytes of a chunk: a line of the cache and the widest register.
pub const CHUNK: usize = 64;
/// Registers' worth of pairs: 32 numbers.
const REGISTER: usize = 32;

/// What a code of few bits stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// Eight bits: 4 of exponent, 3 of mantissa, no infinity; all ones is NaN.
    E4m3,
    /// Four bits: 2 of exponent, 1 of mantissa; two in a byte, the lower half first.
    E2m1,
}

/// How a matrix is stored.
#[derive(Debug, Clone, Copy)]
pub enum Format {
    /// Numbers of a type.
    Plain(Dtype),
    /// Codes, with scales beside them.
    Codes(Code, Scales),
}

/// The type of the scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleDtype {
    /// IEEE single.
    F32,
    /// Eight bits of exponent: 2 to the power of the byte minus 127; all ones is NaN.
    E8m0,
}

/// Where the scales of every expert lie, without their address.
#[derive(Debug, Clone, Copy)]
pub struct Scales {
    /// Scales from one expert, row of blocks and block of a row to the next.
    pub strides: [isize; 3],
    /// Their type.
    pub dtype: ScaleDtype,
    /// Columns and depths that share a scale; the last block of either may be short.
    pub block: [usize; 2],
    /// Even columns have the first row of scales, odd ones the second, whatever the block's columns.
    pub alternate: bool,
}

impl Code {
    /// Depths of a chunk.
    pub fn chunk(self) -> usize {
        match self {
            Self::E4m3 => CHUNK,
            Self::E2m1 => 2 * CHUNK,
        }
    }

    /// Bytes of a column.
    pub fn bytes(self, depth: usize) -> usize {
        match self {
            Self::E4m3 => depth,
            Self::E2m1 => depth.div_ceil(2),
        }
    }

    /// Where the number of each depth of a chunk lies within the chunk of an operand row: in rows of bfloat16 the two of
    /// a pair are neighbours, in rows of float32 a register of second numbers goes before that of the first.
    pub fn places(self, rows: Dtype) -> [u8; 2 * CHUNK] {
        std::array::from_fn(|depth| {
            let (register, lane, second) = match self {
                Self::E4m3 => (depth % 16 / 8, depth % CHUNK / 16 * 4 + depth % 8 / 2, depth % 2),
                Self::E2m1 => (depth % 4, depth / 8, depth % 8 / 4),
            };
            let within = if rows == Dtype::Bf16 { 2 * lane + second } else { (1 - second) * 16 + lane };
            (register * REGISTER + within) as u8
        })
    }

    /// The number of the code at a depth of a column.
    ///
    /// # Safety
    /// The column, bytes `step` apart, must be readable there.
    pub unsafe fn read(self, column: *const u8, step: isize, depth: usize) -> f32 {
        let byte = |place: usize| {
            // SAFETY: this function's contract.
            unsafe { column.wrapping_offset(place as isize * step).read() }
        };
        match self {
            Self::E4m3 => e4m3(byte(depth)) * E4M3_FACTOR,
            Self::E2m1 => E2M1[(byte(depth / 2) >> (depth % 2 * 4) & 0xF) as usize],
        }
    }
}

impl Format {
    /// Bytes of a column.
    pub fn bytes(self, depth: usize) -> usize {
        match self {
            Self::Plain(dtype) => depth * dtype.size(),
            Self::Codes(code, _) => code.bytes(depth),
        }
    }

    /// Bytes of the unit of strides: a number, or a byte of codes.
    pub fn unit(self) -> usize {
        match self {
            Self::Plain(dtype) => dtype.size(),
            Self::Codes(..) => 1,
        }
    }
}

/// The numbers of four bits.
#[allow(clippy::unreadable_literal, reason = "a table")]
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// What products of [`e4m3`] are short of: the exponents of its code and of float16 differ by 8 in their bias.
pub const E4M3_FACTOR: f32 = 256.0;

/// The number of a code, divided by [`E4M3_FACTOR`]: the code's bits are those of a float16, subnormals included.
pub fn e4m3(code: u8) -> f32 {
    let (sign, rest) = (u16::from(code & 0x80) << 8, code & 0x7F);
    if rest == 0x7F { f32::NAN } else { F16(sign | u16::from(rest) << 7).widen() }
}

impl Scales {
    /// Scales that a chunk of a column has; none where a block ends inside of what a register can tell apart.
    pub fn groups(&self, code: Code, depth: usize) -> Option<usize> {
        let along = self.block[1];
        if along >= depth || along.is_multiple_of(code.chunk()) {
            Some(1)
        } else {
            along.is_multiple_of(32).then_some(code.chunk() / 32)
        }
    }

    /// The row of scales of a column.
    pub fn row(&self, column: usize) -> usize {
        if self.alternate { column % 2 } else { column / self.block[0] }
    }

    /// One scale of an expert's.
    ///
    /// # Safety
    /// It must be readable.
    #[inline(always)]
    #[allow(clippy::cast_ptr_alignment, reason = "the read asks for no alignment")]
    pub unsafe fn read(&self, expert: *const u8, row: usize, block: usize) -> f32 {
        let at = row as isize * self.strides[1] + block as isize * self.strides[2];
        // SAFETY: this function's contract; neither read asks for an alignment.
        unsafe {
            match self.dtype {
                ScaleDtype::F32 => expert.cast::<f32>().wrapping_offset(at).read_unaligned(),
                ScaleDtype::E8m0 => e8m0(expert.wrapping_offset(at).read()),
            }
        }
    }

    /// The first scales of a row.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub unsafe fn read_all(&self, expert: *const u8, row: usize, values: &mut [f32]) {
        let first = expert.wrapping_offset(row as isize * self.strides[1]);
        if self.dtype == ScaleDtype::E8m0 && self.strides[2] == 1 {
            // A loop of its own, which compilers run on whole registers.
            for (block, value) in values.iter_mut().enumerate() {
                // SAFETY: this function's contract.
                *value = e8m0(unsafe { first.add(block).read() });
            }
            return;
        }
        for (block, value) in values.iter_mut().enumerate() {
            // SAFETY: this function's contract.
            *value = unsafe { self.read(expert, row, block) };
        }
    }
}

impl ScaleDtype {
    /// Bytes of a scale.
    pub fn size(self) -> usize {
        if self == Self::F32 { 4 } else { 1 }
    }
}

/// The power of two of a byte; that of 0 is subnormal.
#[inline(always)]
fn e8m0(byte: u8) -> f32 {
    let bits = (u32::from(byte) << 23).max(0x0040_0000);
    f32::from_bits(if byte == u8::MAX { f32::NAN.to_bits() } else { bits })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_codes() {
        let values = [
            (0x7E, 448.0),
            (0xFE, -448.0),
            (0x08, 0.015_625),
            (0x01, 0.001_953_125),
            (0x38, 1.0),
            (0x80, -0.0),
        ];
        for (code, value) in values {
            assert_eq!((e4m3(code) * E4M3_FACTOR).to_bits(), f32::to_bits(value), "{code:#x}");
        }
        assert!((0..=u8::MAX).all(|code| e4m3(code).is_nan() == (code & 0x7F == 0x7F)));
        // The bytes A1 07 4F 93, low half first.
        let bytes = [0xA1, 0x07, 0x4F, 0x93];
        // SAFETY: there are eight codes.
        let read = |depth| unsafe { Code::E2m1.read(bytes.as_ptr(), 1, depth) };
        let wanted = [0.5, -1.0, 6.0, 0.0, -6.0, 2.0, 1.5, -0.5];
        assert!((0..8).all(|depth| read(depth).to_bits() == f32::to_bits(wanted[depth])));
    }

    #[test]
    fn powers_of_two() {
        let values =
            [(127, 1.0), (125, 0.25), (0, 2_f32.powi(-127)), (1, 2_f32.powi(-126)), (254, 2_f32.powi(127))];
        assert!(values.iter().all(|(byte, value)| e8m0(*byte).to_bits() == value.to_bits()));
        assert!(e8m0(255).is_nan());
    }

    #[test]
    fn places_of_a_chunk_are_a_permutation() {
        for code in [Code::E4m3, Code::E2m1] {
            for rows in [Dtype::Bf16, Dtype::F32] {
                let mut places = code.places(rows)[..code.chunk()].to_vec();
                places.sort_unstable();
                assert!(places.iter().enumerate().all(|(place, found)| place == *found as usize));
            }
        }
    }
}
