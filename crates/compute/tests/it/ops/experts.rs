//! Routers and experts.

use moeflux_compute::backend::{Batch, ExpertSource, ExpertView, Span, StateSlots};
use moeflux_compute::graph::{
    Activation, ExpertBiases, ExpertMlp, ExpertSet, ExpertSetId, GroupRank, Groups, MatrixSpec, OutputNorm,
    Route, Score, Weighted,
};
use moeflux_compute::reference::Reference;
use moeflux_compute::{BlockScale, DType, Error, Half, MatrixScale, Result, Tensor, Zeros};

use super::case::{Case, Expert, LONG, Recorder, SHORT, VOCABULARY};
use super::checks::{Results, Source, assert_same_bits, backends, compile, run};
use super::errors::MODES;
use crate::support::random::Random;
use crate::support::weights::{affine, dtypes, weight};

/// Experts that ignore their weights' input but for column 0, which is 1: expert e yields a constant in column e, so
/// that their sum shows the router's weights by expert.
fn revealing_experts(count: usize) -> Vec<Expert> {
    let first = |value: f32| {
        let row: Vec<f32> = (0..count).map(|column| if column == 0 { value } else { 0.0 }).collect();
        Tensor::from_f32(1, count, &row).unwrap()
    };
    let unit = |e: usize| (0..count).map(|row| if row == e { 1.0 } else { 0.0 }).collect::<Vec<f32>>();
    let expert = |e| Expert {
        gate: Some(first(3.0)),
        up: first(0.4),
        down: Tensor::from_f32(count, 1, &unit(e)).unwrap(),
    };
    (0..count).map(expert).collect()
}

fn expert_set(experts: &[Expert]) -> ExpertSet {
    let spec = |t: &Tensor| MatrixSpec { dtype: t.dtype(), rows: t.rows(), cols: t.cols() };
    let Expert { gate, up, down } = &experts[0];
    let gate = gate.as_ref().map(spec);
    ExpertSet { layer: 0, experts: experts.len(), gate, up: spec(up), down: spec(down) }
}

/// Routers whose experts have factors.
pub fn routes_with_scales() -> Vec<Case> {
    let route = |score, renormalize| Route { score, epsilon: 0.5, ..Route::softmax(9, 3, renormalize) };
    let of = |(bias, route): (bool, Route)| {
        let mut r = Recorder::new(12);
        let logits = r.input(route.experts);
        let bias = bias.then(|| r.vector(route.experts));
        let scales = r.vector(route.experts);
        let ones: Vec<f32> =
            (0..VOCABULARY).flat_map(|_| (0..route.experts).map(|c| f32::from(c == 0))).collect();
        let ones = r.weight(VOCABULARY, route.experts, &ones);
        let x = r.graph.embed(ones);
        let routing = r.graph.scaled_route(logits, bias, scales, route).unwrap();
        r.experts = revealing_experts(route.experts);
        let set = r.graph.expert_set(expert_set(&r.experts)).unwrap();
        let out = r.graph.moe_experts(x, routing, set).unwrap();
        r.case(format!("scaled, with a bias: {bias:?}, {route:?}"), out).of("Route")
    };
    let all = [(false, route(Score::Softmax, true)), (true, route(Score::Sigmoid, true))];
    all.into_iter().map(of).collect()
}

pub fn softmaxes_of_the_largest() -> Vec<Case> {
    let case = |(width, top_k)| {
        let mut r = Recorder::new(5);
        // Many are equal; zeros have one sign.
        let logits = r.input_of(width, |random| (random.normal() * 3.0).round() + 0.0);
        let out = r.graph.top_softmax(logits, top_k).unwrap();
        r.case(format!("{top_k} of {width}"), out)
    };
    [(1, 1), (8, 2), (8, 8), (37, 5), (300, 64)].map(case).into()
}

/// A router on logits from `logit`, whose choices show in the result.
fn route_case(route: Route, name: &str, logit: impl FnMut(&mut Random) -> f32) -> Case {
    biased_route_case(route, false, name, logit)
}

