//! Instruction sets, chosen at run time.
//!
//! Kernels are written once, as a `Kernel` generic over `Isa`, the vocabulary of vector operations that
//! each [`SimdLevel`] provides; `Simd::run` compiles them once a level and calls the one that [`Simd`]
//! stands for. A `Simd` can only be had for a level that was detected on this machine, and the types
//! that implement `Isa` only from `Simd::run`, so an unsupported instruction cannot be reached.
//!
//! A kernel gives the same bits whenever it runs at the same level; levels may differ in the last bits of
//! floating-point results because only some of them fuse multiply and add.

use std::{fmt, str::FromStr};

use crate::{Error, Result};

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
#[cfg_attr(test, allow(dead_code))]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg_attr(test, allow(dead_code))]
mod portable;

/// A set of instructions that kernels are compiled for, lowest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SimdLevel {
    /// What every machine of the target architecture has.
    Portable,
    /// aarch64 with NEON and its dot products.
    Neon,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI on top of [`SimdLevel::Avx2`].
    Avx512,
}

impl SimdLevel {
    /// Unit tests have one, as kernels take long to compile; `tests/it` runs them on every one.
    const ALL: &[Self] = if cfg!(all(test, target_arch = "x86_64")) {
        &[Self::Avx2]
    } else {
        &[Self::Portable, Self::Neon, Self::Avx2, Self::Avx512]
    };

    /// The highest level of this machine.
    pub fn detect() -> Self {
        Self::ALL.iter().copied().rfind(|level| level.is_available()).unwrap_or(Self::Portable)
    }

    /// Every level of this machine, lowest first.
    pub fn available() -> Vec<Self> {
        Self::ALL.iter().copied().filter(|level| level.is_available()).collect()
    }

    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => {
                std::arch::is_aarch64_feature_detected!("neon")
                    && std::arch::is_aarch64_feature_detected!("dotprod")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
            #[cfg(not(target_arch = "aarch64"))]
            Self::Neon => false,
        }
    }

    fn unavailable(got: &str) -> Error {
        let names: Vec<String> = Self::available().iter().map(Self::to_string).collect();
        Error::SimdLevel { got: got.to_owned(), available: names.join(", ") }
    }
}

impl fmt::Display for SimdLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Portable => "portable",
            Self::Neon => "neon",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        })
    }
}

impl FromStr for SimdLevel {
    type Err = Error;

    /// Reads what `Display` writes.
    fn from_str(name: &str) -> Result<Self> {
        let level = Self::ALL.iter().copied().find(|level| level.to_string() == name);
        level.ok_or_else(|| Self::unavailable(name))
    }
}

/// Proof that this machine has a [`SimdLevel`]: what kernels ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Simd {
    level: SimdLevel,
}

impl Simd {
    /// Kernels of `level`.
    ///
    /// # Errors
    /// [`Error::SimdLevel`] if this machine lacks it.
    pub fn new(level: SimdLevel) -> Result<Self> {
        if level.is_available() {
            Ok(Self { level })
        } else {
            Err(SimdLevel::unavailable(&level.to_string()))
        }
    }

    /// Kernels of [`SimdLevel::detect`].
    pub fn detect() -> Self {
        Self { level: SimdLevel::detect() }
    }

    /// The level.
    pub fn level(self) -> SimdLevel {
        self.level
    }

    /// Runs `kernel` with the instructions of this level.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.level {
            // SAFETY: a `Simd` of this level exists only if `is_available` found its features.
            #[cfg(all(target_arch = "x86_64", not(test)))]
            SimdLevel::Avx512 => unsafe { avx512::run(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            SimdLevel::Avx2 => unsafe { avx2::run(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            SimdLevel::Neon => unsafe { neon::run(kernel) },
            #[cfg(not(all(target_arch = "x86_64", test)))]
            _ => portable::run(kernel),
            #[cfg(all(target_arch = "x86_64", test))]
            level => unreachable!("unit tests need AVX2 and have no kernels of {level}"),
        }
    }
}

impl fmt::Display for Simd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.level.fmt(f)
    }
}

/// A computation written once for every instruction set.
pub(crate) trait Kernel {
    /// What it computes.
    type Output;

