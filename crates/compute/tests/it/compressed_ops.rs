//! Hyper-connections, attention over windows and entries, and what goes with them, against `reference` on every
//! instruction set, and bit for bit the same however sequences are cut into batches.

use crate::support::one_op::{Case, Recorder, VOCABULARY};
use moeflux_compute::backend::{KvType, PAGE_TOKENS};
use moeflux_compute::graph::{
    Activation, Attention, BlockInputs, CompressedAttention, CompressedInputs, Decay, DeltaInputs, DeltaRule,
    EntryIndex, ExpertMlp, ExpertSet, HeadPairing, HyperConnection, HyperKind, IndexInputs, MatrixSpec,
    NGrams, Placement, PositionScale, Rope, RopeStyle, Route, Score, TokenForm, Weighted, WindowPool,
};
use moeflux_compute::{DType, Error, Tensor};

/// Largest difference from the reference over the largest result: f32 sums of up to some hundred terms.
const TOLERANCE: f32 = 5e-6;
/// The same with tokens and entries kept in f16.
const TOLERANCE_F16: f32 = 4e-3;

fn recorder() -> Recorder {
    Recorder::new(5)
}

fn check(name: &str, case: &Case) {
    let tolerances = [(KvType::F32, TOLERANCE), (KvType::F16, TOLERANCE_F16)];
    case.check(name, &tolerances);
    case.check_devices(name, &tolerances);
}

#[test]
fn rows() {
    let mut r = recorder();
    let x = r.input(24);
    let out = r.graph.unit_norm(x, 3, 0.1).unwrap();
    check("unit_norm", &r.finish(out));

    let mut r = recorder();
    let (gate, up) = (r.input(21), r.input(21));
    let out = r.graph.activate(Activation::LimitedSwiGlu { limit: 0.7 }, Some(gate), up).unwrap();
    check("limited_swiglu", &r.finish(out));

    let mut r = recorder();
    let x = r.input(5);
    let out = r.graph.repeat(x, 3);
    check("repeat", &r.finish(out));

    for (groups, each, cols) in [(3, 7, 10), (1, 5, 3), (2, 64, 32)] {
        let mut r = recorder();
        let x = r.input(groups * cols);
        let values = r.random.normals(groups * each * cols);
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
            HyperConnection { streams, norm_eps: 0.01, floor: 1e-3, kind: HyperKind::Mixed { iterations } };
        let mix = r.input(shape.weights());
        let base = [r.vector(shape.weights()), r.vector(3)];
        let weights = r.graph.hyper_weights(x, mix, base, shape).unwrap();
        let expanded = r.graph.hyper_expand(x, block, weights, streams).unwrap();
        check("hyper_expand", &r.finish(expanded));

        let mut r = recorder();
        let shape = HyperConnection { kind: HyperKind::Collapsed, ..shape };
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
    let shape = CompressedAttention {
        form: TokenForm::Shared,
        heads: 5,
        head_dim: 10,
        scale: 0.3,
        window: 9,
        stride: 4,
        index: None,
    };
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
            weights: Some(r.input(index.heads)),
        });
        let sinks = r.vector(shape.heads);
        let inputs = CompressedInputs { q, kv, entries, index, sinks };
        let out = r.graph.compressed_attention(inputs, shape).unwrap();
        // Keys of the index round to f16 too, which may change what is chosen: nothing may hang on that here.
        let case = r.finish(out);
        if shape.index.is_none_or(|index| index.top_k >= 200) {
            check(&format!("{shape:?}"), &case);
        } else {
            check_f32(&format!("{shape:?}"), &case);
        }
    }
}