fn biased_route_case(route: Route, bias: bool, name: &str, logit: impl FnMut(&mut Random) -> f32) -> Case {
    let mut r = Recorder::new(11);
    let logits = r.input_of(route.experts, logit);
    let bias = bias.then(|| r.vector(route.experts));
    let ones: Vec<f32> =
        (0..VOCABULARY).flat_map(|_| (0..route.experts).map(|c| f32::from(c == 0))).collect();
    let ones = r.weight(VOCABULARY, route.experts, &ones);
    let x = r.graph.embed(ones);
    let routing = r.graph.route(logits, bias, route).unwrap();
    assert_eq!(routing.top_k(), route.top_k);
    r.experts = revealing_experts(route.experts);
    let set = r.graph.expert_set(expert_set(&r.experts)).unwrap();
    let out = r.graph.moe_experts(x, routing, set).unwrap();
    r.case(format!("{name}: {route:?}"), out).of("Route")
}

pub fn routes() -> Vec<Case> {
    let route = |(experts, top_k)| Route::softmax(experts, top_k, top_k % 2 == 1);
    let shapes = [(1, 1), (2, 1), (5, 2), (7, 3), (8, 8), (40, 6), (130, 9)];
    let mut cases: Vec<Case> =
        shapes.into_iter().map(|shape| route_case(route(shape), "normal", Random::normal)).collect();
    for shape in [(5, 2), (12, 5)] {
        cases.extend([
            // Ties, which the lower id wins.
            route_case(route(shape), "few levels", |random| random.below(3) as f32),
            // Where a softmax without its maximum taken off overflows.
            route_case(route(shape), "large", |random| 200.0 + 30.0 * random.normal()),
        ]);
    }
    cases
}

pub fn routes_by_other_scores() -> Vec<Case> {
    let mut cases = vec![];
    let base = Route { scale: 2.5, ..Route::softmax(24, 5, true) };
    let groups = |count, keep, rank| Some(Groups { count, keep, rank });
    for score in [Score::Softmax, Score::Sigmoid, Score::SoftmaxOfChosen] {
        for (bias, renormalize) in [(false, true), (true, false), (true, true)] {
            cases.push(biased_route_case(
                Route { score, renormalize, ..base },
                bias,
                "normal",
                Random::normal,
            ));
        }
    }
    for groups in [
        groups(1, 1, GroupRank::Best),
        groups(4, 1, GroupRank::BestTwo),
        groups(4, 2, GroupRank::Best),
        groups(8, 4, GroupRank::BestTwo),
        groups(24, 5, GroupRank::BestTwo),
    ] {
        for bias in [false, true] {
            let route = Route { groups, score: Score::Sigmoid, ..base };
            cases.push(biased_route_case(route, bias, "normal", Random::normal));
        }
    }
    // Biases that push scores of the best groups below zero, too.
    for shift in [0.0, 9.0] {
        let groups = groups(4, 2, GroupRank::BestTwoElseZero);
        let route = Route { groups, score: Score::Sigmoid, ..base };
        let logit = move |random: &mut Random| random.normal() - shift;
        cases.push(biased_route_case(route, true, "or zero", logit));
    }
    // Of logits that are close to each other as often as not, of both signs and all zero.
    for (epsilon, name) in [(0.1, "normal"), (0.3, "normal"), (0.1, "zero")] {
        let route = Route { score: Score::SparseMixer, epsilon, ..Route::softmax(16, 3, false) };
        cases.push(route_case(route, name, |random| if name == "zero" { 0.0 } else { random.normal() }));
    }
    // Biases that push scores below zero, where a mask of zeros would choose what is masked.
    let route = Route { groups: groups(4, 2, GroupRank::BestTwo), score: Score::Sigmoid, ..base };
    cases.push(biased_route_case(route, true, "far below zero", |random| random.normal() - 9.0));
    cases
}

pub fn routes_by_logits_and_sigmoids() -> Vec<Case> {
    let case = |(bias, renormalize)| {
        let route = Route { score: Score::SigmoidOfChosen, ..Route::softmax(24, 5, renormalize) };
        biased_route_case(route, bias, "normal", Random::normal)
    };
    [(false, true), (true, false), (true, true)].map(case).into()
}

