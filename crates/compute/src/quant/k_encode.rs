//! Quantisers of the k-quants that something writes: Q4_K and Q6_K (layouts in [`super::k_quants`]).
//!
//! Every sub-block's scale (and minimum) is fitted freely, and the f16 scales of the super-block are made to
//! span them. Each sub-block then takes the better of the two nearest integer scales. Under the integers of all
//! sub-blocks the f16 scales are again a linear least-squares problem, and its solution is tried in turn.

use half::f16;

use super::{
    fit::{self, Line, Span},
    k_quants::BLOCK,
};

/// f16 scales of a super-block that are tried: those that span, and the solution that follows from them.
const ROUNDS: usize = 2;

/// Integers of Q4_K, of its scales and minima, of Q6_K and of its scales.
const FOUR_BITS: Span = Span { min: 0.0, max: 15.0 };
const SIX_BITS: Span = Span { min: 0.0, max: 63.0 };
const SIX_SIGNED_BITS: Span = Span { min: -32.0, max: 31.0 };
const EIGHT_SIGNED_BITS: Span = Span { min: -128.0, max: 127.0 };

/// Encodes `x` as Q4_K; false if it is too large for the format.
pub(super) fn quantize_q4_k(x: &[f32; BLOCK], out: &mut [u8; 144]) -> bool {
    let subs = x.as_chunks().0;
    let Some(Q4Scales { d, dmin, integers, .. }) = search_q4_k(subs) else { return false };
    out[..2].copy_from_slice(&d.to_le_bytes());
    out[2..4].copy_from_slice(&dmin.to_le_bytes());
    let [sc, m] = [integers.map(|(sc, _)| sc as u8), integers.map(|(_, m)| m as u8)];
    for j in 0..4 {
        out[4 + j] = sc[j] | sc[j + 4] >> 4 << 6;
        out[8 + j] = m[j] | m[j + 4] >> 4 << 6;
        out[12 + j] = sc[j + 4] & 15 | m[j + 4] << 4;
    }
    let mut q = [0u8; BLOCK];
    for ((x, q), (sc, m)) in subs.iter().zip(q.chunks_exact_mut(32)).zip(integers) {
        Line { scale: d.to_f32() * sc, base: -dmin.to_f32() * m }.assign(x, FOUR_BITS, q);
    }
    for (out, q) in out[16..].chunks_exact_mut(32).zip(q.chunks_exact(64)) {
        for (l, out) in out.iter_mut().enumerate() {
            *out = q[l] | q[l + 32] << 4;
        }
    }
    true
}

/// Encodes `x` as Q6_K; false if it is too large for the format.
pub(super) fn quantize_q6_k(x: &[f32; BLOCK], out: &mut [u8; 210]) -> bool {
    let subs = x.as_chunks().0;
    let Some(Q6Scales { d, integers, .. }) = search_q6_k(subs) else { return false };
    let mut q = [0u8; BLOCK];
    for ((x, q), sc) in subs.iter().zip(q.chunks_exact_mut(16)).zip(integers) {
        Line { scale: d.to_f32() * sc, base: 0.0 }.assign(x, SIX_SIGNED_BITS, q);
    }
    for (n, q) in q.chunks_exact(128).enumerate() {
        for l in 0..32 {
            let [q0, q1, q2, q3] = [q[l], q[l + 32], q[l + 64], q[l + 96]];
            out[64 * n + l] = q0 & 15 | q2 << 4;
            out[64 * n + 32 + l] = q1 & 15 | q3 << 4;
            out[128 + 32 * n + l] = q0 >> 4 | q1 >> 4 << 2 | q2 >> 4 << 4 | q3 >> 4 << 6;
        }
    }
    for (out, sc) in out[192..208].iter_mut().zip(integers) {
        *out = sc as i8 as u8;
    }
    out[208..].copy_from_slice(&d.to_le_bytes());
    true
}

/// Scales of a Q4_K super-block.
struct Q4Scales {
    d: f16,
    dmin: f16,
    /// Scale and minimum of each sub-block.
    integers: [(f32, f32); 8],
    /// Squared error that they leave.
    error: f32,
    /// d and dmin that would suit the integers better, if there are any.
    next: Option<(f16, f16)>,
}

fn search_q4_k(subs: &[[f32; 32]]) -> Option<Q4Scales> {
    let free: [Line; 8] = std::array::from_fn(|j| fit::line(&subs[j], FOUR_BITS.max, 0.0));
    let d = nonzero_f16(free.iter().fold(0.0, |max, line| line.scale.max(max)) / SIX_BITS.max);
    let dmin = nonzero_f16(free.iter().fold(0.0, |max, line| (-line.base).max(max)) / SIX_BITS.max);
    if !(d.is_finite() && dmin.is_finite()) {
        return None;
    }
    let mut best = Q4Scales::round(subs, &free, d, dmin);
    let mut next = best.next;
    for _ in 1..ROUNDS {
        let Some((d, dmin)) = next else { break };
        let trial = Q4Scales::round(subs, &free, d, dmin);
        next = trial.next;
        if trial.error < best.error {
            best = trial;
        }
    }
    Some(best)
}