    /// Computes it. Must be `#[inline(always)]`, as must everything generic over [`Isa`] that it calls (so no
    /// closures): the instruction set is that of the function it ends up in.
    fn run<I: Isa>(self, isa: I) -> Self::Output;
}

/// Vectors of [`Isa::LANES`] 32-bit lanes and the operations on them. Having a value of an implementing
/// type proves that the machine has its instructions.
///
/// Integer lanes ([`Isa::U`]) are bits: signedness is in the operation. Methods that take pointers
/// need them valid for the stated number of elements, of any alignment.
pub(crate) trait Isa: Copy {
    /// Runs `kernel` in a function of its own, so that it is compiled once for all its callers.
    fn call<K: Kernel>(self, kernel: K) -> K::Output;

    /// Lanes of a vector; at most [`MAX_LANES`].
    const LANES: usize;
    /// Tokens that the inner loops of matrix products keep in registers.
    const TOKENS: usize;
    /// [`Isa::dot_wide`] multiplies weights w stored as the byte w ^ `WIDE_OFFSET` and yields products of
    /// w − `WIDE_OFFSET`.
    const WIDE_OFFSET: u8;

    /// Integer vector.
    type U: Copy;
    /// f32 vector.
    type F: Copy;
    /// What [`Isa::pairs`] gives.
    type Pairs: Pairs<Self::U>;

    /// Operations on 16-bit lanes, where dot products of bytes are best made of them; if so, there are eight lanes.
    #[inline(always)]
    fn pairs(self) -> Option<Self::Pairs> {
        None
    }

    /// Every lane `v`.
    fn splat_u(self, v: u32) -> Self::U;
    /// `LANES` elements from `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` elements.
    unsafe fn load_u(self, p: *const u32) -> Self::U;
    /// `LANES` 16-bit elements from `p`, in the low halves of the lanes.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` elements.
    unsafe fn load_u16(self, p: *const u16) -> Self::U;
    /// Eight bytes from `p` in the lowest eight lanes; others are 0.
    ///
    /// # Safety
    /// `p` is valid for reads of as many.
    unsafe fn load_eight_u8(self, p: *const u8) -> Self::U;
    /// As [`Isa::load_eight_u8`] of eight 16-bit elements.
    ///
    /// # Safety
    /// As there.
    unsafe fn load_eight_u16(self, p: *const u16) -> Self::U;
    /// Of eight pairs of words from `p`, the first ones and the second ones, in the lowest eight lanes.
    ///
    /// # Safety
    /// `p` is valid for reads of 64 bytes.
    unsafe fn load_eight_pairs(self, p: *const u8) -> [Self::U; 2];
    /// `LANES` signed bytes from `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` elements.
    unsafe fn load_i8(self, p: *const i8) -> Self::U;
    /// Writes `LANES` elements to `p`.
    ///
    /// # Safety
    /// `p` is valid for writes of `LANES` elements.
    unsafe fn store_u(self, p: *mut u32, v: Self::U);
    /// Writes the low byte of each lane to `p`.
    ///
    /// # Safety
    /// `p` is valid for writes of `LANES` bytes. Lanes are in −128..128.
    unsafe fn store_i8(self, p: *mut i8, v: Self::U);
    /// Four vectors k = 0..4 whose lane r is the little-endian word k of the 16 bytes at `p` + r · `stride`.
    ///
    /// # Safety
    /// Those 16 bytes are readable for every r below `LANES`.
    unsafe fn load_transposed(self, p: *const u8, stride: usize) -> [Self::U; 4];
    /// Two vectors whose lanes r are the little-endian words at `p` + r · `stride` and 16 bytes further on.
    ///
    /// # Safety
    /// 32 bytes from there are readable for every r below `LANES`.
    #[inline(always)]
    unsafe fn load_words_apart(self, p: *const u8, stride: usize) -> [Self::U; 2] {
        // SAFETY: by the caller.
        let ([first, ..], [second, ..]) =
            unsafe { (self.load_transposed(p, stride), self.load_transposed(p.add(16), stride)) };
        [first, second]
    }