/// Experts of random weights; the result of a router on random logits.
fn moe_case(count: usize, top_k: usize, dtypes: [DType; 3], hidden: usize, inner: usize) -> Case {
    moe_case_of(count, top_k, dtypes, [hidden, inner], ExpertMlp::default())
}

pub(super) fn moe_case_of(
    count: usize,
    top_k: usize,
    dtypes: [DType; 3],
    widths: [usize; 2],
    mlp: ExpertMlp,
) -> Case {
    moe_case_in(Recorder::new(12), count, top_k, dtypes, widths, mlp, weight)
}

/// The same with random bytes as weights: large ones take long to quantise.
pub(super) fn large_moe_case_of(count: usize, top_k: usize, dtypes: [DType; 3], widths: [usize; 2]) -> Case {
    moe_case_in(Recorder::new(12), count, top_k, dtypes, widths, ExpertMlp::default(), Random::tensor)
}

fn moe_case_in(
    mut r: Recorder,
    count: usize,
    top_k: usize,
    dtypes: [DType; 3],
    widths: [usize; 2],
    mlp: ExpertMlp,
    weight: fn(&mut Random, DType, usize, usize) -> Tensor,
) -> Case {
    let [hidden, inner] = widths;
    let x = r.input(hidden);
    let choices = count + mlp.identities;
    let logits = r.input(choices);
    let route = Route::softmax(choices, top_k, top_k.is_multiple_of(2));
    let routing = r.graph.route(logits, None, route).unwrap();
    let [gate, up, down] = dtypes;
    let mut expert = || {
        let random = &mut r.random;
        Expert {
            gate: Some(weight(random, gate, inner, hidden)),
            up: weight(random, up, inner, hidden),
            down: weight(random, down, hidden, inner),
        }
    };
    r.experts = (0..count).map(|_| expert()).collect();
    let set = r.graph.expert_set(expert_set(&r.experts)).unwrap();
    let all = r.graph.moe_experts_with(x, routing, set, mlp).unwrap();
    // The identity through which results leave is a matrix of all columns: of wide rows, some are enough.
    const MOST: usize = 512;
    let out = if hidden > MOST { r.graph.slice(all, 1, 7, MOST / 4).unwrap() } else { all };
    let name = format!("{count} top {top_k}, {gate} {up} {down}, {hidden} × {inner}, {mlp:?}");
    let plain = |d: &DType| matches!(d, DType::F32 | DType::F16 | DType::BF16);
    let dtype = dtypes.into_iter().find(|d| !plain(d)).unwrap_or(DType::F32);
    r.case(name, out).of("MoeExperts").in_dtype(dtype)
}

pub fn moe_experts_of_every_encoding() -> Vec<Case> {
    let case = |dtype: DType| match dtype.block_len() {
        1 => moe_case(4, 2, [dtype; 3], 33, 20),
        32 => moe_case(4, 2, [dtype; 3], 64, 96),
        // Matrices so large take emulated devices long.
        n => moe_case(2, 1, [dtype; 3], n, n),
    };
    dtypes().into_iter().map(case).collect()
}

