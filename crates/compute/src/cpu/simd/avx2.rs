//! [`Isa`] with AVX2, FMA and F16C: eight lanes.

use std::arch::x86_64::*;

use super::{Isa, Kernel, Pairs};

/// Proof of AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Runs `kernel`.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

/// An expression of intrinsics in a method of [`Avx2`].
macro_rules! proven {
    ($expression:expr) => {
        // SAFETY: a value of `Avx2` only exists inside `run`, whose caller detected the features; pointers
        // are valid by the contract of the method.
        unsafe { $expression }
    };
}

/// Sum of the lanes by halving.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn reduce_add(a: __m256) -> f32 {
    let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
    let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
}

/// Transposes the 4 × 4 words in each 128-bit half.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(v: [__m256i; 4]) -> [__m256i; 4] {
    let (a, b) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpacklo_epi32(v[2], v[3]));
    let (c, d) = (_mm256_unpackhi_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[2], v[3]));
    [
        _mm256_unpacklo_epi64(a, b),
        _mm256_unpackhi_epi64(a, b),
        _mm256_unpacklo_epi64(c, d),
        _mm256_unpackhi_epi64(c, d),
    ]
}

/// Word 0 of the 16 bytes at rows `i` and `i` + 4 in the two halves, and so on.
///
/// # Safety
/// The 16 bytes of both rows are readable.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_pair(p: *const u8, stride: usize, i: usize) -> __m256i {
    // SAFETY: by the caller.
    unsafe {
        let (low, high) = (p.add(i * stride).cast(), p.add((i + 4) * stride).cast());
        let low = _mm256_castsi128_si256(_mm_loadu_si128(low));
        _mm256_inserti128_si256::<1>(low, _mm_loadu_si128(high))
    }
}

/// Bytes of ones where `bits` are set.
#[inline]
#[target_feature(enable = "avx2")]
fn bytes_where(bits: u32) -> __m256i {
    // Byte i gets byte i / 8 of the bits, of which it keeps bit i % 8.
    let index = _mm256_set_epi64x(0x0303_0303_0303_0303, 0x0202_0202_0202_0202, 0x0101_0101_0101_0101, 0);
    let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), index);
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit)
}

/// The first half of `a` and the second of `b`, and the second of `a` and the first of `b`.
#[inline]
#[target_feature(enable = "avx2")]
fn halves(a: __m256i, b: __m256i) -> [__m256i; 2] {
    [_mm256_blend_epi32::<0b1111_0000>(a, b), _mm256_permute2x128_si256::<0x21>(a, b)]
}

/// What shuffles byte `low` of each 32-bit lane or, in the second half, `high` to the bytes where `to` is 0; others, where
/// it is 0x80, become 0.
#[inline]
#[target_feature(enable = "avx2")]
fn byte_of_lanes(low: usize, high: usize, to: u32) -> __m256i {
    let of = |lane: u32, byte: usize| (to + 0x0101_0101 * (4 * lane + byte as u32)) as i32;
    _mm256_setr_epi32(
        of(0, low),
        of(1, low),
        of(2, low),
        of(3, low),
        of(0, high),
        of(1, high),
        of(2, high),
        of(3, high),
    )
}