impl Q4Scales {
    /// The best integers for these `d` and `dmin`, near the `free` lines.
    fn round(subs: &[[f32; 32]], free: &[Line; 8], d: f16, dmin: f16) -> Self {
        let (step, min_step) = (d.to_f32(), dmin.to_f32());
        let mut error = 0.0;
        let mut integers = [(0.0, 0.0); 8];
        // Sums of the normal equations of Σ (d · sc · q − dmin · m − x)².
        let [mut dd, mut dm, mut mm, mut dx, mut mx] = [0.0f64; 5];
        for (j, x) in subs.iter().enumerate() {
            let sum = fit::total(x);
            let try_scale = |sc: f32| {
                let scale = step * sc;
                let q = fit::sums(x, Line { scale, base: free[j].base }, FOUR_BITS).q;
                let min = (scale * q - sum) / 32.0;
                let m = if min_step == 0.0 { 0.0 } else { SIX_BITS.nearest(min / min_step) };
                (fit::sums(x, Line { scale, base: -min_step * m }, FOUR_BITS), sc, m)
            };
            let low = SIX_BITS.floor(free[j].scale / step);
            let (below, above) = (try_scale(low), try_scale((low + 1.0).min(SIX_BITS.max)));
            let (sums, sc, m) = if above.0.error < below.0.error { above } else { below };
            error += sums.error;
            integers[j] = (sc, m);
            let (sc, m) = (f64::from(sc), f64::from(m));
            dd += sc * sc * f64::from(sums.qq);
            dm += sc * m * f64::from(sums.q);
            mm += m * m * 32.0;
            dx += sc * f64::from(sums.qx);
            mx += m * f64::from(sum);
        }
        let determinant = dd * mm - dm * dm;
        let (d_solved, dmin_solved) = if mm == 0.0 {
            (dx / dd, 0.0)
        } else {
            ((dx * mm - dm * mx) / determinant, (dx * dm - dd * mx) / determinant)
        };
        // NaN where all integers are 0.
        let next = (d_solved > 0.0 && dmin_solved >= 0.0)
            .then(|| (nonzero_f16(d_solved as f32), nonzero_f16(dmin_solved as f32)))
            .filter(|(d, dmin)| d.is_finite() && dmin.is_finite());
        Self { d, dmin, integers, error, next }
    }
}

/// Scales of a Q6_K super-block.
struct Q6Scales {
    d: f16,
    /// Scale of each sub-block.
    integers: [f32; 16],
    /// Squared error that they leave.
    error: f32,
    /// d that would suit the integers better, if there is any.
    next: Option<f16>,
}

fn search_q6_k(subs: &[[f32; 16]]) -> Option<Q6Scales> {
    let free: [f32; 16] = std::array::from_fn(|j| fit::ray(&subs[j], SIX_SIGNED_BITS));
    let peak = free.iter().fold(0.0f32, |peak, &s| if s.abs() > peak.abs() { s } else { peak });
    let d = nonzero_f16(peak / EIGHT_SIGNED_BITS.min);
    if !d.is_finite() {
        return None;
    }
    let mut best = Q6Scales::round(subs, &free, d);
    let mut next = best.next;
    for _ in 1..ROUNDS {
        let Some(d) = next else { break };
        let trial = Q6Scales::round(subs, &free, d);
        next = trial.next;
        if trial.error < best.error {
            best = trial;
        }
    }
    Some(best)
}

impl Q6Scales {
    /// The best integers for this `d`, near the `free` scales.
    fn round(subs: &[[f32; 16]], free: &[f32; 16], d: f16) -> Self {
        let step = d.to_f32();
        let mut error = 0.0;
        let mut integers = [0.0; 16];
        // Sums of the normal equation of Σ (d · sc · q − x)².
        let [mut dd, mut dx] = [0.0f64; 2];
        for (j, x) in subs.iter().enumerate() {
            let try_scale =
                |sc: f32| (fit::sums(x, Line { scale: step * sc, base: 0.0 }, SIX_SIGNED_BITS), sc);
            let low = EIGHT_SIGNED_BITS.floor(free[j] / step);
            let (below, above) = (try_scale(low), try_scale((low + 1.0).min(EIGHT_SIGNED_BITS.max)));
            let (sums, sc) = if above.0.error < below.0.error { above } else { below };
            error += sums.error;
            integers[j] = sc;
            dd += f64::from(sc * sc * sums.qq);
            dx += f64::from(sc * sums.qx);
        }
        let solved = dx / dd;
        // NaN where all integers are 0.
        let next = (solved.abs() > 0.0).then(|| nonzero_f16(solved as f32)).filter(|d| d.is_finite());
        Self { d, integers, error, next }
    }
}

/// The nearest f16, but never 0 for something else: integer scales can make up for a `d` that is too large.
fn nonzero_f16(v: f32) -> f16 {
    let rounded = f16::from_f32(v);
    if v != 0.0 && rounded == f16::ZERO { f16::MIN_POSITIVE_SUBNORMAL.copysign(rounded) } else { rounded }
}
