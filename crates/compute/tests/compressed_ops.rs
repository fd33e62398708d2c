//! Hyper-connections, attention over windows and entries, and what goes with them, against `reference` on every
//! instruction set, and bit for bit the same however sequences are cut into batches.

#[path = "support/one_op.rs"]
#[allow(dead_code, reason = "shared by tests that use different parts")]
mod one_op;
#[path = "support/random.rs"]
#[allow(dead_code, reason = "shared by tests that use different parts")]
mod random;

use moeflux_compute::backend::{Backend, CompileOptions, KvType, PAGE_TOKENS};
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{GpuBackend, GpuOptions};
use moeflux_compute::graph::{
    Activation, CompressedAttention, CompressedInputs, EntryIndex, ExpertMlp, ExpertSet, HyperConnection,
    IndexInputs, MatrixSpec, Placement, Rope, RopeStyle, Route, Score, WindowPool,
};
use moeflux_compute::plan::Plan;
use moeflux_compute::{DType, Error, Tensor};
use one_op::{Case, Recorder, VOCABULARY};

/// Largest difference from the reference over the largest result: f32 sums of up to some hundred terms.
const TOLERANCE: f32 = 5e-6;
/// The same with tokens and entries kept in f16.
const TOLERANCE_F16: f32 = 4e-3;

fn recorder() -> Recorder {
    Recorder::new(5)
}

fn check(name: &str, case: &Case) {
    case.check(name, &[(KvType::F32, TOLERANCE), (KvType::F16, TOLERANCE_F16)]);
    // GPUs refuse what they have no kernels of, by name.
    let emulator = GpuBackend::new("emulator", GpuOptions::default(), || Ok(Box::new(Emulator::new(7))));
    let (plan, options) = (Plan::new(&case.graph, |_| true), CompileOptions::default());
    assert_eq!(emulator.scratch_bytes(&case.graph, &plan, options), 0);
    let refused = emulator.compile(&case.graph, plan, case.weights.clone(), options).err();
    let refused = refused.unwrap_or_else(|| panic!("{name}: compiled for a GPU"));
    assert!(matches!(&refused, Error::Device { reason } if reason.contains("use the CPU")), "{refused}");
}

#[test]
fn rows() {
    let mut r = recorder();
    let x = r.input(24);
    let out = r.graph.unit_norm(x, 3, 0.1).unwrap();
    check("unit_norm", &r.finish(out));

    let mut r = recorder();
    let (gate, up) = (r.input(21), r.input(21));
    let out = r.graph.limited_swiglu(gate, up, 0.7).unwrap();
    check("limited_swiglu", &r.finish(out));

    let mut r = recorder();
    let x = r.input(5);
    let out = r.graph.repeat(x, 3);
    check("repeat", &r.finish(out));

    for (groups, each, cols) in [(3, 7, 10), (1, 5, 3), (2, 64, 32)] {
        let mut r = recorder();
        let x = r.input(groups * cols);
        let values = r.random.normal(groups * each * cols);
        let weight = r.weight(groups * each, cols, &values);
        let out = r.graph.grouped_linear(x, weight, groups).unwrap();
        check("grouped_linear", &r.finish(out));
    }

    for (first, inverse, stride) in [(4, false, 1), (0, true, 1), (4, false, 5), (3, true, 7)] {
        for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
            let mut r = recorder();
            let x = r.input(30);
            let rope = r.graph.rotation(Rope { style, inv_freq: vec![0.7, 0.1, 0.01], magnitude: 1.3 });
            let place = Placement { first, inverse, stride };
            let out = r.graph.placed_rope(x, 3, rope, place).unwrap();
            check("placed_rope", &r.finish(out));
        }
    }
}

#[test]
fn hyper_connections() {
    for (streams, iterations) in [(1, 1), (2, 3), (4, 20)] {
        let mut r = recorder();
        let width = 6;
        let (x, block) = (r.input(streams * width), r.input(width));
        let shape =
            HyperConnection { streams, norm_eps: 0.01, floor: 1e-3, iterations, collapse_only: false };
        let mix = r.input(shape.weights());
        let base = [r.vector(shape.weights()), r.vector(3)];
        let weights = r.graph.hyper_weights(x, mix, base, shape).unwrap();
        let expanded = r.graph.hyper_expand(x, block, weights, streams).unwrap();
        check("hyper_expand", &r.finish(expanded));

        let mut r = recorder();
        let shape = HyperConnection { collapse_only: true, ..shape };
        let (x, mix) = (r.input(streams * width), r.input(streams));
        let base = [r.vector(streams), r.vector(1)];
        let weights = r.graph.hyper_weights(x, mix, base, shape).unwrap();
        let collapsed = r.graph.hyper_collapse(x, weights, streams).unwrap();
        check("hyper_collapse", &r.finish(collapsed));
    }
}

#[test]
fn window_pools() {
    for window in [1, 2, 5, 70] {
        for overlap in [false, true] {
            let shape = WindowPool { window, overlap, width: 7 };
            let mut r = recorder();
            let (kv, gate) = (r.input(shape.channels()), r.input(shape.channels()));
            let bias = r.vector(window * shape.channels());
            let out = r.graph.window_pool(kv, gate, bias, shape).unwrap();
            check(&format!("window_pool {shape:?}"), &r.finish(out));
        }
    }
}