pub fn moe_experts_of_many_shapes() -> Vec<Case> {
    use DType::{BF16, F16, F32, IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS};
    use DType::{Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
    vec![
        moe_case(1, 1, [F32; 3], 1, 1),
        moe_case(3, 3, [F32, F16, BF16], 17, 5),
        moe_case(40, 6, [F32; 3], 24, 12),
        // A projection that takes int8 beside one that does not, either way round.
        moe_case(5, 2, [Q8_0, F16, Q5_0], 32, 96),
        moe_case(5, 1, [F32, Q8_0, F32], 64, 50),
        moe_case(5, 3, [F32, F32, Q8_0], 50, 64),
        moe_case(3, 2, [Q4_K, Q6_K, Q8_0], 256, 32),
        // Rows enough for several groups that share them.
        moe_case(3, 2, [Q4_K, Q4_K, Q6_K], 512, 256),
        // Rows that GPUs share among more warps than two groups of a multiprocessor have.
        moe_case(6, 2, [Q4_K, Q4_K, Q6_K], 4096, 256).on_hardware(),
        moe_case(6, 2, [Q4_K, Q4_K, Q5_K], 256, 2560).on_hardware(),
        moe_case(4, 2, [Q6_K, Q6_K, Q5_K], 3584, 256).on_hardware(),
        moe_case(4, 2, [Q8_0; 3], 4096, 64).on_hardware(),
        moe_case(6, 2, [Q5_K, Q5_K, Q5_K], 512, 256).on_hardware(),
        moe_case(12, 2, [Q5_K, Q5_K, Q8_0], 768, 512).on_hardware(),
        moe_case(6, 2, [Q8_0; 3], 352, 288).on_hardware(),
        moe_case(12, 2, [Q8_0; 3], 2048, 768).on_hardware(),
        moe_case(12, 2, [Q3_K, Q3_K, Q2_K], 768, 512).on_hardware(),
        moe_case(6, 2, [IQ4_XS, IQ4_XS, IQ3_S], 1280, 768).on_hardware(),
        moe_case(6, 2, [IQ2_XXS, IQ2_XXS, IQ1_M], 512, 1280).on_hardware(),
        moe_case(6, 2, [IQ3_XXS, IQ3_XXS, IQ2_S], 768, 256).on_hardware(),
        moe_case(6, 2, [IQ1_S, IQ1_S, IQ2_XS], 4096, 256).on_hardware(),
        moe_case(6, 2, [IQ4_NL, IQ4_NL, Q4_0], 352, 288).on_hardware(),
        moe_case(
            3,
            1,
            [affine(4, 64, Half::BF16), affine(8, 32, Half::F16), affine(3, 32, Half::BF16)],
            192,
            160,
        ),
    ]
}

/// Of experts whose scales lie apart from what they scale: groups and rows of every size, tiles of eight and of sixteen pairs, rows
/// of which a GPU's last warp has a part, and of more warps than two groups of a multiprocessor have.
pub fn moe_experts_in_planes() -> Vec<Case> {
    let int = |bits, group, zeros| DType::Int { bits, group, scale: Half::F16, zeros };
    let fp8 = |scale| DType::Fp8 { scale };
    let all = [
        (affine(4, 64, Half::BF16), [384, 256]),
        (affine(4, 32, Half::F16), [128, 384]),
        (affine(4, 128, Half::F16), [640, 128]),
        (affine(8, 64, Half::BF16), [384, 128]),
        (int(4, 128, Zeros::Stored), [640, 384]),
        (int(4, 32, Zeros::Middle), [2304, 128]),
        (int(4, 64, Zeros::Stored), [128, 384]),
        (int(4, 0, Zeros::Middle), [384, 128]),
        (int(8, 32, Zeros::Stored), [384, 256]),
        (int(8, 0, Zeros::Middle), [256, 384]),
        (DType::NVFP4 { matrix: MatrixScale::Divisor }, [704, 320]),
        (DType::NVFP4 { matrix: MatrixScale::Factor }, [128, 2304]),
        (fp8(BlockScale::F32), [352, 288]),
        (fp8(BlockScale::BF16), [640, 544]),
        (fp8(BlockScale::E8M0), [128, 384]),
        (DType::Fp8_Rows { scale: BlockScale::F32 }, [352, 160]),
        (DType::Fp8_Whole { scale: BlockScale::BF16 }, [160, 288]),
        (DType::MXFP8_Planes, [352, 288]),
        // Rows so wide that a unit has half as many.
        (fp8(BlockScale::F32), [4096, 64]),
        (DType::MXFP8_Planes, [3104, 64]),
        (int(8, 32, Zeros::Stored), [3968, 128]),
    ];
    let case = |(dtype, [hidden, inner]): (DType, [usize; 2])| {
        // So many that nine rows have tiles of eight pairs, 26 of sixteen.
        moe_case(4, 2, [dtype; 3], hidden, inner).on_hardware()
    };
    all.map(case).into()
}

/// Of experts in MXFP4 with biases, as gpt-oss has them: rows that are no multiples of 256 columns, or of 64.
pub fn moe_experts_with_biases() -> Vec<Case> {
    use DType::{F32, MXFP4, MXFP4_Planes, Q8_0};
    let case = |(count, top_k, dtype, widths): (usize, usize, DType, [usize; 2])| {
        let mut r = Recorder::new(12);
        let [hidden, inner] = widths;
        let [gate, up, down] = [inner, inner, hidden].map(|rows| r.vector(count * rows));
        let activation = Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 };
        let biases = Some(ExpertBiases { gate, up, down });
        moe_case_in(
            r,
            count,
            top_k,
            [dtype; 3],
            widths,
            ExpertMlp { activation, biases, ..ExpertMlp::default() },
            weight,
        )
    };
    let all = [
        (5, 2, F32, [33, 20]),
        (5, 2, Q8_0, [64, 96]),
        (4, 2, MXFP4_Planes, [96, 64]),
        (6, 2, MXFP4, [352, 288]),
    ];
    // Tiles of eight pairs; rows of more warps than two groups of a multiprocessor have.
    let large = [
        (12, 2, MXFP4, [704, 320]),
        (6, 2, MXFP4, [2880, 544]),
        (12, 2, MXFP4, [96, 2592]),
        (12, 2, MXFP4_Planes, [352, 544]),
        (6, 2, MXFP4, [2048, 2592]),
    ];
    let large = large.into_iter().map(|of| case(of).on_hardware());
    all.into_iter().map(case).chain(large).collect()
}

