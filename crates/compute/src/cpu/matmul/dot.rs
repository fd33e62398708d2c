//! Integer dot products of the common weight form with int8 activations, one a instruction set.
//!
//! acc += Σ over 16-column parts of (w.scale · x.scale) · Σ q·q − w.min · x.sum. Integer sums are exact; 16 f32 lanes
//! are added pairwise at the end of a row.

use std::ops::Range;

use super::OutRows;
use super::block::{Format, Row, WeightBlock, with_format};
use crate::TensorView;
use crate::cpu::activations::{Q8Block, Q8Rows, Rows};
use crate::cpu::simd::{Simd, SimdLevel};

/// Tokens whose sums are in registers at a time.
const TILE: usize = 8;

/// See [`super::matmul_rows`].
pub(super) fn matmul_q8(
    simd: Simd,
    weight: TensorView<'_>,
    rows: Range<usize>,
    x: &Q8Rows,
    tokens: &Rows<'_>,
    out: OutRows,
) {
    with_format!(weight.dtype(), |format| match simd.level() {
        // SAFETY: a `Simd` of this level exists only where the processor has its instructions.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx512 => unsafe { x86::avx512(format, weight, rows, x, tokens, out) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        SimdLevel::Avx2 => unsafe { x86::avx2(format, weight, rows, x, tokens, out) },
        _ => product::<_, PortableSum>(format, weight, rows, x, tokens, out),
    });
}

/// The sum of one row and one token while it is being computed.
trait Sum<F>: Copy {
    fn zero() -> Self;
    fn add(&mut self, w: &WeightBlock, x: &Q8Block);
    fn total(self) -> f32;
}

/// Every row is unpacked once for all tokens.
#[inline(always)]
fn product<F: Format, S: Sum<F>>(
    format: F,
    weight: TensorView<'_>,
    rows: Range<usize>,
    x: &Q8Rows,
    tokens: &Rows<'_>,
    out: OutRows,
) {
    let count = tokens.len();
    if count == 0 {
        return;
    }
    if count == 1 {
        let x = x.row(tokens.get(0));
        let mut block = WeightBlock::ZERO;
        for r in rows {
            let row = Row::new(weight, r);
            let mut sum = S::zero();
            for (i, x) in x.iter().enumerate() {
                if i + 1 == row.blocks() {
                    block = WeightBlock::ZERO;
                }
                format.unpack(&row, i, &mut block);
                sum.add(&block, x);
            }
            out.set(0, r, sum.total());
        }
        return;
    }
    let mut blocks = vec![WeightBlock::ZERO; weight.cols().div_ceil(crate::cpu::activations::BLOCK)];
    for r in rows {
        let row = Row::new(weight, r);
        for (i, block) in blocks.iter_mut().enumerate() {
            format.unpack(&row, i, block);
        }
        for start in (0..count).step_by(TILE) {
            let tile = TILE.min(count - start);
            let mut inputs: [&[Q8Block]; TILE] = [&[]; TILE];
            for (i, input) in inputs.iter_mut().take(tile).enumerate() {
                *input = x.row(tokens.get(start + i));
            }
            let mut sums = [S::zero(); TILE];
            if tile == TILE {
                for (i, block) in blocks.iter().enumerate() {
                    for t in 0..TILE {
                        sums[t].add(block, &inputs[t][i]);
                    }
                }
            } else {
                for (sum, input) in sums.iter_mut().zip(&inputs[..tile]) {
                    for (block, x) in blocks.iter().zip(*input) {
                        sum.add(block, x);
                    }
                }
            }
            for (t, sum) in sums[..tile].iter().enumerate() {
                out.set(start + t, r, sum.total());
            }
        }
    }
}

