//! [`Isa`] with NEON and its integer dot products: eight lanes in two registers.

use std::arch::aarch64::*;
use std::arch::asm;

use super::{Isa, Kernel, NoPairs};

/// Proof of NEON and the dot product instructions.
#[derive(Clone, Copy)]
pub(super) struct Neon(());

/// Runs `kernel`.
#[inline(never)]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

/// An expression of intrinsics in a method of [`Neon`].
macro_rules! proven {
    ($expression:expr) => {
        // SAFETY: a value of `Neon` only exists inside `run`, whose caller detected the features; pointers
        // are valid by the contract of the method.
        unsafe { $expression }
    };
}

/// acc + the products of four signed bytes in each lane.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn signed_dot(mut acc: uint32x4_t, w: uint32x4_t, x: uint32x4_t) -> uint32x4_t {
    // SAFETY: the instruction reads and writes these registers only; the function's features include it.
    unsafe {
        asm!("sdot {acc:v}.4s, {w:v}.16b, {x:v}.16b", acc = inout(vreg) acc, w = in(vreg) w, x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// Transposes 4 × 4 words.
#[inline]
#[target_feature(enable = "neon")]
fn transpose(v: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
    let even = |a, b| vreinterpretq_u64_u32(vtrn1q_u32(a, b));
    let odd = |a, b| vreinterpretq_u64_u32(vtrn2q_u32(a, b));
    let (a, b, c, d) = (even(v[0], v[1]), odd(v[0], v[1]), even(v[2], v[3]), odd(v[2], v[3]));
    [vtrn1q_u64(a, c), vtrn1q_u64(b, d), vtrn2q_u64(a, c), vtrn2q_u64(b, d)].map(|v| vreinterpretq_u32_u64(v))
}

/// Bytes that are `byte` where bits `from`.. of `bits` are set.
#[inline]
#[target_feature(enable = "neon")]
fn bytes_where(byte: u8, bits: u32, from: u8) -> uint32x4_t {
    // Byte i gets byte i / 8 of the bits, of which it keeps bit i % 8.
    let index = vcombine_u8(vdup_n_u8(from / 8), vdup_n_u8(from / 8 + 1));
    let bytes = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(bits)), index);
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
    vreinterpretq_u32_u8(vandq_u8(vtstq_u8(bytes, bit), vdupq_n_u8(byte)))
}

/// The bytes of `a`, negated where `negative` is all ones.
#[inline]
#[target_feature(enable = "neon")]
fn negate_where(a: uint32x4_t, negative: uint32x4_t) -> uint32x4_t {
    let inverted = vreinterpretq_u8_u32(veorq_u32(a, negative));
    vreinterpretq_u32_u8(vsubq_u8(inverted, vreinterpretq_u8_u32(negative)))
}