impl Isa for Avx2 {
    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        proven!(run(kernel))
    }

    const LANES: usize = 8;
    const TOKENS: usize = 4;
    const WIDE_OFFSET: u8 = 128;

    type U = __m256i;
    type F = __m256;
    type Pairs = Self;

    #[inline(always)]
    fn pairs(self) -> Option<Self> {
        Some(self)
    }

    #[inline(always)]
    fn splat_u(self, v: u32) -> Self::U {
        proven!(_mm256_set1_epi32(v as i32))
    }

    #[inline(always)]
    unsafe fn load_u(self, p: *const u32) -> Self::U {
        proven!(_mm256_loadu_si256(p.cast()))
    }

    #[inline(always)]
    unsafe fn load_u16(self, p: *const u16) -> Self::U {
        proven!(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))
    }

    #[inline(always)]
    unsafe fn load_eight_u8(self, p: *const u8) -> Self::U {
        proven!(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())))
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
        proven!(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))
    }

    #[inline(always)]
    unsafe fn store_u(self, p: *mut u32, v: Self::U) {
        proven!(_mm256_storeu_si256(p.cast(), v))
    }

    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8, v: Self::U) {
        proven!({
            let words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(words, words));
        })
    }

    #[inline(always)]
    unsafe fn load_transposed(self, p: *const u8, stride: usize) -> [Self::U; 4] {
        proven!(transpose([
            load_pair(p, stride, 0),
            load_pair(p, stride, 1),
            load_pair(p, stride, 2),
            load_pair(p, stride, 3),
        ]))
    }

    #[inline(always)]
    unsafe fn load_words_apart(self, p: *const u8, stride: usize) -> [Self::U; 2] {
        proven!({
            let row = |r: usize| _mm256_loadu_si256(p.add(r * stride).cast());
            let (a, b) = (_mm256_unpacklo_epi32(row(0), row(1)), _mm256_unpacklo_epi32(row(2), row(3)));
            let (c, d) = (_mm256_unpacklo_epi32(row(4), row(5)), _mm256_unpacklo_epi32(row(6), row(7)));
            let (low, high) = (_mm256_unpacklo_epi64(a, b), _mm256_unpacklo_epi64(c, d));
            [_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high)]
        })
    }

    #[inline(always)]
    unsafe fn load_pairs(self, p: *const u8) -> [Self::U; 2] {
        proven!({
            let (a, b) = (_mm256_loadu_ps(p.cast()), _mm256_loadu_ps(p.add(32).cast()));
            // Of both, the first four words and then the last four.
            let even = _mm256_castps_si256(_mm256_shuffle_ps::<0b10_00_10_00>(a, b));
            let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0b11_01_11_01>(a, b));
            [_mm256_permute4x64_epi64::<0b11_01_10_00>(even), _mm256_permute4x64_epi64::<0b11_01_10_00>(odd)]
        })
    }

    #[inline(always)]
    unsafe fn load_parts(self, low: *const u8, _: *const u8) -> Self::U {
        proven!(_mm256_loadu_si256(low.cast()))
    }

    #[inline(always)]
    unsafe fn load_low_high_nibbles(self, low: *const u8, _: *const u8) -> Self::U {
        proven!({
            let both = _mm256_broadcastsi128_si256(_mm_loadu_si128(low.cast()));
            let shifted = _mm256_srlv_epi64(both, _mm256_set_epi64x(4, 4, 0, 0));
            _mm256_and_si256(shifted, _mm256_set1_epi8(15))
        })
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, p: *const u8) -> Self::U {
        proven!({
            let bytes = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
            let spread = _mm256_or_si256(bytes, _mm256_slli_epi16::<4>(bytes));
            _mm256_and_si256(spread, _mm256_set1_epi8(15))
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U {
        proven!({
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            _mm256_shuffle_epi8(table, indices)
        })
    }

    #[inline(always)]
    fn bytes_where(self, byte: u8, low: u32, _: u32) -> Self::U {
        proven!(_mm256_and_si256(bytes_where(low), _mm256_set1_epi8(byte as i8)))
    }

    #[inline(always)]
    fn negate_where(self, a: Self::U, low: u32, _: u32) -> Self::U {
        proven!({
            let negative = bytes_where(low);
            _mm256_sub_epi8(_mm256_xor_si256(a, negative), negative)
        })
    }

    #[inline(always)]
    fn of_words(self, words: [u64; 8]) -> Self::U {
        // Not by `map`, which would be called, and what it calls.
        let [a, b, c, d, ..] = words;
        proven!(_mm256_set_epi64x(d as i64, c as i64, b as i64, a as i64))
    }

    #[inline(always)]
    fn bytes(self, a: Self::U) -> [Self::U; 4] {
        proven!([
            _mm256_shuffle_epi8(a, byte_of_lanes(0, 0, 0x8080_8000)),
            _mm256_shuffle_epi8(a, byte_of_lanes(1, 1, 0x8080_8000)),
            _mm256_shuffle_epi8(a, byte_of_lanes(2, 2, 0x8080_8000)),
            _mm256_shuffle_epi8(a, byte_of_lanes(3, 3, 0x8080_8000)),
        ])
    }

    #[inline(always)]
    fn shl_all(self, a: Self::U, n: u32) -> Self::U {
        proven!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(n as i32)))
    }

    #[inline(always)]
    fn shr_parts(self, a: Self::U, low: u32, _: u32) -> Self::U {
        proven!(_mm256_srl_epi32(a, _mm_cvtsi32_si128(low as i32)))
    }

    #[inline(always)]
    fn gather_quarters(self, sums: [Self::U; 4]) -> [Self::U; 4] {
        proven!({
            let low = _mm256_permute2x128_si256::<0x20>(sums[0], sums[1]);
            let high = _mm256_permute2x128_si256::<0x31>(sums[0], sums[1]);
            [low, high, low, high]
        })
    }

    #[inline(always)]
    fn gather_halves(self, sums: [Self::U; 4]) -> [Self::U; 2] {
        let [low, high, ..] = self.gather_quarters(sums);
        let sum = self.add_u(low, high);
        [sum, sum]
    }

    #[inline(always)]
    fn sum_rows(self, rows: [Self::U; 4]) -> Self::U {
        proven!({
            let [a, b, c, d] = rows;
            _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d))
        })
    }

    #[inline(always)]
    fn sum_pairs(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm256_madd_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(1)))
    }

    #[inline(always)]
    fn and(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn or(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn xor(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm256_xor_si256(a, b))
    }

    #[inline(always)]
    fn shl<const N: u32>(self, a: Self::U) -> Self::U {
        proven!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(N as i32)))
    }

    #[inline(always)]
    fn shr<const N: u32>(self, a: Self::U) -> Self::U {
        proven!(_mm256_srl_epi32(a, _mm_cvtsi32_si128(N as i32)))
    }

    #[inline(always)]
    fn sar<const N: u32>(self, a: Self::U) -> Self::U {
        proven!(_mm256_sra_epi32(a, _mm_cvtsi32_si128(N as i32)))
    }

    #[inline(always)]
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm256_sub_epi32(a, b))
    }

    #[inline(always)]
    fn max_i(self, a: Self::U, b: Self::U) -> Self::U {
        proven!(_mm256_max_epi32(a, b))
    }

    #[inline(always)]
    fn reduce_add_u(self, a: Self::U) -> u32 {
        proven!({
            let a = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_add_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a))) as u32
        })
    }

    #[inline(always)]
    fn reduce_max_i(self, a: Self::U) -> i32 {
        proven!({
            let a = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256::<1>(a));
            let a = _mm_max_epi32(a, _mm_shuffle_epi32::<0b01_00_11_10>(a));
            _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32::<0b10_11_00_01>(a)))
        })
    }

    #[inline(always)]
    fn dot(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        proven!({
            // Pairs stay within 2 · 63 · 127 < 2¹⁵: no saturation.
            let pairs = _mm256_maddubs_epi16(w, x);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn dot_wide(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U {
        proven!({
            // Signed weights as |w| · (x with the sign of w); pairs stay within 2 · 128 · 127 < 2¹⁵.
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn to_f32(self, a: Self::U) -> Self::F {
        proven!(_mm256_cvtepi32_ps(a))
    }

    #[inline(always)]
    fn round(self, a: Self::F) -> Self::U {
        proven!(_mm256_cvtps_epi32(a))
    }

    #[inline(always)]
    fn bits(self, a: Self::F) -> Self::U {
        proven!(_mm256_castps_si256(a))
    }

    #[inline(always)]
    fn of_bits(self, a: Self::U) -> Self::F {
        proven!(_mm256_castsi256_ps(a))
    }

    #[inline(always)]
    fn f16_to_f32(self, a: Self::U) -> Self::F {
        proven!({
            let halves = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
            let packed = _mm256_permute4x64_epi64::<0b10_00>(_mm256_packus_epi32(halves, halves));
            _mm256_cvtph_ps(_mm256_castsi256_si128(packed))
        })
    }

    #[inline(always)]
    fn f16_pairs_to_f32(self, a: Self::U) -> [Self::F; 2] {
        proven!({
            let low = _mm256_and_si256(a, _mm256_set1_epi32(0xffff));
            // Low and high halves of the first four lanes, then of the last four.
            let packed = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(a));
            let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            let high = _mm256_extracti128_si256::<1>(halves);
            [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(high)]
        })
    }

    #[inline(always)]
    fn splat(self, v: f32) -> Self::F {
        proven!(_mm256_set1_ps(v))
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Self::F {
        proven!(_mm256_loadu_ps(p))
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> Self::F {
        proven!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, p: *const u8) -> Self::F {
        proven!({
            let codes = _mm_cvtepu8_epi16(_mm_loadl_epi64(p.cast()));
            let largest = _mm_set1_epi16(0x7F);
            let magnitude = _mm_and_si128(codes, largest);
            let sign = _mm_and_si128(_mm_slli_epi16::<8>(codes), _mm_set1_epi16(i16::MIN));
            // The last code is no number: all bits of the exponent.
            let last = _mm_and_si128(_mm_cmpeq_epi16(magnitude, largest), _mm_set1_epi16(0x4000));
            let halves = _mm_or_si128(_mm_or_si128(_mm_slli_epi16::<7>(magnitude), last), sign);
            _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(256.0))
        })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Self::F) {
        proven!(_mm256_storeu_ps(p, v))
    }

    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: Self::F) {
        proven!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(v)))
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        proven!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        proven!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn reduce_add(self, a: Self::F) -> f32 {
        proven!(reduce_add(a))
    }
}

impl Pairs<__m256i> for Avx2 {
    #[inline(always)]
    fn of_words(self, [[a, b], [c, d], [e, f], [g, h]]: [[u32; 2]; 4]) -> __m256i {
        // Each is loaded where it is put.
        proven!({
            let low = _mm_setr_epi32(a as i32, b as i32, c as i32, d as i32);
            let high = _mm_setr_epi32(e as i32, f as i32, g as i32, h as i32);
            _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
        })
    }

    #[inline(always)]
    unsafe fn load_halves(self, low: *const u8, high: *const u8) -> __m256i {
        proven!(_mm256_loadu2_m128i(high.cast(), low.cast()))
    }

    #[inline(always)]
    fn multiply(self, w: __m256i, x: __m256i) -> __m256i {
        proven!(_mm256_maddubs_epi16(w, x))
    }

    #[inline(always)]
    fn add(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_add_epi16(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_sub_epi16(a, b))
    }

    #[inline(always)]
    fn dot(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_madd_epi16(a, b))
    }

    #[inline(always)]
    fn pack(self, a: __m256i, b: __m256i) -> __m256i {
        proven!(_mm256_packs_epi32(a, b))
    }

    #[inline(always)]
    fn mix(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        // Of these two only one needs the ports that shuffles have.
        proven!([_mm256_blend_epi32::<0b1100_1100>(a, b), _mm256_alignr_epi8::<8>(b, a)])
    }

    #[inline(always)]
    fn swap(self, a: __m256i) -> __m256i {
        proven!(_mm256_shuffle_epi32::<0b01_00_11_10>(a))
    }

    #[inline(always)]
    fn add_halves(self, a: __m256i, b: __m256i) -> __m256i {
        proven!({
            let [straight, crossed] = halves(a, b);
            _mm256_add_epi16(straight, crossed)
        })
    }

    #[inline(always)]
    fn add_halves_of_32(self, a: __m256i, b: __m256i) -> __m256i {
        proven!({
            let [straight, crossed] = halves(a, b);
            _mm256_add_epi32(straight, crossed)
        })
    }

    #[inline(always)]
    fn regroup(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        proven!([_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b)])
    }

    #[inline(always)]
    fn even_and_odd(self, a: __m256i, b: __m256i) -> [__m256i; 2] {
        proven!({
            let order = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15,
            ));
            let (a, b) = (_mm256_shuffle_epi8(a, order), _mm256_shuffle_epi8(b, order));
            // Of each quarter those of `a`, then those of `b`.
            let (even, odd) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            [_mm256_permute4x64_epi64::<0b11_01_10_00>(even), _mm256_permute4x64_epi64::<0b11_01_10_00>(odd)]
        })
    }

    #[inline(always)]
    fn repeat_halves(self, a: __m256i) -> [__m256i; 2] {
        proven!([_mm256_permute4x64_epi64::<0b01_00_01_00>(a), _mm256_permute4x64_epi64::<0b11_10_11_10>(a)])
    }

    #[inline(always)]
    fn spread<const SIGNED: bool>(self, a: __m256i, low: usize, high: usize) -> __m256i {
        proven!(if SIGNED {
            _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(a, byte_of_lanes(low, high, 0x0080_0080)))
        } else {
            _mm256_shuffle_epi8(a, byte_of_lanes(low, high, 0x8000_8000))
        })
    }
}