    /// The even ones of 2 · `LANES` words from `p`, and the odd ones.
    ///
    /// # Safety
    /// `p` is valid for reads of 8 · `LANES` bytes.
    unsafe fn load_pairs(self, p: *const u8) -> [Self::U; 2];
    /// 32 bytes from `low` and, if there are sixteen lanes, 32 from `high` above them.
    ///
    /// # Safety
    /// Both are valid for reads of 32 bytes.
    unsafe fn load_parts(self, low: *const u8, high: *const u8) -> Self::U;
    /// As [`Isa::load_parts`] of 32 nibbles each, as bytes: first the low ones of 16 bytes, then the high ones.
    ///
    /// # Safety
    /// Both are valid for reads of 16 bytes.
    unsafe fn load_low_high_nibbles(self, low: *const u8, high: *const u8) -> Self::U;
    /// The nibbles of 2 · `LANES` bytes from `p` as bytes, the low one of each byte before the high one.
    ///
    /// # Safety
    /// `p` is valid for reads of as many bytes.
    unsafe fn load_nibbles(self, p: *const u8) -> Self::U;

    /// `n`, which compilers then take for no lane of a vector.
    #[inline(always)]
    fn scalar(self, n: usize) -> usize {
        n
    }
    /// The byte of `table` that each byte of `indices`, which are below 16, stands for.
    fn lookup(self, table: &[u8; 16], indices: Self::U) -> Self::U;
    /// Bytes that are `byte` where the bits of `low`, and above them those of `high`, are set.
    fn bytes_where(self, byte: u8, low: u32, high: u32) -> Self::U;
    /// The signed bytes of `a`, negated where the bits of `low`, and above them those of `high`, are set; none is −128.
    fn negate_where(self, a: Self::U, low: u32, high: u32) -> Self::U;
    /// The bytes of the first `LANES` / 2 of `words`, the lowest of each first.
    fn of_words(self, words: [u64; MAX_LANES / 2]) -> Self::U;
    /// The four bytes of each lane, unsigned, the lowest first.
    #[inline(always)]
    fn bytes(self, a: Self::U) -> [Self::U; 4] {
        let byte = self.splat_u(0xff);
        [
            self.and(a, byte),
            self.and(self.shr::<8>(a), byte),
            self.and(self.shr::<16>(a), byte),
            self.shr::<24>(a),
        ]
    }
    /// Shift left by `n` < 32.
    fn shl_all(self, a: Self::U, n: u32) -> Self::U;
    /// Shift right by `low` in the lowest eight lanes and by `high` in those above, filling with zeros.
    fn shr_parts(self, a: Self::U, low: u32, high: u32) -> Self::U;

    /// Adds up quarters of `LANES` vectors r = 0.. of products of rows r: lane i of the result k < 4 (`LANES` = 16) or
    /// k < 2 is the sum of lanes 4k..4k + 4 of vector i. Given by [`Isa::sum_rows`] from four rows each.
    fn gather_quarters(self, sums: [Self::U; 4]) -> [Self::U; 4];
    /// As [`Isa::gather_quarters`] for the sums of eight lanes: result k < 2 or k < 1 is that of 8k..8k + 8.
    fn gather_halves(self, sums: [Self::U; 4]) -> [Self::U; 2];
    /// Lane 4k + i: the sum of lanes 4k..4k + 4 of `rows[i]`, wrapping.
    fn sum_rows(self, rows: [Self::U; 4]) -> Self::U;
    /// Lanes 4k..4k + 4: the sums of lanes 4k and 4k + 1 and of 4k + 2 and 4k + 3 of `a`, then those of `b`. Lanes are
    /// signed 16-bit values.
    fn sum_pairs(self, a: Self::U, b: Self::U) -> Self::U;
    /// As [`Isa::sum_rows`] where lanes and sums of two lanes are signed 16-bit values.
    #[inline(always)]
    fn sum_rows_of_16_bits(self, [a, b, c, d]: [Self::U; 4]) -> Self::U {
        self.sum_pairs(self.sum_pairs(a, b), self.sum_pairs(c, d))
    }