impl Isa for Neon {
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        proven!(run(kernel))
    }

    const LANES: usize = 8;
    const TOKENS: usize = 4;
    const WIDE_OFFSET: u8 = 128;

    type U = [uint32x4_t; 2];
    type F = [float32x4_t; 2];
    type Pairs = NoPairs;

    #[inline(always)]
    fn splat_u(self, v: u32) -> Self::U {
        proven!([vdupq_n_u32(v); 2])
    }

    #[inline(always)]
    unsafe fn load_u(self, p: *const u32) -> Self::U {
        proven!([vld1q_u32(p), vld1q_u32(p.add(4))])
    }

    #[inline(always)]
    unsafe fn load_u16(self, p: *const u16) -> Self::U {
        proven!({
            let halves = vld1q_u16(p);
            [vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)]
        })
    }

    #[inline(always)]
    unsafe fn load_eight_u8(self, p: *const u8) -> Self::U {
        proven!({
            let halves = vmovl_u8(vld1_u8(p));
            [vmovl_u16(vget_low_u16(halves)), vmovl_high_u16(halves)]
        })
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
        proven!({
            let words = vmovl_s8(vld1_s8(p));
            [vmovl_s16(vget_low_s16(words)), vmovl_high_s16(words)].map(|v| vreinterpretq_u32_s32(v))
        })
    }

    #[inline(always)]
    unsafe fn store_u(self, p: *mut u32, v: Self::U) {
        proven!({
            vst1q_u32(p, v[0]);
            vst1q_u32(p.add(4), v[1]);
        })
    }

    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: Self::U) {
        proven!({
            let halves = vcombine_u16(vmovn_u32(v[0]), vmovn_u32(v[1]));
            vst1_u8(p.cast(), vmovn_u16(halves));
        })
    }

    #[inline(always)]
    unsafe fn load_transposed(self, p: *const u8, stride: usize) -> [Self::U; 4] {
        proven!({
            let row = |r: usize| vreinterpretq_u32_u8(vld1q_u8(p.add(r * stride)));
            let low = transpose([row(0), row(1), row(2), row(3)]);
            let high = transpose([row(4), row(5), row(6), row(7)]);
            [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
        })
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u8) -> [Self::U; 2] {
        proven!({
            let (first, second) = (vld2q_u32(p.cast()), vld2q_u32(p.add(32).cast()));
            [[first.0, second.0], [first.1, second.1]]
        })
    }

    #[inline(always)]
    unsafe fn load_parts(self, low: *const u8, _: *const u8) -> Self::U {
        proven!([vreinterpretq_u32_u8(vld1q_u8(low)), vreinterpretq_u32_u8(vld1q_u8(low.add(16)))])
    }

    #[inline(always)]
    unsafe fn load_low_high_nibbles(self, low: *const u8, _: *const u8) -> Self::U {
        proven!({
            let bytes = vld1q_u8(low);
            [
                vreinterpretq_u32_u8(vandq_u8(bytes, vdupq_n_u8(15))),
                vreinterpretq_u32_u8(vshrq_n_u8::<4>(bytes)),
            ]
        })
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8) -> Self::U {
        proven!({
            let bytes = vld1q_u8(p);
            let (low, high) = (vandq_u8(bytes, vdupq_n_u8(15)), vshrq_n_u8::<4>(bytes));
            [vreinterpretq_u32_u8(vzip1q_u8(low, high)), vreinterpretq_u32_u8(vzip2q_u8(low, high))]
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        proven!({
            let table = vld1q_u8(table.as_ptr());
            let look_up = |i| vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(i)));
            [look_up(indices[0]), look_up(indices[1])]
        })
    }

    #[inline(always)]
    fn bytes_where(self, byte: u8, low: u32, _: u32) -> Self::U {
        proven!([bytes_where(byte, low, 0), bytes_where(byte, low, 16)])
    }

    #[inline(always)]
    fn negate_where(self, a: Self::U, low: u32, _: u32) -> Self::U {
        proven!([
            negate_where(a[0], bytes_where(0xff, low, 0)),
            negate_where(a[1], bytes_where(0xff, low, 16))
        ])
    }

    #[inline(always)]
    fn of_words(self, words: [u64; 8]) -> Self::U {
        proven!([
            vreinterpretq_u32_u64(vcombine_u64(vcreate_u64(words[0]), vcreate_u64(words[1]))),
            vreinterpretq_u32_u64(vcombine_u64(vcreate_u64(words[2]), vcreate_u64(words[3]))),
        ])
    }

    #[inline(always)]
    fn shl_all(self, a: Self::U, n: u32) -> Self::U {
        proven!({
            let n = vdupq_n_s32(n as i32);
            [vshlq_u32(a[0], n), vshlq_u32(a[1], n)]
        })
    }

    #[inline(always)]
    fn shr_parts(self, a: Self::U, low: u32, _: u32) -> Self::U {
        proven!({
            let n = vdupq_n_s32(-(low as i32));
            [vshlq_u32(a[0], n), vshlq_u32(a[1], n)]
        })
    }

    #[inline(always)]
    fn gather_quarters(self, sums: [Self::U; 4]) -> [Self::U; 4] {
        let [low, high] = [[sums[0][0], sums[1][0]], [sums[0][1], sums[1][1]]];
        [low, high, low, high]
    }

    #[inline(always)]
    fn gather_halves(self, sums: [Self::U; 4]) -> [Self::U; 2] {
        let [low, high, ..] = self.gather_quarters(sums);
        let sum = self.add_u(low, high);
        [sum, sum]
    }

    #[inline(always)]
    fn sum_rows(self, [a, b, c, d]: [Self::U; 4]) -> Self::U {
        self.sum_pairs(self.sum_pairs(a, b), self.sum_pairs(c, d))
    }

    #[inline(always)]
    fn sum_pairs(self, a: Self::U, b: Self::U) -> Self::U {
        proven!([vpaddq_u32(a[0], b[0]), vpaddq_u32(a[1], b[1])])
    }

    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        proven!([vandq_u32(a[0], b[0]), vandq_u32(a[1], b[1])])
    }

    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        proven!([vorrq_u32(a[0], b[0]), vorrq_u32(a[1], b[1])])
    }

    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        proven!([veorq_u32(a[0], b[0]), veorq_u32(a[1], b[1])])
    }

    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        self.shl_all(a, N)
    }

    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        self.shr_parts(a, N, N)
    }

    #[inline(always)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        proven!({
            let n = vdupq_n_s32(-(N as i32));
            a.map(|a| vreinterpretq_u32_s32(vshlq_s32(vreinterpretq_s32_u32(a), n)))
        })
    }

    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        proven!([vaddq_u32(a[0], b[0]), vaddq_u32(a[1], b[1])])
    }

    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        proven!([vsubq_u32(a[0], b[0]), vsubq_u32(a[1], b[1])])
    }

    #[inline(always)]
    fn max_i(self, a: Self::U, b: Self::U) -> Self::U {
        let greater = |a, b| proven!(vmaxq_s32(vreinterpretq_s32_u32(a), vreinterpretq_s32_u32(b)));
        proven!([vreinterpretq_u32_s32(greater(a[0], b[0])), vreinterpretq_u32_s32(greater(a[1], b[1]))])
    }

    #[inline(always)]
    fn reduce_add_u(self, a: Self::U) -> u32 {
        proven!(vaddvq_u32(vaddq_u32(a[0], a[1])))
    }

    #[inline(always)]
    fn reduce_max_i(self, a: Self::U) -> i32 {
        proven!(vmaxvq_s32(vmaxq_s32(vreinterpretq_s32_u32(a[0]), vreinterpretq_s32_u32(a[1]))))
    }

    #[inline(always)]
    fn dot(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        proven!([signed_dot(acc[0], w[0], x[0]), signed_dot(acc[1], w[1], x[1])])
    }

    /// Weights are stored as signed bytes.
    #[inline(always)]
    fn dot_wide(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        self.dot(acc, w, x)
    }

    #[inline(always)]
    fn to_f32(self, a: Self::U) -> Self::F {
        proven!([vcvtq_f32_s32(vreinterpretq_s32_u32(a[0])), vcvtq_f32_s32(vreinterpretq_s32_u32(a[1]))])
    }

    #[inline(always)]
    fn round(self, a: Self::F) -> Self::U {
        proven!([vreinterpretq_u32_s32(vcvtnq_s32_f32(a[0])), vreinterpretq_u32_s32(vcvtnq_s32_f32(a[1]))])
    }

    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        proven!([vreinterpretq_u32_f32(a[0]), vreinterpretq_u32_f32(a[1])])
    }

    #[inline(always)]
    fn of_bits(self, a: Self::U) -> Self::F {
        proven!([vreinterpretq_f32_u32(a[0]), vreinterpretq_f32_u32(a[1])])
    }

    #[inline(always)]
    fn f16_to_f32(self, a: Self::U) -> Self::F {
        proven!([
            vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(a[0]))),
            vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(a[1]))),
        ])
    }

    #[inline(always)]
    fn f16_pairs_to_f32(self, a: Self::U) -> [Self::F; 2] {
        [self.f16_to_f32(a), self.f16_to_f32(self.shr::<16>(a))]
    }

    #[inline(always)]
    fn splat(self, v: f32) -> Self::F {
        proven!([vdupq_n_f32(v); 2])
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        proven!([vld1q_f32(p), vld1q_f32(p.add(4))])
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        proven!([
            vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))),
            vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p.add(4)))),
        ])
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::F {
        proven!({
            let codes = vmovl_u8(vld1_u8(p));
            let largest = vdupq_n_u16(0x7F);
            let magnitude = vandq_u16(codes, largest);
            let sign = vandq_u16(vshlq_n_u16::<8>(codes), vdupq_n_u16(0x8000));
            // The last code is no number: all bits of the exponent.
            let last = vandq_u16(vceqq_u16(magnitude, largest), vdupq_n_u16(0x4000));
            let halves = vorrq_u16(vorrq_u16(vshlq_n_u16::<7>(magnitude), last), sign);
            [vget_low_u16(halves), vget_high_u16(halves)]
                .map(|v| vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(v)), 256.0))
        })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::F) {
        proven!({
            vst1q_f32(p, v[0]);
            vst1q_f32(p.add(4), v[1]);
        })
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::F) {
        proven!({
            vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v[0])));
            vst1_u16(p.add(4), vreinterpret_u16_f16(vcvt_f16_f32(v[1])));
        })
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        proven!([vaddq_f32(a[0], b[0]), vaddq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        proven!([vsubq_f32(a[0], b[0]), vsubq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        proven!([vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        proven!([vdivq_f32(a[0], b[0]), vdivq_f32(a[1], b[1])])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        proven!([vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])])
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        proven!([vbslq_f32(vcgtq_f32(a[0], b[0]), a[0], b[0]), vbslq_f32(vcgtq_f32(a[1], b[1]), a[1], b[1])])
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        proven!([vbslq_f32(vcltq_f32(a[0], b[0]), a[0], b[0]), vbslq_f32(vcltq_f32(a[1], b[1]), a[1], b[1])])
    }

    #[inline(always)]
    fn reduce_add(self, a: Self::F) -> f32 {
        proven!({
            let quads = vaddq_f32(a[0], a[1]);
            let pairs = vadd_f32(vget_low_f32(quads), vget_high_f32(quads));
            vget_lane_f32::<0>(pairs) + vget_lane_f32::<1>(pairs)
        })
    }
}