#[test]
fn tokens_of_chosen_windows() {
    let index = EntryIndex { heads: 3, head_dim: 5, top_k: 4 };
    let shape = CompressedAttention {
        form: TokenForm::Grouped { kv_heads: 2 },
        heads: 6,
        head_dim: 8,
        scale: 0.4,
        window: usize::MAX,
        stride: 4,
        index: Some(index),
    };
    let one = EntryIndex { heads: 1, top_k: 1, ..index };
    let shapes = [
        shape,
        CompressedAttention { index: Some(EntryIndex { top_k: 200, ..index }), ..shape },
        CompressedAttention {
            index: Some(one),
            stride: 1,
            form: TokenForm::Grouped { kv_heads: 6 },
            ..shape
        },
        CompressedAttention { stride: 11, form: TokenForm::Grouped { kv_heads: 1 }, ..shape },
        CompressedAttention { index: Some(one), stride: 65, ..shape },
    ];
    for shape in shapes {
        for weighted in [false, true] {
            let (TokenForm::Grouped { kv_heads }, Some(index)) = (shape.form, shape.index) else { panic!() };
            let mut r = recorder();
            let q = r.input(shape.heads * shape.head_dim);
            let [k, v] = [(); 2].map(|()| r.input(kv_heads * shape.head_dim));
            let weights = weighted.then(|| r.input(index.heads));
            let (index_q, index_k) = (r.input(index.heads * index.head_dim), r.input(index.head_dim));
            let index_inputs = IndexInputs { q: index_q, k: index_k, weights };
            let inputs = BlockInputs { q, k, v, index: index_inputs };
            let out = r.graph.block_attention(inputs, shape).unwrap();
            let (name, case) = (format!("{shape:?} weighted: {weighted}"), r.finish(out));
            if index.top_k >= 200 { check(&name, &case) } else { check_f32(&name, &case) }
        }
    }
}

#[test]
fn gated_residual_streams() {
    for streams in [1, 2, 4] {
        let width = 9;
        let mut r = recorder();
        let (x, gate) = (r.input(streams * width), r.input(streams * width));
        let out = r.graph.gated_mean(x, gate, streams).unwrap();
        check("gated_mean", &r.finish(out));

        let mut r = recorder();
        let (x, block, logits) = (r.input(streams * width), r.input(width), r.input(streams));
        let out = r.graph.stream_add(x, block, logits).unwrap();
        check("stream_add", &r.finish(out));

        let mut r = recorder();
        let (keys, queries) = (r.input(streams * width), r.input(streams * width));
        let value = r.input(width);
        let out = r.graph.stream_gate(keys, queries, value).unwrap();
        check("stream_gate", &r.finish(out));

        // A score of zero has no sign.
        let mut r = recorder();
        let table = r.weight(VOCABULARY, streams * width, &vec![0.0; VOCABULARY * streams * width]);
        let (keys, queries, value) = (r.graph.embed(table), r.input(streams * width), r.input(width));
        let out = r.graph.stream_gate(keys, queries, value).unwrap();
        check("stream_gate of nothing", &r.finish(out));
    }
    let mut r = recorder();
    let x = r.input(13);
    let out = r.graph.scaled_silu(x, 0.25);
    check("scaled_silu", &r.finish(out));

    let mut r = recorder();
    let (x, weight) = (r.input(12), r.vector(12));
    let out = r.graph.rms_norm(x, weight, 3, 0.1).unwrap();
    check("rms_norm with weights of each part", &r.finish(out));
}

#[test]
fn tokens_before() {
    for window in [1, 3, 70] {
        let mut r = recorder();
        let x = r.input(7);
        let out = r.graph.window_mean(x, window).unwrap();
        check("window_mean", &r.finish(out));
    }
    for (kernel, dilation) in [(1, 3), (4, 3), (3, 2), (2, 71)] {
        let mut r = recorder();
        let (x, weight) = (r.input(10), r.vector(10 * kernel));
        let out = r.graph.dilated_conv1d(x, weight, kernel, dilation).unwrap();
        check_f32("dilated conv", &r.finish(out));
    }
    // Tables in parts; an end among the tokens.
    let head_rows = vec![11, 13, 17, 19, 23, 29];
    for multipliers in [vec![3, 5, 7, 9], vec![0x1234_5678_9abd, 0x7777_1111], vec![1, 1 << 40, 3]] {
        let mut r = recorder();
        let parts = [1, 60, 51].map(|rows| {
            let values = r.random.normals(rows * 5);
            r.weight(rows, 5, &values)
        });
        let ngrams = NGrams { multipliers, head_rows: head_rows.clone(), end: 13 };
        let out = r.graph.ngram_embed(parts.to_vec(), ngrams).unwrap();
        check("ngram_embed", &r.finish(out));
    }
}

