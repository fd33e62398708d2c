//! Latent attention of every backend against `reference`, for weights in either form and encoding, and bit for bit
//! the same however a sequence is cut into batches.

use moeflux_compute::backend::{
    ActivationMode, Backend, Batch, CompileOptions, ExpertSource, ExpertView, KvType, PAGE_TOKENS, Span,
    StateSlots,
};
use moeflux_compute::cpu::{CpuBackend, SimdLevel};
use moeflux_compute::graph::{
    ExpertSetId, Graph, GraphBuilder, LatentAttention, LatentWeights, MatrixSpec, Precision, WeightId,
};
use moeflux_compute::plan::Plan;
use moeflux_compute::reference::Reference;
use moeflux_compute::{BlockScale, DType, Error, Half, Result, Tensor, quant};

const VOCABULARY: usize = 61;

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    /// In 0..1.
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) >> 40) as f32 / (1 << 24) as f32
    }

    /// `n` values that look normal: sums of uniform ones, variance 1.
    fn normal(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0).collect()
    }
}

/// W_k and W_v in one weight or two, with their encodings.
#[derive(Debug, Clone, Copy)]
enum Form {
    Joint(DType),
    Split(DType, DType),
}

struct Case {
    graph: Graph,
    weights: Vec<Tensor>,
}

fn case(shape: LatentAttention, form: Form) -> Case {
    let mut random = Random(7);
    let mut g = GraphBuilder::new();
    let mut weights = vec![];
    let mut declare = |g: &mut GraphBuilder, tensor: Tensor| -> WeightId {
        let matrix = MatrixSpec { dtype: tensor.dtype(), rows: tensor.rows(), cols: tensor.cols() };
        weights.push(tensor);
        g.weight("weight", matrix)
    };
    let LatentAttention { heads, nope, rope, rank, value, .. } = shape;
    let inputs = [heads * nope, heads * rope, rank, rope].map(|width| {
        let table = Tensor::from_f32(VOCABULARY, width, &random.normal(VOCABULARY * width)).unwrap();
        let table = declare(&mut g, table);
        g.embed(table)
    });
    let form = match form {
        Form::Joint(dtype) => {
            let tensor = random_weight(&mut random, dtype, heads * (nope + value), rank);
            LatentWeights::Joint(declare(&mut g, tensor))
        }
        Form::Split(k, v) => LatentWeights::Split {
            k: declare(&mut g, random_weight(&mut random, k, heads * rank, nope)),
            v: declare(&mut g, random_weight(&mut random, v, heads * value, rank)),
        },
    };
    let [q_nope, q_rope, c, k_rope] = inputs;
    let out = g.latent_attention([q_nope, q_rope], [c, k_rope], form, shape).unwrap();
    let width = out.width();
    let rows = g.gather_rows(out);
    let identity: Vec<f32> = (0..width * width).map(|i| f32::from(i % (width + 1) == 0)).collect();
    let identity = declare(&mut g, Tensor::from_f32(width, width, &identity).unwrap());
    let logits = g.linear(rows, identity, None, Precision::F32).unwrap();
    Case { graph: g.finish(logits), weights }
}

/// Weights of about 1/sqrt(cols).
fn random_weight(random: &mut Random, dtype: DType, rows: usize, cols: usize) -> Tensor {
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
    let values: Vec<f32> = random.normal(rows * cols).iter().map(|v| v * scale).collect();
    let planes = quant::quantize(dtype, &values, cols).unwrap();
    Tensor::new(dtype, rows, cols, planes.into_iter().map(moeflux_compute::Bytes::new).collect()).unwrap()
}

struct NoExperts;

impl ExpertSource for NoExperts {
    fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> Result<()> {
        Ok(())
    }

