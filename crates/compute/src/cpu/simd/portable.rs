//! [`Isa`] as loops over arrays that the compiler turns into whatever vectors the target has.
#![allow(clippy::needless_range_loop, reason = "one index runs through several arrays of lanes")]

use super::{Isa, Kernel, NoPairs};
use crate::quant::fp8::VALUES;

const LANES: usize = 8;

/// Plain Rust: always there.
#[derive(Clone, Copy)]
pub(super) struct Portable(());

/// Runs `kernel`.
#[inline(never)]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Portable(()))
}

#[inline(always)]
fn map<A: Copy, B: Copy + Default, const N: usize>(a: [A; N], f: impl Fn(A) -> B) -> [B; N] {
    let mut out = [B::default(); N];
    for i in 0..N {
        out[i] = f(a[i]);
    }
    out
}

#[inline(always)]
fn zip<A: Copy, B: Copy + Default>(a: [A; LANES], b: [A; LANES], f: impl Fn(A, A) -> B) -> [B; LANES] {
    let mut out = [B::default(); LANES];
    for i in 0..LANES {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// f16 bits to f32 without branches.
#[inline(always)]
fn f16_to_f32(h: u32) -> f32 {
    // The exponent moves from bias 15 to bias 127 by a multiplication, which also normalises subnormals.
    let magnitude = f32::from_bits((h & 0x7fff) << 13) * f32::from_bits((127 + 112) << 23);
    let special = if h & 0x7c00 == 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(magnitude.to_bits() | special | (h & 0x8000) << 16)
}

impl Isa for Portable {
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        run(kernel)
    }

    const LANES: usize = LANES;
    const TOKENS: usize = 1;
    const WIDE_OFFSET: u8 = 0;

    type U = [u32; LANES];
    type F = [f32; LANES];
    type Pairs = NoPairs;

    #[inline(always)]
    fn splat_u(self, v: u32) -> Self::U {
        [v; LANES]
    }

    #[inline(always)]
    unsafe fn load_u(self, p: *const u32) -> Self::U {
        // SAFETY: by the caller.
        unsafe { p.cast::<Self::U>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_u16(self, p: *const u16) -> Self::U {
        // SAFETY: by the caller.
        map(unsafe { p.cast::<[u16; LANES]>().read_unaligned() }, u32::from)
    }

    #[inline(always)]
    unsafe fn load_eight_u8(self, p: *const u8) -> Self::U {
        // SAFETY: by the caller.
        map(unsafe { p.cast::<[u8; LANES]>().read_unaligned() }, u32::from)
    }

    #[inline(always)]
    unsafe fn load_eight_u16(self, p: *const u16) -> Self::U {
        // SAFETY: by the caller.
        unsafe { self.load_u16(p) }
    }

    #[inline(always)]
    unsafe fn load_eight_pairs(self, p: *const u8) -> [Self::U; 2] {
        // SAFETY: by the caller.
        unsafe { self.load_pairs(p) }
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::U {
        // SAFETY: by the caller.
        map(unsafe { p.cast::<[i8; LANES]>().read_unaligned() }, |v| i32::from(v) as u32)
    }

    #[inline(always)]
    unsafe fn store_u(self, p: *mut u32, v: Self::U) {
        // SAFETY: by the caller.
        unsafe { p.cast::<Self::U>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: Self::U) {
        // SAFETY: by the caller.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(map(v, |v| v as i8)) }
    }

    #[inline(always)]
    unsafe fn load_transposed(self, p: *const u8, stride: usize) -> [Self::U; 4] {
        let mut out = [[0; LANES]; 4];
        for r in 0..LANES {
            // SAFETY: by the caller.
            let words = unsafe { p.add(r * stride).cast::<[u32; 4]>().read_unaligned() };
            for k in 0..4 {
                out[k][r] = u32::from_le(words[k]);
            }
        }
        out
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u8) -> [Self::U; 2] {
        // SAFETY: by the caller.
        let pairs = unsafe { p.cast::<[[u32; 2]; LANES]>().read_unaligned() };
        [pairs.map(|[even, _]| u32::from_le(even)), pairs.map(|[_, odd]| u32::from_le(odd))]
    }

    #[inline(always)]
    unsafe fn load_parts(self, low: *const u8, _: *const u8) -> Self::U {
        // SAFETY: by the caller.
        map(unsafe { low.cast::<Self::U>().read_unaligned() }, u32::from_le)
    }

    #[inline(always)]
    unsafe fn load_low_high_nibbles(self, low: *const u8, _: *const u8) -> Self::U {
        // SAFETY: by the caller.
        let words = map(unsafe { low.cast::<[u32; 4]>().read_unaligned() }, u32::from_le);
        let mut out = [0; LANES];
        for i in 0..4 {
            out[i] = words[i] & 0x0f0f_0f0f;
            out[4 + i] = words[i] >> 4 & 0x0f0f_0f0f;
        }
        out
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8) -> Self::U {
        // SAFETY: by the caller.
        let halves = map(unsafe { p.cast::<[u16; LANES]>().read_unaligned() }, u16::from_le);
        map(halves, |half| {
            let half = u32::from(half);
            let bytes = (half | half << 8) & 0x00ff_00ff;
            (bytes | bytes << 4) & 0x0f0f_0f0f
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        map(indices, |word: u32| u32::from_le_bytes(word.to_le_bytes().map(|i| table[usize::from(i & 15)])))
    }

    #[inline(always)]
    fn bytes_where(self, byte: u8, low: u32, _: u32) -> Self::U {
        let mut out = [0; LANES];
        for i in 0..LANES {
            let bits = low >> (4 * i) & 15;
            out[i] = ((bits | bits << 7 | bits << 14 | bits << 21) & 0x0101_0101) * u32::from(byte);
        }
        out
    }

    #[inline(always)]
    fn negate_where(self, a: Self::U, low: u32, high: u32) -> Self::U {
        let negative = self.bytes_where(0xff, low, high);
        let mut out = [0; LANES];
        for i in 0..LANES {
            // −v is v with all bits inverted, + 1: nothing is carried from a byte to the next.
            let inverted = a[i] ^ negative[i];
            out[i] = ((inverted & 0x7f7f_7f7f) + (negative[i] & 0x0101_0101)) ^ (inverted & 0x8080_8080);
        }
        out
    }

    #[inline(always)]
    fn of_words(self, words: [u64; LANES]) -> Self::U {
        let mut out = [0; LANES];
        for i in 0..LANES / 2 {
            out[2 * i] = words[i] as u32;
            out[2 * i + 1] = (words[i] >> 32) as u32;
        }
        out
    }

    #[inline(always)]
    fn shl_all(self, a: Self::U, n: u32) -> Self::U {
        map(a, |a| a << n)
    }

    #[inline(always)]
    fn shr_parts(self, a: Self::U, low: u32, _: u32) -> Self::U {
        map(a, |a| a >> low)
    }

    #[inline(always)]
    fn gather_quarters(self, sums: [Self::U; 4]) -> [Self::U; 4] {
        let mut out = [[0; LANES]; 4];
        for i in 0..4 {
            out[0][i] = sums[0][i];
            out[0][4 + i] = sums[1][i];
            out[1][i] = sums[0][4 + i];
            out[1][4 + i] = sums[1][4 + i];
        }
        out
    }

    #[inline(always)]
    fn gather_halves(self, sums: [Self::U; 4]) -> [Self::U; 2] {
        let [low, high, ..] = self.gather_quarters(sums);
        [self.add_u(low, high); 2]
    }

    #[inline(always)]
    fn sum_rows(self, rows: [Self::U; 4]) -> Self::U {
        let mut out = [0; LANES];
        for (i, row) in rows.iter().enumerate() {
            for k in 0..2 {
                out[4 * k + i] = row[4 * k..4 * k + 4].iter().copied().fold(0, u32::wrapping_add);
            }
        }
        out
    }

    #[inline(always)]
    fn sum_pairs(self, a: Self::U, b: Self::U) -> Self::U {
        let mut out = [0; LANES];
        for k in (0..LANES).step_by(4) {
            for i in 0..2 {
                out[k + i] = a[k + 2 * i].wrapping_add(a[k + 2 * i + 1]);
                out[k + 2 + i] = b[k + 2 * i].wrapping_add(b[k + 2 * i + 1]);
            }
        }
        out
    }

    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| a ^ b)
    }

    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        map(a, |a| a << N)
    }

    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        map(a, |a| a >> N)
    }

    #[inline(always)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        map(a, |a| (a as i32 >> N) as u32)
    }

    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_add)
    }

    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, u32::wrapping_sub)
    }

    #[inline(always)]
    fn max_i(self, a: Self::U, b: Self::U) -> Self::U {
        zip(a, b, |a, b| if a as i32 > b as i32 { a } else { b })
    }

    #[inline(always)]
    fn reduce_add_u(self, a: Self::U) -> u32 {
        a.into_iter().fold(0, u32::wrapping_add)
    }

    #[inline(always)]
    fn reduce_max_i(self, a: Self::U) -> i32 {
        a.into_iter().fold(i32::MIN, |max, a| max.max(a as i32))
    }

    #[inline(always)]
    fn dot(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        let mut out = acc;
        for r in 0..LANES {
            let (w, x) = (w[r].to_le_bytes(), x[r].to_le_bytes());
            let mut sum = 0;
            for b in 0..4 {
                sum += i32::from(w[b]) * i32::from(x[b] as i8);
            }
            out[r] = out[r].wrapping_add(sum as u32);
        }
        out
    }

    #[inline(always)]
    fn dot_wide(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        self.dot(acc, w, x)
    }

    #[inline(always)]
    fn to_f32(self, a: Self::U) -> Self::F {
        map(a, |a| a as i32 as f32)
    }

    #[inline(always)]
    fn round(self, a: Self::F) -> Self::U {
        // In 2²³..2²⁴ the spacing of floats is 1: adding 1.5 · 2²³ rounds in the default mode.
        const SHIFT: f32 = 12_582_912.0;
        map(a, |a| (a + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()))
    }

    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        map(a, f32::to_bits)
    }

    #[inline(always)]
    fn of_bits(self, a: Self::U) -> Self::F {
        map(a, f32::from_bits)
    }

    #[inline(always)]
    fn f16_to_f32(self, a: Self::U) -> Self::F {
        map(a, f16_to_f32)
    }

    #[inline(always)]
    fn f16_pairs_to_f32(self, a: Self::U) -> [Self::F; 2] {
        [map(a, f16_to_f32), map(a, |pair| f16_to_f32(pair >> 16))]
    }

    #[inline(always)]
    fn splat(self, v: f32) -> Self::F {
        [v; LANES]
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        // SAFETY: by the caller.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        // SAFETY: by the caller.
        let halves = unsafe { p.cast::<[u16; LANES]>().read_unaligned() };
        map(halves, |h| f16_to_f32(h.into()))
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::F {
        // SAFETY: by the caller.
        let codes = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        map(codes, |code| VALUES[usize::from(code)])
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::F) {
        // SAFETY: by the caller.
        unsafe { p.cast::<Self::F>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::F) {
        let halves = map(v, |v| half::f16::from_f32(v).to_bits());
        // SAFETY: by the caller.
        unsafe { p.cast::<[u16; LANES]>().write_unaligned(halves) }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        let mut out = c;
        for i in 0..LANES {
            // Without the instruction, `f32::mul_add` is a slow library call.
            out[i] = if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
                a[i].mul_add(b[i], c[i])
            } else {
                a[i] * b[i] + c[i]
            };
        }
        out
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        zip(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    fn reduce_add(self, a: Self::F) -> f32 {
        let q: [f32; 4] = [a[0] + a[4], a[1] + a[5], a[2] + a[6], a[3] + a[7]];
        (q[0] + q[2]) + (q[1] + q[3])
    }
}
