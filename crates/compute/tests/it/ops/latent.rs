//! Latent attention, for weights in either form and encoding.

use super::case::{Case, Recorder};
use crate::support::random::Random;
use crate::support::weights::blank;
use moeflux_compute::backend::{KvType, PAGE_TOKENS};
use moeflux_compute::graph::{
    GraphBuilder, LatentAttention, LatentInputs, LatentWeights, MatrixSpec, Rope, RopeStyle,
};
use moeflux_compute::{BlockScale, DType, Error, Half, Tensor, quant};

/// W_k and W_v in one weight or two, with their encodings.
#[derive(Debug, Clone, Copy)]
enum Form {
    Joint(DType),
    Split(DType, DType),
}

fn case(shape: LatentAttention, form: Form) -> Case {
    let mut r = Recorder::new(7);
    let LatentAttention { heads, nope, rope, rank, .. } = shape;
    let [q_nope, q_rope, c, k_rope] = [heads * nope, heads * rope, rank, rope].map(|width| r.input(width));
    let inputs = LatentInputs { q_nope, c, rotated: Some([q_rope, k_rope]), sinks: None, chosen: None };
    case_of(r, shape, form, inputs, "")
}

/// Of what models make: queries whole, a latent to be normed beside what is rotated, with a rotation or without.
fn case_in_parts(shape: LatentAttention, form: Form, style: Option<RopeStyle>) -> Case {
    let mut r = Recorder::new(9);
    let LatentAttention { heads, nope, rope, rank, .. } = shape;
    let (q, kv, norm) = (r.input(heads * (nope + rope)), r.input(rank + rope), r.vector(rank));
    let g = &mut r.graph;
    let rotation = style.map(|style| {
        let inv_freq = (0..rope / 2).map(|i| 500f32.powf(-2.0 * i as f32 / rope as f32)).collect();
        g.rotation(Rope { style, inv_freq, magnitude: 1.25, axes: vec![] })
    });
    let rotated = |g: &mut GraphBuilder, x, heads| match rotation {
        Some(rotation) => g.rope(x, heads, rotation).unwrap(),
        None => x,
    };
    let q_nope = g.slice(q, heads, 0, nope).unwrap();
    let q_rope = g.slice(q, heads, nope, rope).unwrap();
    let q_rope = rotated(g, q_rope, heads);
    let c = g.slice(kv, 1, 0, rank).unwrap();
    let k_rope = g.slice(kv, 1, rank, rope).unwrap();
    let k_rope = rotated(g, k_rope, 1);
    let c = g.rms_norm(c, norm, 1, 1e-6).unwrap();
    let inputs = LatentInputs { q_nope, c, rotated: Some([q_rope, k_rope]), sinks: None, chosen: None };
    case_of(r, shape, form, inputs, &format!(" in parts, {style:?}"))
}

fn case_of(mut r: Recorder, shape: LatentAttention, form: Form, inputs: LatentInputs, named: &str) -> Case {
    let LatentAttention { heads, nope, rank, value, .. } = shape;
    let mut weight = |dtype, rows, cols| {
        let tensor = random_weight(&mut r.random, dtype, rows, cols);
        r.declare(tensor)
    };
    let name = format!("{shape:?} {form:?}{named}");
    let form = match form {
        Form::Joint(dtype) => LatentWeights::Joint(weight(dtype, heads * (nope + value), rank)),
        Form::Split(k, v) => {
            LatentWeights::Split { k: weight(k, heads * rank, nope), v: weight(v, heads * value, rank) }
        }
    };
    let out = r.graph.latent_attention(inputs, form, shape).unwrap();
    r.case(name, out).in_pairs()
}