    /// Bitwise and.
    fn and(self, a: Self::U, b: Self::U) -> Self::U;
    /// Bitwise or.
    fn or(self, a: Self::U, b: Self::U) -> Self::U;
    /// Bitwise exclusive or.
    fn xor(self, a: Self::U, b: Self::U) -> Self::U;
    /// Shift left.
    fn shl<const N: u32>(self, a: Self::U) -> Self::U;
    /// Shift right, filling with zeros.
    fn shr<const N: u32>(self, a: Self::U) -> Self::U;
    /// Shift right, filling with the sign.
    fn sar<const N: u32>(self, a: Self::U) -> Self::U;
    /// Wrapping sum.
    fn add_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// Wrapping difference.
    fn sub_u(self, a: Self::U, b: Self::U) -> Self::U;
    /// Greater of two signed integers.
    fn max_i(self, a: Self::U, b: Self::U) -> Self::U;
    /// Sum of all lanes, wrapping.
    fn reduce_add_u(self, a: Self::U) -> u32;
    /// Greatest lane as a signed integer.
    fn reduce_max_i(self, a: Self::U) -> i32;

    /// acc + Σ over the four bytes of a lane of w · x, exactly; w unsigned below 64, x signed in −127..=127.
    fn dot(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U;
    /// As [`Isa::dot`] for weights of all 256 values, stored and meant as [`Isa::WIDE_OFFSET`] says.
    fn dot_wide(self, acc: Self::U, w: Self::U, x: Self::U) -> Self::U;

    /// Signed integers to f32.
    fn to_f32(self, a: Self::U) -> Self::F;
    /// f32 to the nearest signed integer, ties to even; unspecified beyond ±2²².
    fn round(self, a: Self::F) -> Self::U;
    /// The bits of an f32.
    fn bits(self, a: Self::F) -> Self::U;
    /// The f32 of these bits.
    fn of_bits(self, a: Self::U) -> Self::F;
    /// The f16 in the low half of each lane as f32; the high half is ignored.
    fn f16_to_f32(self, a: Self::U) -> Self::F;
    /// The f16 in the low halves of all lanes as f32, and those in the high halves.
    fn f16_pairs_to_f32(self, a: Self::U) -> [Self::F; 2];

    /// Every lane `v`.
    fn splat(self, v: f32) -> Self::F;
    /// `LANES` elements from `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` elements.
    unsafe fn load(self, p: *const f32) -> Self::F;
    /// `LANES` f16 elements from `p`.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` elements.
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    /// `LANES` 8-bit floats (e4m3) from `p`: as f16 they are 2^8 times too small, exact and never slow. As f32 those of the lowest
    /// exponent would be subnormal, with which multiplying takes a hundred times as long.
    ///
    /// # Safety
    /// `p` is valid for reads of `LANES` elements.
    unsafe fn load_e4m3(self, p: *const u8) -> Self::F;
    /// Writes `LANES` elements to `p`.
    ///
    /// # Safety
    /// `p` is valid for writes of `LANES` elements.
    unsafe fn store(self, p: *mut f32, v: Self::F);
    /// Writes `LANES` elements rounded to f16 (ties to even) to `p`.
    ///
    /// # Safety
    /// `p` is valid for writes of `LANES` elements.
    unsafe fn store_f16(self, p: *mut u16, v: Self::F);

    /// Sum.
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    /// Difference.
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    /// Product.
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// Quotient.
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a · b + c, rounded once where the level can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Greater of two; `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Smaller of two; `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// Sum of all lanes, by halving.
    fn reduce_add(self, a: Self::F) -> f32;
    /// [`Isa::reduce_add`] of each vector.
    #[inline(always)]
    fn reduce_add_16(self, vectors: [Self::F; 16]) -> [f32; 16] {
        let mut sums = [0.0; 16];
        for (sum, vector) in sums.iter_mut().zip(vectors) {
            *sum = self.reduce_add(vector);
        }
        sums
    }

    /// The first `n` < `LANES` elements from `p`, then zeros.
    ///
    /// # Safety
    /// `p` is valid for reads of `n` elements.
    #[inline(always)]
    unsafe fn load_first(self, p: *const f32, n: usize) -> Self::F {
        let mut lanes = [0.0f32; MAX_LANES];
        // SAFETY: n < LANES ≤ MAX_LANES; `p` by the caller, of any alignment, so bytes are copied.
        unsafe {
            p.cast::<u8>().copy_to_nonoverlapping(lanes.as_mut_ptr().cast(), n * size_of::<f32>());
            self.load(lanes.as_ptr())
        }
    }

    /// As [`Isa::load_first`] for f16 elements.
    ///
    /// # Safety
    /// `p` is valid for reads of `n` elements.
    #[inline(always)]
    unsafe fn load_first_f16(self, p: *const u16, n: usize) -> Self::F {
        let mut lanes = [0u16; MAX_LANES];
        // SAFETY: n < LANES ≤ MAX_LANES; `p` by the caller, of any alignment, so bytes are copied.
        unsafe {
            p.cast::<u8>().copy_to_nonoverlapping(lanes.as_mut_ptr().cast(), n * size_of::<u16>());
            self.load_f16(lanes.as_ptr())
        }
    }

    /// The first `n` < `LANES` 16-bit elements from `p`, then zeros, in the low halves of the lanes.
    ///
    /// # Safety
    /// `p` is valid for reads of `n` elements.
    #[inline(always)]
    unsafe fn load_first_u16(self, p: *const u16, n: usize) -> Self::U {
        let mut lanes = [0u16; MAX_LANES];
        // SAFETY: n < LANES ≤ MAX_LANES; `p` by the caller, of any alignment, so bytes are copied.
        unsafe {
            p.cast::<u8>().copy_to_nonoverlapping(lanes.as_mut_ptr().cast(), n * size_of::<u16>());
            self.load_u16(lanes.as_ptr())
        }
    }

    /// Writes the first `n` < `LANES` lanes to `p`.
    ///
    /// # Safety
    /// `p` is valid for writes of `n` elements.
    #[inline(always)]
    unsafe fn store_first(self, p: *mut f32, v: Self::F, n: usize) {
        let mut lanes = [0.0f32; MAX_LANES];
        // SAFETY: n < LANES ≤ MAX_LANES; `p` by the caller.
        unsafe {
            self.store(lanes.as_mut_ptr(), v);
            p.copy_from_nonoverlapping(lanes.as_ptr(), n);
        }
    }
}

/// Operations on vectors of sixteen 16-bit lanes. A half has eight of them, or two words of eight bytes.
pub(crate) trait Pairs<U>: Copy {
    /// The bytes of all words, the lowest of each first.
    fn of_words(self, words: [[u32; 2]; 4]) -> U;
    /// Sixteen bytes from `low`, then as many from `high`.
    ///
    /// # Safety
    /// Both are valid for reads of as many.
    unsafe fn load_halves(self, low: *const u8, high: *const u8) -> U;
    /// Sums of two products each of bytes, `w` unsigned and `x` signed; sums fit.
    fn multiply(self, w: U, x: U) -> U;
    /// Wrapping sum.
    fn add(self, a: U, b: U) -> U;
    /// Wrapping difference.
    fn sub(self, a: U, b: U) -> U;
    /// 32-bit sums of two products each, signed.
    fn dot(self, a: U, b: U) -> U;
    /// In each half the 32-bit lanes of `a`, then those of `b`, as 16-bit lanes; they fit.
    fn pack(self, a: U, b: U) -> U;
    /// In each half the first word of `a` and the second of `b`, and the second of `a` and the first of `b`.
    fn mix(self, a: U, b: U) -> [U; 2];
    /// The words of each half, exchanged.
    fn swap(self, a: U) -> U;
    /// The sum of both halves of `a`, then that of `b`, of 16-bit lanes.
    fn add_halves(self, a: U, b: U) -> U;
    /// As [`Pairs::add_halves`], of 32-bit lanes.
    fn add_halves_of_32(self, a: U, b: U) -> U;
    /// The first halves of `a` and `b`, and their second halves.
    fn regroup(self, a: U, b: U) -> [U; 2];
    /// The even bytes of `a` and, in the second half, of `b`; and the odd ones.
    fn even_and_odd(self, a: U, b: U) -> [U; 2];
    /// Twice the first half, and twice the second.
    fn repeat_halves(self, a: U) -> [U; 2];
    /// In both 16-bit lanes of each 32-bit lane its byte `low` or, in the second half, `high`.
    fn spread<const SIGNED: bool>(self, a: U, low: usize, high: usize) -> U;
}

/// [`Pairs`] of levels that have none.
#[derive(Clone, Copy)]
pub(crate) enum NoPairs {}

impl<U> Pairs<U> for NoPairs {
    fn of_words(self, _: [[u32; 2]; 4]) -> U {
        match self {}
    }
    unsafe fn load_halves(self, _: *const u8, _: *const u8) -> U {
        match self {}
    }
    fn multiply(self, _: U, _: U) -> U {
        match self {}
    }
    fn add(self, _: U, _: U) -> U {
        match self {}
    }
    fn sub(self, _: U, _: U) -> U {
        match self {}
    }
    fn dot(self, _: U, _: U) -> U {
        match self {}
    }
    fn pack(self, _: U, _: U) -> U {
        match self {}
    }
    fn mix(self, _: U, _: U) -> [U; 2] {
        match self {}
    }
    fn swap(self, _: U) -> U {
        match self {}
    }
    fn add_halves(self, _: U, _: U) -> U {
        match self {}
    }
    fn add_halves_of_32(self, _: U, _: U) -> U {
        match self {}
    }
    fn regroup(self, _: U, _: U) -> [U; 2] {
        match self {}
    }
    fn even_and_odd(self, _: U, _: U) -> [U; 2] {
        match self {}
    }
    fn repeat_halves(self, _: U) -> [U; 2] {
        match self {}
    }
    fn spread<const SIGNED: bool>(self, _: U, _: usize, _: usize) -> U {
        match self {}
    }
}

/// Most lanes that any level has.
pub(crate) const MAX_LANES: usize = 16;

/// Asks for the cache line at `p`, which need not be a valid address.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch never faults; SSE is part of x86-64.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// As [`prefetch`], into the second-level cache only.
#[inline(always)]
pub(crate) fn prefetch_second(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sums<'a>(&'a [f32; 16 * MAX_LANES]);