#[test]
fn channels_that_decay_on_their_own() {
    for (key_heads, value_heads, key_dim, value_dim) in
        [(1, 1, 2, 1), (2, 4, 12, 9), (3, 3, 16, 32), (1, 2, 5, 70)]
    {
        let mut r = recorder();
        let [q, k] = [(); 2].map(|()| r.input(key_heads * key_dim));
        let (v, b) = (r.input(value_heads * value_dim), r.input(value_heads));
        let a = r.input(value_heads * key_dim);
        let values: Vec<f32> = r.random.normals(value_heads).iter().map(|v| -v.exp()).collect();
        let (decay, dt_bias) = (r.weight(1, value_heads, &values), r.vector(value_heads * key_dim));
        let shape = DeltaRule {
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            pairing: HeadPairing::Grouped,
            decay: Decay::Softplus,
        };
        let inputs = DeltaInputs { q, k, v, a, b };
        let out = r.graph.gated_delta_rule(inputs, decay, dt_bias, shape).unwrap();
        check(&format!("{shape:?}"), &r.finish(out));
    }
}

#[test]
fn chunks_and_values_of_another_width() {
    let grouped = Attention::grouped(6, 2, 12, 0.4);
    let shapes = [
        Attention { chunk: Some(1), ..grouped },
        Attention { chunk: Some(7), ..grouped },
        Attention { chunk: Some(PAGE_TOKENS + 1), ..grouped },
        Attention { chunk: Some(50), window: Some(9), ..grouped },
        Attention { value_dim: 5, ..grouped },
        Attention { value_dim: 20, window: Some(30), ..grouped },
    ];
    for shape in shapes {
        let mut r = recorder();
        let [q, k] = [shape.heads, shape.kv_heads].map(|heads| r.input(heads * shape.head_dim));
        let (v, sinks) = (r.input(shape.kv_heads * shape.value_dim), r.vector(shape.heads));
        let out = r.graph.attention_with_sinks(q, k, v, shape, Some(sinks)).unwrap();
        check(&format!("{shape:?}"), &r.finish(out));
    }
    for scale in [
        PositionScale { base: 1.0, slope: 0.3, offset: 1, period: 13 },
        PositionScale { base: 1.0, slope: 0.3, offset: 0, period: 1 },
        PositionScale::constant(0.7),
    ] {
        let mut r = recorder();
        let x = r.input(10);
        let out = r.graph.position_scale(x, scale);
        check(&format!("{scale:?}"), &r.finish(out));
    }
    assert!((PositionScale { base: 1.0, slope: 0.1, offset: 1, period: 4 }.at(8) - 1.10986).abs() < 1e-5);
}

/// As [`check`], without f16.
fn check_f32(name: &str, case: &Case) {
    case.check(name, &[(KvType::F32, TOLERANCE)]);
    case.check_devices(name, &[(KvType::F32, TOLERANCE)]);
}

fn random_matrix(r: &mut Recorder, matrix: MatrixSpec) -> Tensor {
    let values = r.random.normals(matrix.rows * matrix.cols);
    Tensor::from_f32(matrix.rows, matrix.cols, &values).unwrap()
}

#[test]
fn experts_without_a_gate() {
    for (experts, top_k, hidden, inner) in [(1, 1, 1, 1), (7, 3, 6, 5), (5, 2, 33, 40)] {
        for weighted in [Weighted::Output, Weighted::Input] {
            let mut r = recorder();
            let (x, logits) = (r.input(hidden), r.input(experts));
            let routing = r.graph.route(logits, None, Route::softmax(experts, top_k, true)).unwrap();
            let matrix = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
            let (up, down) = (matrix(inner, hidden), matrix(hidden, inner));
            let set = r.graph.expert_set(ExpertSet { layer: 0, experts, gate: None, up, down }).unwrap();
            for _ in 0..experts {
                let matrices = [up, down].map(|m| random_matrix(&mut r, m));
                r.experts.push((None, matrices));
            }
            assert!(r.graph.moe_experts(x, routing, set).is_err(), "SwiGLU needs a gate");
            let mlp = ExpertMlp { activation: Activation::SquaredRelu, biases: None, weighted };
            let out = r.graph.moe_experts_with(x, routing, set, mlp).unwrap();
            check_f32(&format!("{experts} top {top_k} of {hidden} × {inner}, {weighted:?}"), &r.finish(out));
        }
    }
}