pub fn moe_experts_of_other_activations() -> Vec<Case> {
    let mut cases = vec![];
    let limited = Activation::LimitedSwiGlu { limit: 6.0 };
    let clamped = Activation::ClampedSwiGlu { alpha: 0.7, limit: 6.0 };
    let situ = |linear_beta| Activation::SituGlu { beta: 1.5, linear_beta };
    for dtype in [DType::F32, DType::Q8_0] {
        for (activation, weighted) in [
            (Activation::SwiGlu, Weighted::Input),
            (limited, Weighted::Output),
            (clamped, Weighted::Input),
            (Activation::GeGlu, Weighted::Output),
            (situ(Some(2.5)), Weighted::Output),
            (situ(None), Weighted::Input),
        ] {
            let mlp = ExpertMlp { activation, weighted, ..ExpertMlp::default() };
            cases.push(moe_case_of(5, 2, [dtype; 3], [64, 32], mlp));
        }
    }
    // More rows than emulated devices have time for, which GPUs multiply in wide tiles.
    for linear_beta in [Some(25.0), None] {
        let activation = Activation::SituGlu { beta: 4.0, linear_beta };
        let mlp = ExpertMlp { activation, ..ExpertMlp::default() };
        let case = moe_case_of(6, 2, [DType::Q8_0; 3], [256, 128], mlp);
        cases.push(Case { batching: LONG, ..case.on_hardware() });
    }
    cases
}

/// Of experts some of which return what they take; of few of the others, tokens choose none.
pub fn moe_experts_with_identities() -> Vec<Case> {
    use DType::{F32, Q4_0, Q8_0};
    let case = |(count, identities, top_k, dtype, widths)| {
        let mlp = ExpertMlp { identities, ..ExpertMlp::default() };
        moe_case_of(count, top_k, [dtype; 3], widths, mlp)
    };
    let cases = [
        (1, 3, 2, F32, [5, 3]),
        (4, 4, 3, F32, [33, 20]),
        (2, 6, 2, Q8_0, [64, 96]),
        (40, 20, 6, Q8_0, [64, 32]),
        (3, 5, 5, Q4_0, [96, 64]),
    ];
    cases.into_iter().map(case).collect()
}

