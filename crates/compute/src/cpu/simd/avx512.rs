//! [`Isa`] with AVX-512 F, BW, VL, DQ and VNNI: sixteen lanes.

use std::arch::x86_64::*;

use super::{Isa, Kernel, NoPairs, avx2};

/// Proof of the features of [`super::SimdLevel::Avx512`].
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Runs `kernel`.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

/// An expression of intrinsics in a method of [`Avx512`].
macro_rules! proven {
    ($expression:expr) => {
        // SAFETY: a value of `Avx512` only exists inside `run`, whose caller detected the features; pointers
        // are valid by the contract of the method.
        unsafe { $expression }
    };
}

/// Transposes the 4 × 4 words in each 128-bit quarter.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose(v: [__m512i; 4]) -> [__m512i; 4] {
    let (a, b) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpacklo_epi32(v[2], v[3]));
    let (c, d) = (_mm512_unpackhi_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[2], v[3]));
    [
        _mm512_unpacklo_epi64(a, b),
        _mm512_unpackhi_epi64(a, b),
        _mm512_unpacklo_epi64(c, d),
        _mm512_unpackhi_epi64(c, d),
    ]
}

/// The 16 bytes at rows `i`, `i` + 4, `i` + 8 and `i` + 12.
///
/// # Safety
/// The 16 bytes of all four rows are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_four(p: *const u8, stride: usize, i: usize) -> __m512i {
    // SAFETY: by the caller.
    unsafe {
        let row = |i: usize| _mm_loadu_si128(p.add(i * stride).cast());
        let v = _mm512_castsi128_si512(row(i));
        let v = _mm512_inserti32x4::<1>(v, row(i + 4));
        let v = _mm512_inserti32x4::<2>(v, row(i + 8));
        _mm512_inserti32x4::<3>(v, row(i + 12))
    }
}

/// Quarters 0 + 1 and 2 + 3 of `a`, then of `b`.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_quarters(a: __m512i, b: __m512i) -> __m512i {
    let even = _mm512_shuffle_i32x4::<0b10_00_10_00>(a, b);
    _mm512_add_epi32(even, _mm512_shuffle_i32x4::<0b11_01_11_01>(a, b))
}

/// Lane i: the sum of all lanes of `v[i]`, added up in the order of [`Isa::reduce_add`].
#[inline]
#[target_feature(enable = "avx512f")]
fn reduce_rows(v: [__m512; 16]) -> __m512 {
    // Lanes i + 8 to lanes i of two vectors, then i + 4 to i of four.
    let halves = |a, b| {
        let outer = _mm512_mask_blend_ps(0xff00, a, b);
        _mm512_add_ps(outer, _mm512_shuffle_f32x4::<0b01_00_11_10>(a, b))
    };
    let quarters = |i: usize| {
        let (a, b) = (halves(v[i], v[i + 4]), halves(v[i + 8], v[i + 12]));
        let even = _mm512_shuffle_f32x4::<0b10_00_10_00>(a, b);
        _mm512_add_ps(even, _mm512_shuffle_f32x4::<0b11_01_11_01>(a, b))
    };
    // Quarter j of the i-th is what has come of vector i + 4j.
    let pairs = |a, b| {
        let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
        let low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)))
    };
    let (a, b) = (pairs(quarters(0), quarters(1)), pairs(quarters(2), quarters(3)));
    let even = _mm512_shuffle_ps::<0b10_00_10_00>(a, b);
    _mm512_add_ps(even, _mm512_shuffle_ps::<0b11_01_11_01>(a, b))
}

/// The first `n` < 16 lanes.
#[inline(always)]
fn first(n: usize) -> __mmask16 {
    (1u16 << n) - 1
}