/// Adds lanes pairwise.
fn reduce(mut lanes: [f32; 16]) -> f32 {
    let mut half = 8;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Plain code.
#[derive(Clone, Copy)]
struct PortableSum([f32; 16]);

impl<F> Sum<F> for PortableSum {
    fn zero() -> Self {
        Self([0.0; 16])
    }

    fn add(&mut self, w: &WeightBlock, x: &Q8Block) {
        for part in 0..16 {
            let at = part * 16..part * 16 + 16;
            let dot: i32 =
                w.q[at.clone()].iter().zip(&x.q[at]).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum();
            self.0[part] += w.scale[part] * x.scale[part] * dot as f32 - w.min[part] * x.sum[part];
        }
    }

    fn total(self) -> f32 {
        reduce(self.0)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::*;

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) fn avx512<F: Format>(
        format: F,
        weight: TensorView<'_>,
        rows: Range<usize>,
        x: &Q8Rows,
        tokens: &Rows<'_>,
        out: OutRows,
    ) {
        product::<F, Avx512Sum>(format, weight, rows, x, tokens, out);
    }

    #[target_feature(enable = "avx2,fma,f16c")]
    pub(super) fn avx2<F: Format>(
        format: F,
        weight: TensorView<'_>,
        rows: Range<usize>,
        x: &Q8Rows,
        tokens: &Rows<'_>,
        out: OutRows,
    ) {
        product::<F, Avx2Sum>(format, weight, rows, x, tokens, out);
    }

    #[derive(Clone, Copy)]
    struct Avx512Sum(__m512);

    impl<F: Format> Sum<F> for Avx512Sum {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: only reached from `avx512`, whose caller has proof of the instructions; plain register work.
            Self(unsafe { _mm512_setzero_ps() })
        }

        #[inline(always)]
        fn add(&mut self, w: &WeightBlock, x: &Q8Block) {
            // SAFETY: as above; every load is within the fixed-size arrays of the two blocks.
            unsafe {
                let load = |p: &[f32; 16]| _mm512_loadu_ps(p.as_ptr());
                let mut sum = _mm512_fnmadd_ps(load(&w.min), load(&x.sum), self.0);
                let scale = _mm512_mul_ps(load(&w.scale), load(&x.scale));
                // 64 columns are 4 parts; each part's scale is wanted in the 4 lanes that hold its products.
                let lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
                for i in 0..4 {
                    let q = _mm512_loadu_si512(w.q.as_ptr().add(64 * i).cast());
                    let v = _mm512_loadu_si512(x.q.as_ptr().add(64 * i).cast());
                    let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), q, v);
                    let which = _mm512_add_epi32(lanes, _mm512_set1_epi32(4 * i as i32));
                    sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_permutexvar_ps(which, scale), sum);
                }
                self.0 = sum;
            }
        }

        #[inline(always)]
        fn total(self) -> f32 {
            let mut lanes = [0.0; 16];
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), self.0) };
            reduce(lanes)
        }
    }

    #[derive(Clone, Copy)]
    struct Avx2Sum(__m256);

    impl<F: Format> Sum<F> for Avx2Sum {
        #[inline(always)]
        fn zero() -> Self {
            // SAFETY: only reached from `avx2`, whose caller has proof of the instructions; plain register work.
            Self(unsafe { _mm256_setzero_ps() })
        }

        #[inline(always)]
        fn add(&mut self, w: &WeightBlock, x: &Q8Block) {
            // SAFETY: as above; every load is within the fixed-size arrays of the two blocks.
            unsafe {
                let mut sum = self.0;
                for half in 0..2 {
                    let load = |p: &[f32; 16]| _mm256_loadu_ps(p.as_ptr().add(8 * half));
                    sum = _mm256_fnmadd_ps(load(&w.min), load(&x.sum), sum);
                    let scale = _mm256_mul_ps(load(&w.scale), load(&x.scale));
                    // 32 columns are 2 parts; each part's scale is wanted in the 4 lanes that hold its products.
                    let lanes = _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0);
                    for i in 0..4 {
                        let at = 128 * half + 32 * i;
                        let q = w.q.as_ptr().add(at);
                        let v = x.q.as_ptr().add(at);
                        let dot = if F::SMALL {
                            let (q, v) = (_mm256_loadu_si256(q.cast()), _mm256_loadu_si256(v.cast()));
                            _mm256_madd_epi16(_mm256_maddubs_epi16(q, v), _mm256_set1_epi16(1))
                        } else {
                            let products = |at: usize| {
                                let q = _mm256_cvtepu8_epi16(_mm_loadu_si128(q.add(at).cast()));
                                _mm256_madd_epi16(q, _mm256_cvtepi8_epi16(_mm_loadu_si128(v.add(at).cast())))
                            };
                            let (first, second) = (products(0), products(16));
                            // Keeps the sums of each part in its own half.
                            let low = _mm256_permute2x128_si256::<0x20>(first, second);
                            let high = _mm256_permute2x128_si256::<0x31>(first, second);
                            _mm256_add_epi32(low, high)
                        };
                        let which = _mm256_add_epi32(lanes, _mm256_set1_epi32(2 * i as i32));
                        let scale = _mm256_permutevar8x32_ps(scale, which);
                        sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot), scale, sum);
                    }
                }
                self.0 = sum;
            }
        }

        #[inline(always)]
        fn total(self) -> f32 {
            let mut lanes = [0.0; 16];
            // SAFETY: as above.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), self.0) };
            reduce(lanes)
        }
    }
}