    impl Kernel for Sums<'_> {
        /// Added up each by itself, and together.
        type Output = [[f32; 16]; 2];

        #[inline(always)]
        fn run<I: Isa>(self, isa: I) -> Self::Output {
            let mut vectors = [isa.splat(0.0); 16];
            let mut each = [0.0; 16];
            for (i, vector) in vectors.iter_mut().enumerate() {
                // SAFETY: sixteen vectors of MAX_LANES elements.
                *vector = unsafe { isa.load(self.0.as_ptr().add(i * MAX_LANES)) };
                each[i] = isa.reduce_add(*vector);
            }
            [each, isa.reduce_add_16(vectors)]
        }
    }

    #[test]
    fn vectors_are_added_up_together_as_each_by_itself() {
        let values = std::array::from_fn(|i| (i as f32 * 0.7).sin() * 10f32.powi(i as i32 % 7 - 3));
        for level in SimdLevel::available() {
            let [each, together] = Simd::new(level).expect("an available level").run(Sums(&values));
            assert_eq!(each.map(f32::to_bits), together.map(f32::to_bits), "{level}");
        }
    }

    /// Values of all 8-bit floats.
    struct Codes;

    impl Kernel for Codes {
        type Output = [f32; 256];

        #[inline(always)]
        fn run<I: Isa>(self, isa: I) -> Self::Output {
            let codes: [u8; 256] = std::array::from_fn(|code| code as u8);
            let mut values = [0.0; 256];
            for at in (0..256).step_by(I::LANES) {
                // SAFETY: lanes divide 256.
                unsafe { isa.store(values.as_mut_ptr().add(at), isa.load_e4m3(codes.as_ptr().add(at))) };
            }
            values
        }
    }

    #[test]
    fn codes_of_8_bit_floats_have_their_values() {
        let expected = crate::quant::fp8::VALUES;
        for level in SimdLevel::available() {
            let values = Simd::new(level).expect("an available level").run(Codes);
            for (code, (value, expected)) in values.iter().zip(expected).enumerate() {
                let same = value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan();
                assert!(same, "{level}: {code:#x} is {value}, not {expected}");
            }
        }
    }
}