impl Isa for Avx512 {
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        proven!(run(kernel))
    }

    const LANES: usize = 16;
    const TOKENS: usize = 8;
    const WIDE_OFFSET: u8 = 0;

    type U = __m512i;
    type F = __m512;
    type Pairs = NoPairs;

    #[inline(always)]
    fn splat_u(self, v: u32) -> Self::U {
        proven!(_mm512_set1_epi32(v as i32))
    }

    #[inline(always)]
    unsafe fn load_u(self, p: *const u32) -> Self::U {
        proven!(_mm512_loadu_si512(p.cast()))
    }

    #[inline(always)]
    unsafe fn load_u16(self, p: *const u16) -> Self::U {
        proven!(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))
    }

    #[inline(always)]
    unsafe fn load_eight_u8(self, p: *const u8) -> Self::U {
        proven!(_mm512_zextsi256_si512(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))))
    }

    #[inline(always)]
    unsafe fn load_eight_u16(self, p: *const u16) -> Self::U {
        proven!(_mm512_zextsi256_si512(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
    }

    #[inline(always)]
    unsafe fn load_eight_pairs(self, p: *const u8) -> [Self::U; 2] {
        proven!({
            let pairs = _mm512_loadu_si512(p.cast());
            let first = _mm512_cvtepi64_epi32(pairs);
            let second = _mm512_cvtepi64_epi32(_mm512_srli_epi64::<32>(pairs));
            [_mm512_zextsi256_si512(first), _mm512_zextsi256_si512(second)]
        })
    }

    #[inline(always)]
    unsafe fn load_i8(self, p: *const i8) -> Self::U {
        proven!(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
    }

    #[inline(always)]
    unsafe fn store_u(self, p: *mut u32, v: Self::U) {
        proven!(_mm512_storeu_si512(p.cast(), v))
    }

    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: Self::U) {
        proven!(_mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)))
    }

    #[inline(always)]
    unsafe fn load_transposed(self, p: *const u8, stride: usize) -> [Self::U; 4] {
        proven!(transpose([
            load_four(p, stride, 0),
            load_four(p, stride, 1),
            load_four(p, stride, 2),
            load_four(p, stride, 3),
        ]))
    }

    #[inline(always)]
    unsafe fn load_words_apart(self, p: *const u8, stride: usize) -> [Self::U; 2] {
        proven!({
            // Rows r and r + 8 in the halves.
            let rows = |r: usize| {
                let low = _mm256_loadu_si256(p.add(r * stride).cast());
                let high = _mm256_loadu_si256(p.add((r + 8) * stride).cast());
                _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
            };
            let (a, b) = (_mm512_unpacklo_epi32(rows(0), rows(1)), _mm512_unpacklo_epi32(rows(2), rows(3)));
            let (c, d) = (_mm512_unpacklo_epi32(rows(4), rows(5)), _mm512_unpacklo_epi32(rows(6), rows(7)));
            // First and second words of rows 0..4 and 8..12, and of rows 4..8 and 12..16, a quarter each.
            let (low, high) = (_mm512_unpacklo_epi64(a, b), _mm512_unpacklo_epi64(c, d));
            let first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
            let second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
            [_mm512_permutex2var_epi64(low, first, high), _mm512_permutex2var_epi64(low, second, high)]
        })
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u8) -> [Self::U; 2] {
        proven!({
            let (a, b) = (_mm512_loadu_si512(p.cast()), _mm512_loadu_si512(p.add(64).cast()));
            let even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
            let odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)]
        })
    }

    #[inline(always)]
    unsafe fn load_parts(self, low: *const u8, high: *const u8) -> Self::U {
        proven!({
            let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
            _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(high.cast()))
        })
    }

    #[inline(always)]
    unsafe fn load_low_high_nibbles(self, low: *const u8, high: *const u8) -> Self::U {
        proven!({
            let low = _mm256_broadcastsi128_si256(_mm_loadu_si128(low.cast()));
            let high = _mm256_broadcastsi128_si256(_mm_loadu_si128(high.cast()));
            let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
            let shift = _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0);
            _mm512_and_si512(_mm512_srlv_epi64(both, shift), _mm512_set1_epi8(15))
        })
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8) -> Self::U {
        proven!({
            let bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast()));
            let spread = _mm512_or_si512(bytes, _mm512_slli_epi16::<4>(bytes));
            _mm512_and_si512(spread, _mm512_set1_epi8(15))
        })
    }

    #[inline(always)]
    fn scalar(self, mut n: usize) -> usize {
        // SAFETY: no instruction.
        unsafe {
            core::arch::asm!("/* {0} */", inout(reg) n, options(pure, nomem, nostack, preserves_flags));
        }
        n
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        proven!({
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, indices)
        })
    }

    #[inline(always)]
    fn bytes_where(self, byte: u8, low: u32, high: u32) -> Self::U {
        proven!(_mm512_maskz_set1_epi8(u64::from(high) << 32 | u64::from(low), byte as i8))
    }

    #[inline(always)]
    fn negate_where(self, a: Self::U, low: u32, high: u32) -> Self::U {
        proven!(_mm512_mask_sub_epi8(a, u64::from(high) << 32 | u64::from(low), _mm512_setzero_si512(), a))
    }

    #[inline(always)]
    fn of_words(self, words: [u64; 8]) -> Self::U {
        // Not by `map`, which would be called, and what it calls.
        let [a, b, c, d, e, f, g, h] = words;
        proven!({
            let low = _mm256_set_epi64x(d as i64, c as i64, b as i64, a as i64);
            let high = _mm256_set_epi64x(h as i64, g as i64, f as i64, e as i64);
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
        })
    }

    #[inline(always)]
    fn shl_all(self, a: Self::U, n: u32) -> Self::U {
        proven!(_mm512_sllv_epi32(a, _mm512_set1_epi32(n as i32)))
    }

    #[inline(always)]
    fn shr_parts(self, a: Self::U, low: u32, high: u32) -> Self::U {
        proven!({
            let counts = _mm512_castsi256_si512(_mm256_set1_epi32(low as i32));
            _mm512_srlv_epi32(a, _mm512_inserti64x4::<1>(counts, _mm256_set1_epi32(high as i32)))
        })
    }

    #[inline(always)]
    fn gather_quarters(self, sums: [Self::U; 4]) -> [Self::U; 4] {
        proven!({
            let [a, b, c, d] = sums;
            let (ab, cd) =
                (_mm512_shuffle_i32x4::<0b10_00_10_00>(a, b), _mm512_shuffle_i32x4::<0b10_00_10_00>(c, d));
            let (ab_odd, cd_odd) =
                (_mm512_shuffle_i32x4::<0b11_01_11_01>(a, b), _mm512_shuffle_i32x4::<0b11_01_11_01>(c, d));
            [
                _mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_i32x4::<0b10_00_10_00>(ab_odd, cd_odd),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd),
                _mm512_shuffle_i32x4::<0b11_01_11_01>(ab_odd, cd_odd),
            ]
        })
    }

    #[inline(always)]
    fn gather_halves(self, sums: [Self::U; 4]) -> [Self::U; 2] {
        proven!({
            let (ab, cd) = (add_quarters(sums[0], sums[1]), add_quarters(sums[2], sums[3]));
            [_mm512_shuffle_i32x4::<0b10_00_10_00>(ab, cd), _mm512_shuffle_i32x4::<0b11_01_11_01>(ab, cd)]
        })
    }

    #[inline(always)]
    fn sum_rows(self, rows: [Self::U; 4]) -> Self::U {
        proven!({
            let [a, b, c, d] = rows;
            let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
        })
    }

    #[inline(always)]
    fn sum_pairs(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm512_madd_epi16(_mm512_packs_epi32(a, b), _mm512_set1_epi16(1)))
    }

    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm512_and_si512(a, b))
    }

    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm512_or_si512(a, b))
    }

    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm512_xor_si512(a, b))
    }

    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        proven!(_mm512_slli_epi32::<N>(a))
    }

    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        proven!(_mm512_srli_epi32::<N>(a))
    }

    #[inline(always)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        proven!(_mm512_srai_epi32::<N>(a))
    }

    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm512_sub_epi32(a, b))
    }

    #[inline(always)]
    fn max_i(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm512_max_epi32(a, b))
    }

    #[inline(always)]
    fn reduce_add_u(self, a: Self::U) -> u32 {
        proven!(_mm512_reduce_add_epi32(a) as u32)
    }

    #[inline(always)]
    fn reduce_max_i(self, a: Self::U) -> i32 {
        proven!(_mm512_reduce_max_epi32(a))
    }

    #[inline(always)]
    fn dot(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        proven!(_mm512_dpbusd_epi32(acc, w, x))
    }

    #[inline(always)]
    fn dot_wide(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        proven!(_mm512_dpbusd_epi32(acc, w, x))
    }

    #[inline(always)]
    fn to_f32(self, a: Self::U) -> Self::F {
        proven!(_mm512_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn round(self, a: Self::F) -> Self::U {
        proven!(_mm512_cvtps_epi32(a))
    }

    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        proven!(_mm512_castps_si512(a))
    }

    #[inline(always)]
    fn of_bits(self, a: Self::U) -> Self::F {
        proven!(_mm512_castsi512_ps(a))
    }

    #[inline(always)]
    fn f16_to_f32(self, a: Self::U) -> Self::F {
        proven!(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)))
    }

    #[inline(always)]
    fn f16_pairs_to_f32(self, a: Self::U) -> [Self::F; 2] {
        proven!({
            let low = _mm512_cvtepi32_epi16(a);
            let high = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(a));
            [_mm512_cvtph_ps(low), _mm512_cvtph_ps(high)]
        })
    }

    #[inline(always)]
    fn splat(self, v: f32) -> Self::F {
        proven!(_mm512_set1_ps(v))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        proven!(_mm512_loadu_ps(p))
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        proven!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::F {
        proven!({
            let codes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let largest = _mm256_set1_epi16(0x7F);
            let magnitude = _mm256_and_si256(codes, largest);
            let sign = _mm256_and_si256(_mm256_slli_epi16::<8>(codes), _mm256_set1_epi16(i16::MIN));
            // The last code is no number: all bits of the exponent.
            let last = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, largest), _mm256_set1_epi16(0x4000));
            let halves = _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16::<7>(magnitude), last), sign);
            _mm512_mul_ps(_mm512_cvtph_ps(halves), _mm512_set1_ps(256.0))
        })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::F) {
        proven!(_mm512_storeu_ps(p, v))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::F) {
        proven!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        proven!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn reduce_add(self, a: Self::F) -> f32 {
        proven!({
            let halves = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            avx2::reduce_add(halves)
        })
    }

    #[inline(always)]
    fn reduce_add_16(self, vectors: [Self::F; 16]) -> [f32; 16] {
        let mut sums = [0.0; 16];
        proven!(_mm512_storeu_ps(sums.as_mut_ptr(), reduce_rows(vectors)));
        sums
    }

    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::F {
        proven!(_mm512_maskz_loadu_ps(first(n), p))
    }

    #[inline(always)]
    unsafe fn load_first_f16(self, p: *const u16, n: usize) -> Self::F {
        proven!(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p.cast())))
    }

    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: Self::F, n: usize) {
        proven!(_mm512_mask_storeu_ps(p, first(n), v))
    }
}