#[test]
fn compressed_attentions() {
    let few = EntryIndex { heads: 9, head_dim: 6, top_k: 4 };
    let shape = CompressedAttention { heads: 5, head_dim: 10, scale: 0.3, window: 9, stride: 4, index: None };
    let shapes = [
        shape,
        CompressedAttention { index: Some(few), ..shape },
        CompressedAttention { index: Some(EntryIndex { top_k: 200, ..few }), stride: 1, ..shape },
        CompressedAttention { index: Some(EntryIndex { top_k: 1, ..few }), stride: 3, window: 1, ..shape },
        // Entries of more tokens than a page has, and of a number that does not divide it.
        CompressedAttention { stride: 65, window: 200, ..shape },
        CompressedAttention { stride: 11, heads: 19, ..shape },
    ];
    for shape in shapes {
        let mut r = recorder();
        let (q, kv) = (r.input(shape.heads * shape.head_dim), r.input(shape.head_dim));
        let entries = r.input(shape.head_dim);
        let index = shape.index.map(|index| IndexInputs {
            q: r.input(index.heads * index.head_dim),
            k: r.input(index.head_dim),
            weights: r.input(index.heads),
        });
        let sinks = r.vector(shape.heads);
        let inputs = CompressedInputs { q, kv, entries, index, sinks };
        let out = r.graph.compressed_attention(inputs, shape).unwrap();
        // Keys of the index round to f16 too, which may change what is chosen: nothing may hang on that here.
        let case = r.finish(out);
        if shape.index.is_none_or(|index| index.top_k >= 200) {
            check(&format!("{shape:?}"), &case);
        } else {
            case.check(&format!("{shape:?}"), &[(KvType::F32, TOLERANCE)]);
        }
    }
}

#[test]
fn routes() {
    let (experts, top_k, hidden, inner) = (7, 3, 6, 5);
    for by_token in [false, true] {
        for score in [Score::SqrtSoftplus, Score::Sigmoid, Score::Softmax] {
            let mut r = recorder();
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
            let set = r.graph.expert_set(ExpertSet { layer: 0, experts, gate, up: gate, down }).unwrap();
            for _ in 0..experts {
                let tensors = [gate, gate, down].map(|m| {
                    let values = r.random.normal(m.rows * m.cols);
                    Tensor::from_f32(m.rows, m.cols, &values).unwrap()
                });
                r.experts.push(tensors);
            }
            let mlp = ExpertMlp { activation: Activation::LimitedSwiGlu { limit: 0.8 }, biases: None };
            let out = r.graph.moe_experts_with(x, routing, set, mlp).unwrap();
            check(&format!("{score:?} by token: {by_token}"), &r.finish(out));
        }
    }
}

#[test]
fn a_page_keeps_its_tokens_and_the_entries_that_end_in_it() {
    for stride in [1, 3, 4, 11, 64, 65, 128] {
        let shape = CompressedAttention { heads: 1, head_dim: 8, scale: 1.0, window: 4, stride, index: None };
        let mut places = std::collections::HashSet::new();
        for entry in 0..400 / stride {
            let (page, place) = shape.place(entry);
            assert_eq!(page, ((entry + 1) * stride - 1) / PAGE_TOKENS, "{stride}");
            assert!(place < shape.page_entries() && places.insert((page, place)), "{stride}: {entry}");
        }
        assert_eq!(shape.page_elements(), 8 * (PAGE_TOKENS + PAGE_TOKENS.div_ceil(stride)), "{stride}");
    }
}

#[test]
fn what_does_not_fit_is_refused_while_recording() {
    let mut r = recorder();
    let (a, b) = (r.input(6), r.input(7));
    let vector = r.vector(6);
    let shape = CompressedAttention { heads: 2, head_dim: 3, scale: 1.0, window: 4, stride: 0, index: None };
    let inputs = CompressedInputs { q: a, kv: b, entries: b, index: None, sinks: vector };
    let rope = r.graph.rotation(Rope { style: RopeStyle::HalfSplit, inv_freq: vec![1.0], magnitude: 1.0 });
    let hyper =
        HyperConnection { streams: 2, norm_eps: 0.0, floor: 0.0, iterations: 1, collapse_only: false };
    let route = Route::softmax(7, 2, true);
    let pool = WindowPool { window: 2, overlap: false, width: 6 };
    let g = &mut r.graph;
    let place = Placement { first: 5, inverse: false, stride: 1 };
    let refused: Vec<Option<Error>> = vec![
        g.unit_norm(b, 2, 0.0).err(),
        g.limited_swiglu(a, b, 1.0).err(),
        g.grouped_linear(b, vector, 2).err(),
        g.placed_rope(a, 1, rope, place).err(),
        g.hyper_weights(a, b, [vector, vector], hyper).err(),
        g.hyper_collapse(b, a, 2).err(),
        g.hyper_expand(a, b, a, 2).err(),
        g.window_pool(a, b, vector, pool).err(),
        g.window_pool(a, a, vector, pool).err(),
        g.window_pool(a, a, vector, WindowPool { window: 0, ..pool }).err(),
        g.compressed_attention(inputs, shape).err(),
        g.compressed_attention(inputs, CompressedAttention { stride: 2, ..shape }).err(),
        g.route_by_token(b, vector, route).err(),
        g.route_by_token(a, vector, route).err(),
    ];
    for (i, error) in refused.iter().enumerate() {
        assert!(matches!(error, Some(Error::Shape { .. })), "{i}: {error:?}");
    }
}