/// Of experts whose results are normed, by kernels for few rows and for many, of plain floats and of those with eight-bit activations.
pub fn moe_experts_with_norms() -> Vec<Case> {
    use DType::{F32, Fp8, Q4_K, Q8_0};
    let fp8 = Fp8 { scale: BlockScale::F32 };
    let case = |(count, top_k, dtype, [hidden, inner], eps): (usize, usize, DType, [usize; 2], f32)| {
        let mut r = Recorder::new(12);
        let norm = Some(OutputNorm { weight: r.vector(hidden), eps });
        let mlp = ExpertMlp { norm, ..ExpertMlp::default() };
        moe_case_in(r, count, top_k, [dtype; 3], [hidden, inner], mlp, weight)
    };
    let all = [
        (1, 1, F32, [1, 1], 1e-5),
        (5, 3, F32, [33, 20], 1e-8),
        (4, 2, Q8_0, [64, 96], 0.01),
        (4, 2, Q4_K, [256, 256], 1e-8),
        (3, 2, fp8, [96, 64], 1e-6),
    ];
    let large =
        [(6, 2, Q4_K, [768, 512], 1e-8), (12, 2, Q8_0, [1280, 256], 1e-8), (4, 2, fp8, [640, 544], 1e-8)];
    all.into_iter().map(case).chain(large.into_iter().map(|one| case(one).on_hardware())).collect()
}

fn random_matrix(r: &mut Recorder, matrix: MatrixSpec) -> Tensor {
    let values = r.random.normals(matrix.rows * matrix.cols);
    Tensor::from_f32(matrix.rows, matrix.cols, &values).unwrap()
}

pub fn moe_experts_without_a_gate() -> Vec<Case> {
    let mut cases = vec![];
    for (experts, top_k, hidden, inner) in [(1, 1, 1, 1), (7, 3, 6, 5), (5, 2, 33, 40)] {
        for weighted in [Weighted::Output, Weighted::Input] {
            let mut r = Recorder::new(5);
            let (x, logits) = (r.input(hidden), r.input(experts));
            let routing = r.graph.route(logits, None, Route::softmax(experts, top_k, true)).unwrap();
            let matrix = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
            let (up, down) = (matrix(inner, hidden), matrix(hidden, inner));
            let set = r.graph.expert_set(ExpertSet { layer: 0, experts, gate: None, up, down }).unwrap();
            for _ in 0..experts {
                let [up, down] = [up, down].map(|matrix| random_matrix(&mut r, matrix));
                r.experts.push(Expert { gate: None, up, down });
            }
            assert!(r.graph.moe_experts(x, routing, set).is_err(), "SwiGLU needs a gate");
            let mlp = ExpertMlp { activation: Activation::SquaredRelu, weighted, ..ExpertMlp::default() };
            let out = r.graph.moe_experts_with(x, routing, set, mlp).unwrap();
            let name = format!("{experts} top {top_k} of {hidden} × {inner}, {weighted:?}");
            cases.push(r.case(name, out).in_pairs().in_f32());
        }
    }
    cases
}

pub fn moe_experts_of_biased_routes() -> Vec<Case> {
    let mut cases = vec![];
    let (experts, top_k, hidden, inner) = (7, 3, 6, 5);
    for by_token in [false, true] {
        for score in [Score::SqrtSoftplus, Score::Sigmoid, Score::Softmax] {
            let mut r = Recorder::new(5);
            let (x, logits) = (r.input(hidden), r.input(experts));
            let route = Route { score, scale: 1.7, ..Route::softmax(experts, top_k, true) };
            let routing = if by_token {
                let ids: Vec<f32> = (0..VOCABULARY * top_k)
                    .map(|i| ((i / top_k * 5 + i % top_k * 2) % experts) as f32)
                    .collect();
                let table = r.weight(VOCABULARY, top_k, &ids);
                r.graph.route_by_token(logits, table, route).unwrap()
            } else {
                let bias = r.vector(experts);
                r.graph.route(logits, Some(bias), route).unwrap()
            };
            let matrix = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
            let (gate, down) = (matrix(inner, hidden), matrix(hidden, inner));
            let set = r
                .graph
                .expert_set(ExpertSet { layer: 0, experts, gate: Some(gate), up: gate, down })
                .unwrap();
            for _ in 0..experts {
                let [gate, up, down] = [gate, gate, down].map(|m| random_matrix(&mut r, m));
                r.experts.push(Expert { gate: Some(gate), up, down });
            }
            let activation = match score {
                Score::Softmax => Activation::CappedSwiGlu { limit: 0.3 },
                _ => Activation::LimitedSwiGlu { limit: 0.8 },
            };
            let weighted = if by_token { Weighted::Output } else { Weighted::Input };
            let mlp = ExpertMlp { activation, weighted, ..ExpertMlp::default() };
            let out = r.graph.moe_experts_with(x, routing, set, mlp).unwrap();
            let name = format!("{score:?} by token: {by_token}");
            cases.push(r.case(name, out).in_pairs().in_f32());
        }
    }
    cases
}