/// Weights of about 1/sqrt(cols).
fn random_weight(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Tensor {
    if let Some(blank) = blank(dtype, rows, cols) {
        return blank;
    }
    if let DType::Fp8 { .. } = dtype {
        let codes: Vec<u8> = (0..rows * cols).map(|_| (random.uniform() * 120.0) as u8).collect();
        let signed = codes.iter().map(|c| c | if random.uniform() < 0.5 { 128 } else { 0 });
        let codes: Vec<u8> = signed.collect();
        let blocks = rows.div_ceil(128) * cols.div_ceil(128);
        let scales: Vec<u8> =
            (0..blocks).flat_map(|_| (0.002 + 0.001 * random.uniform()).to_le_bytes()).collect();
        let planes = [codes, scales].map(moeflux_compute::Bytes::new).to_vec();
        return Tensor::new(dtype, rows, cols, planes).unwrap();
    }
    let scale = (cols as f32).sqrt().recip();
    let values: Vec<f32> = random.normals(rows * cols).iter().map(|v| v * scale).collect();
    let planes = quant::quantize(dtype, &values, cols).unwrap();
    Tensor::new(dtype, rows, cols, planes.into_iter().map(moeflux_compute::Bytes::new).collect()).unwrap()
}

pub fn latent_attention() -> Vec<Case> {
    let small = LatentAttention { heads: 3, nope: 12, rope: 6, rank: 20, value: 9, scale: 0.3 };
    let wide = LatentAttention { heads: 10, nope: 32, rope: 16, rank: 64, value: 32, scale: 0.15 };
    let fp8 = DType::Fp8 { scale: BlockScale::F32 };
    let affine = DType::Affine { bits: 4, group: 32, scale: Half::F16 };
    // As published models have them: on compute capability 9.0 these have kernels of their own.
    let deep = LatentAttention { heads: 2, nope: 128, rope: 64, rank: 512, value: 128, scale: 0.07 };
    let narrow = LatentAttention { heads: 6, nope: 32, rope: 32, rank: 256, value: 24, scale: 0.1 };
    let published = [
        (deep, Form::Split(DType::Q4_0, DType::Q4_K)),
        (LatentAttention { nope: 192, value: 256, ..deep }, Form::Joint(DType::Q8_0)),
        (LatentAttention { heads: 5, rank: 256, ..deep }, Form::Joint(DType::BF16)),
        (narrow, Form::Split(DType::Q8_0, DType::Q6_K)),
    ];
    let cases = [
        (small, Form::Joint(DType::F32)),
        (small, Form::Split(DType::F32, DType::BF16)),
        (
            LatentAttention { heads: 1, nope: 1, rope: 2, rank: 1, value: 1, scale: 1.0 },
            Form::Joint(DType::F16),
        ),
        // Heads of 37 rows, so that blocks of 128 end within them.
        (LatentAttention { heads: 7, nope: 20, value: 17, rank: 130, ..wide }, Form::Joint(fp8)),
        (wide, Form::Joint(DType::Q8_0)),
        (wide, Form::Split(DType::Q8_0, affine)),
        (LatentAttention { rope: 32, ..wide }, Form::Joint(DType::Q8_0)),
    ];
    let parts = published.map(|(shape, form)| case_in_parts(shape, form, Some(RopeStyle::Interleaved)));
    let published = published.map(|(shape, form)| case(shape, form)).into_iter().chain(parts);
    let more = [
        (small, Form::Joint(DType::F32), Some(RopeStyle::HalfSplit)),
        (wide, Form::Split(DType::Q8_0, DType::BF16), Some(RopeStyle::Interleaved)),
        (wide, Form::Joint(DType::Q8_0), None),
    ];
    let more = more.map(|(shape, form, style)| case_in_parts(shape, form, style));
    let all = cases.map(|(shape, form)| case(shape, form)).into_iter().chain(more);
    all.chain(published.map(Case::on_hardware)).collect()
}

#[test]
fn pages_hold_latents_and_nothing_a_head() {
    let shape = LatentAttention { heads: 10, nope: 32, rope: 16, rank: 64, value: 32, scale: 1.0 };
    let graph = case(shape, Form::Joint(DType::F32)).graph;
    let bytes = moeflux_compute::backend::page_bytes(&graph, KvType::F16);
    assert_eq!(bytes, PAGE_TOKENS * (64 + 16) * 2);
}

#[test]
fn what_does_not_fit_is_refused_while_recording() {
    let shape = LatentAttention { heads: 2, nope: 4, rope: 2, rank: 6, value: 3, scale: 1.0 };
    let refused = |widths: [usize; 4], weights: [(usize, usize); 2], expected: &str| {
        let mut g = GraphBuilder::new();
        let matrix =
            |g: &mut GraphBuilder, rows, cols| g.weight("w", MatrixSpec { dtype: DType::F32, rows, cols });
        let [q_nope, q_rope, c, k_rope] = widths.map(|width| {
            let table = matrix(&mut g, 5, width);
            g.embed(table)
        });
        let [k, v] = weights.map(|(rows, cols)| matrix(&mut g, rows, cols));
        let rotated = Some([q_rope, k_rope]);
        let inputs = LatentInputs { q_nope, c, rotated, sinks: None, chosen: None };
        let outcome = g.latent_attention(inputs, LatentWeights::Split { k, v }, shape);
        let error = outcome.expect_err(expected);
        assert!(matches!(error, Error::Shape { .. }) && error.to_string().contains(expected), "{error}");
        let joint = g.latent_attention(inputs, LatentWeights::Joint(k), shape);
        assert!(joint.is_err(), "{expected}");
    };
    let (widths, weights) = ([8, 4, 6, 2], [(12, 4), (6, 6)]);
    refused([7, 4, 6, 2], weights, "width of q_nope: expected 8, got 7");
    refused([8, 5, 6, 2], weights, "width of q_rope: expected 4, got 5");
    refused([8, 4, 5, 2], weights, "width of c: expected 6, got 5");
    refused([8, 4, 6, 3], weights, "width of k_rope: expected 2, got 3");
    refused(widths, [(11, 4), (6, 6)], "rows of the key weight: expected 12, got 11");
    refused(widths, [(12, 5), (6, 6)], "columns of the key weight: expected 4, got 5");
    refused(widths, [(12, 4), (7, 6)], "rows of the value weight: expected 6, got 7");
    refused(widths, [(12, 4), (6, 5)], "columns of the value weight: expected 6, got 5");
}