#[test]
fn capped_swiglu() {
    for (width, limit) in [(1, 0.4), (37, 0.4), (500, 1.3)] {
        let mut r = recorder();
        let (gate, up) = (r.input(width), r.input(width));
        let out = r.graph.activate(Activation::CappedSwiGlu { limit }, Some(gate), up).unwrap();
        check_f32(&format!("{width} within {limit}"), &r.finish(out));
    }
}

#[test]
fn squared_relu() {
    for width in [1, 37, 500] {
        let mut r = recorder();
        let x = r.input(width);
        let out = r.graph.squared_relu(x);
        check_f32(&format!("{width}"), &r.finish(out));
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
            let set = r
                .graph
                .expert_set(ExpertSet { layer: 0, experts, gate: Some(gate), up: gate, down })
                .unwrap();
            for _ in 0..experts {
                let [gate, up, down] = [gate, gate, down].map(|m| random_matrix(&mut r, m));
                r.experts.push((Some(gate), [up, down]));
            }
            let activation = match score {
                Score::Softmax => Activation::CappedSwiGlu { limit: 0.3 },
                _ => Activation::LimitedSwiGlu { limit: 0.8 },
            };
            let weighted = if by_token { Weighted::Output } else { Weighted::Input };
            let mlp = ExpertMlp { activation, biases: None, weighted };
            let out = r.graph.moe_experts_with(x, routing, set, mlp).unwrap();
            check(&format!("{score:?} by token: {by_token}"), &r.finish(out));
        }
    }
}

#[test]
fn a_page_keeps_its_tokens_and_the_entries_that_end_in_it() {
    for stride in [1, 3, 4, 11, 64, 65, 128] {
        let shape = CompressedAttention {
            form: TokenForm::Shared,
            heads: 1,
            head_dim: 8,
            scale: 1.0,
            window: 4,
            stride,
            index: None,
        };
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
    let shape = CompressedAttention {
        form: TokenForm::Shared,
        heads: 2,
        head_dim: 3,
        scale: 1.0,
        window: 4,
        stride: 0,
        index: None,
    };
    let inputs = CompressedInputs { q: a, kv: b, entries: b, index: None, sinks: vector };
    let rope = r.graph.rotation(Rope { style: RopeStyle::HalfSplit, inv_freq: vec![1.0], magnitude: 1.0 });
    let hyper =
        HyperConnection { streams: 2, norm_eps: 0.0, floor: 0.0, kind: HyperKind::Mixed { iterations: 1 } };
    let route = Route::softmax(7, 2, true);
    let pool = WindowPool { window: 2, overlap: false, width: 6 };
    let g = &mut r.graph;
    let index = EntryIndex { heads: 1, head_dim: 6, top_k: 3 };
    let form = TokenForm::Grouped { kv_heads: 2 };
    let blocks = CompressedAttention { form, stride: 2, index: Some(index), ..shape };
    let block_inputs = BlockInputs { q: a, k: a, v: a, index: IndexInputs { q: a, k: a, weights: None } };
    let ngrams = NGrams { multipliers: vec![3, 5], head_rows: vec![2], end: 0 };
    let place = Placement { first: 5, inverse: false, stride: 1 };
    let refused: Vec<Option<Error>> = vec![
        g.unit_norm(b, 2, 0.0).err(),
        g.activate(Activation::LimitedSwiGlu { limit: 1.0 }, Some(a), b).err(),
        g.activate(Activation::SwiGlu, None, a).err(),
        g.activate(Activation::SquaredRelu, Some(a), a).err(),
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
        g.gated_mean(a, b, 2).err(),
        g.stream_add(a, b, a).err(),
        g.stream_gate(a, a, b).err(),
        g.window_mean(a, 0).err(),
        g.dilated_conv1d(a, vector, 1, 0).err(),
        g.ngram_embed(vec![], ngrams.clone()).err(),
        g.ngram_embed(vec![vector], ngrams).err(),
        g.compressed_attention(inputs, blocks).err(),
        g.block_attention(block_inputs, shape).err(),
        g.block_attention(block_inputs, CompressedAttention { heads: 3, ..blocks }).err(),
        g.block_attention(block_inputs, CompressedAttention { stride: 0, ..blocks }).err(),
    ];
    for (i, error) in refused.iter().enumerate() {
        assert!(matches!(error, Some(Error::Shape { .. })), "{i}: {error:?}");
    }
}