#[test]
fn a_router_logit_that_is_not_finite_is_not_lost() {
    for renormalize in [false, true] {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let score = if renormalize { Score::Sigmoid } else { Score::Softmax };
            let route = Route { score, ..Route::softmax(6, 2, renormalize) };
            let mut n = 0;
            // Expert 2's logit is bad for every third token, and far below the others for all.
            let logit = |random: &mut Random| {
                n += 1;
                let (token, expert) = ((n - 1) / 6, (n - 1) % 6);
                match expert {
                    2 if token % 3 == 0 => bad,
                    2 => -50.0,
                    _ => random.normal(),
                }
            };
            let case = route_case(route, "bad logit", logit);
            let [schedule, ..] = &SHORT.schedules();
            let reference = run(&case, &mut *compile(&case, &Reference, MODES[0]), schedule, None);
            let lost = |rows: &Results| rows.values().filter(|row| row.iter().all(|v| v.is_nan())).count();
            let expected = lost(&reference);
            assert!(expected > 0 && expected < reference.len(), "{bad}: some tokens are bad, some are not");
            for backend in backends() {
                let got = run(&case, &mut *compile(&case, &backend.one, MODES[1]), schedule, None);
                for (key, row) in &got {
                    let bad_row = reference[key].iter().all(|v| v.is_nan());
                    assert_eq!(row.iter().any(|v| v.is_nan()), bad_row, "{bad}, {route:?}, {key:?}: {row:?}");
                }
            }
        }
    }
}

#[test]
fn a_failing_source_of_experts_fails_the_run_and_nothing_else() {
    struct Failing<'a>(Source<'a>);
    impl ExpertSource for Failing<'_> {
        fn announce(&mut self, _: ExpertSetId, _: &[u32]) -> Result<()> {
            Ok(())
        }

        fn visit(
            &mut self,
            set: ExpertSetId,
            experts: &[u32],
            visitor: &mut dyn FnMut(&[ExpertView<'_>]),
        ) -> Result<()> {
            // Some experts come before the failure.
            self.0.visit(set, &experts[..1], visitor)?;
            Err(Error::Expert { layer: 0, expert: experts[1] as usize, reason: "lost".into() })
        }
    }
    let case = moe_case(5, 2, [DType::Q8_0; 3], 64, 32);
    for backend in backends() {
        let mut executable = compile(&case, &backend.several, MODES[1]);
        let [schedule, ..] = &SHORT.schedules();
        let before = run(&case, &mut *executable, schedule, None);
        let tokens: Vec<u32> = (0..20).collect();
        let spans =
            [Span { rows: 0..20, start: 0, pages: &[0], slots: StateSlots::default(), adapter: None }];
        let batch = Batch { tokens: &tokens, spans: &spans, outputs: &[19], ..Batch::default() };
        let mut source = Failing(Source { experts: &case.experts, order: 0 });
        let error = executable.run(&batch, &mut source, &mut vec![]).unwrap_err();
        assert!(matches!(&error, Error::Expert { reason, .. } if reason == "lost"), "{error}");
        assert_same_bits(&run(&case, &mut *executable, schedule, None), &before, "after a failure");
    }
}