    fn visit(&mut self, _: ExpertSetId, _: &[u32], _: &mut dyn FnMut(&[ExpertView<'_>])) -> Result<()> {
        Ok(())
    }
}

/// Two sequences, whose pages alternate, in batches of up to `step` tokens of each; results by sequence.
fn run(case: &Case, backend: &dyn Backend, kv_type: KvType, step: usize) -> [Vec<f32>; 2] {
    const LENGTHS: [usize; 2] = [2 * PAGE_TOKENS + 5, 70];
    let activations = ActivationMode::F32;
    let options = CompileOptions { activations, kv_type, max_rows: 256, ..CompileOptions::default() };
    let plan = Plan::new(&case.graph, |_| true);
    let mut executable = backend.compile(&case.graph, plan, case.weights.clone(), options).unwrap();
    executable.reserve_pages(6).unwrap();
    let pages: [&[u32]; 2] = [&[4, 0, 2], &[1, 3]];
    let token = |sequence: usize, position: usize| ((sequence + 3) * 17 + position * 7) % VOCABULARY;
    let (mut at, mut results) = (0, [vec![], vec![]]);
    while LENGTHS.iter().any(|length| at < *length) {
        let (mut tokens, mut spans, mut owners) = (vec![], vec![], vec![]);
        for (sequence, length) in LENGTHS.into_iter().enumerate() {
            let positions = at.min(length)..(at + step).min(length);
            if positions.is_empty() {
                continue;
            }
            let first = tokens.len();
            tokens.extend(positions.clone().map(|p| token(sequence, p) as u32));
            spans.push(Span {
                rows: first..tokens.len(),
                start: positions.start,
                pages: pages[sequence],
                slots: StateSlots::default(),
            });
            owners.extend(positions.map(|_| sequence));
        }
        let outputs: Vec<u32> = (0..tokens.len() as u32).collect();
        let batch = Batch { tokens: &tokens, spans: &spans, outputs: &outputs };
        let mut out = vec![];
        executable.run(&batch, &mut NoExperts, &mut out).unwrap();
        for (row, sequence) in out.chunks_exact(case.graph.vocab_size()).zip(owners) {
            results[sequence].extend_from_slice(row);
        }
        at += step;
    }
    results
}

/// Largest difference over the largest value.
fn relative_error(got: &[Vec<f32>; 2], right: &[Vec<f32>; 2]) -> f32 {
    let largest = right.iter().flatten().fold(0f32, |m, v| m.max(v.abs()));
    let pairs = got.iter().flatten().zip(right.iter().flatten());
    pairs.fold(0f32, |m, (a, b)| m.max((a - b).abs())) / largest
}

#[test]
fn agrees_with_the_reference_however_batches_are_cut() {
    let small = LatentAttention { heads: 3, nope: 12, rope: 6, rank: 20, value: 9, scale: 0.3 };
    let wide = LatentAttention { heads: 10, nope: 32, rope: 16, rank: 64, value: 32, scale: 0.15 };
    let fp8 = DType::Fp8 { scale: BlockScale::F32 };
    let affine = DType::Affine { bits: 4, group: 32, scale: Half::F16 };
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
    ];
    for (shape, form) in cases {
        let case = case(shape, form);
        let right = run(&case, &Reference, KvType::F32, 1000);
        for level in SimdLevel::available() {
            let backend = CpuBackend::new(3, Some(level)).unwrap();
            // Latents round to 11 bits in f16.
            for (kv_type, tolerance) in [(KvType::F32, 3e-6), (KvType::F16, 3e-3)] {
                let whole = run(&case, &backend, kv_type, 1000);
                let error = relative_error(&whole, &right);
                assert!(error < tolerance, "{shape:?} {form:?} {level} {kv_type:?}: {error:.1e}");
                for step in [1, 7, 67] {
                    let got = run(&case, &backend, kv_type, step);
                    let same = got == whole;
                    assert!(same, "{shape:?} {form:?} {level} {kv_type:?}: in steps of {step}");
                }
            }
        }
    }
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
        let outcome = g.latent_attention([q_nope, q_rope], [c, k_rope], LatentWeights::Split { k, v }, shape);
        let error = outcome.expect_err(expected);
        assert!(matches!(error, Error::Shape { .. }) && error.to_string().contains(expected), "{error}");
        let joint = g.latent_attention([q_nope, q_rope], [c, k_rope], LatentWeights::Joint(k), shape);
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
