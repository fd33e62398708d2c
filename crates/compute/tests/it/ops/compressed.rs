//! Windows of tokens: pools and means, attention over them and over entries, and n-grams.

use super::case::{Case, Recorder, SHORT};
use super::chosen::whole_input;
use moeflux_compute::backend::PAGE_TOKENS;
use moeflux_compute::graph::{
    Activation, BlockInputs, CompressedAttention, CompressedInputs, EntryIndex, HyperConnection, HyperKind,
    IndexInputs, NGrams, Placement, Precision, Rope, RopeStyle, Route, TokenForm, WindowPool,
};
use moeflux_compute::{DType, Error};

pub fn windows() -> Vec<Case> {
    let mut cases = vec![];
    for window in [1, 2, 5, 70] {
        for overlap in [false, true] {
            let shape = WindowPool { window, overlap, width: 7 };
            let mut r = Recorder::new(5);
            let (kv, gate) = (r.input(shape.channels()), r.input(shape.channels()));
            let bias = r.vector(window * shape.channels());
            let out = r.graph.window_pool(kv, gate, bias, shape).unwrap();
            // What a token gives shows where its window ends.
            cases.push(r.case(format!("{shape:?}"), out).in_pairs().without_poison());
        }
    }
    for window in [1, 3, 70] {
        let mut r = Recorder::new(5);
        let x = r.input(7);
        let out = r.graph.window_mean(x, window).unwrap();
        cases.push(r.case(format!("{window}"), out).in_pairs().without_poison());
    }
    cases
}

pub fn compressed_attention() -> Vec<Case> {
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
        CompressedAttention {
            index: Some(EntryIndex { top_k: 200, head_dim: 32, ..few }),
            head_dim: 64,
            stride: 3,
            scale: 0.1,
            ..shape
        },
    ];
    let case = |shape: CompressedAttention| {
        let mut r = Recorder::new(5);
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
        let case = r.case(format!("{shape:?}"), out).in_pairs();
        let case = if shape.index.is_some() { case.without_poison() } else { case };
        if shape.index.is_none_or(|index| index.top_k >= 200) { case } else { case.in_f32() }
    };
    shapes.map(case).into_iter().chain(published_entries()).collect()
}

/// Heads as DeepSeek-V4 has them: on compute capability 9.0 these have kernels of their own.
fn published_entries() -> Vec<Case> {
    let index = EntryIndex { heads: 9, head_dim: 8, top_k: 4 };
    let shape = CompressedAttention {
        form: TokenForm::Shared,
        heads: 66,
        head_dim: 512,
        scale: 0.05,
        window: 9,
        stride: 4,
        index: Some(index),
    };
    let shapes = [
        shape,
        CompressedAttention { index: Some(EntryIndex { top_k: 60, ..index }), stride: 1, heads: 3, ..shape },
        CompressedAttention { index: None, stride: 3, window: 70, heads: 3, ..shape },
    ];
    let case = |shape: CompressedAttention| {
        let mut r = Recorder::new(5);
        let (q, kv) = (r.input(shape.heads * shape.head_dim), r.input(shape.head_dim));
        let entries = r.input(shape.head_dim);
        let index = shape.index.map(|index| IndexInputs {
            q: whole_input(&mut r, index.heads * index.head_dim),
            k: whole_input(&mut r, index.head_dim),
            weights: Some(whole_input(&mut r, index.heads)),
        });
        let sinks = r.vector(shape.heads);
        let inputs = CompressedInputs { q, kv, entries, index, sinks };
        let out = r.graph.compressed_attention(inputs, shape).unwrap();
        let case = r.case(format!("{shape:?}"), out).in_pairs().without_poison().on_hardware();
        if shape.heads > 64 { Case { batching: SHORT, ..case } } else { case }
    };
    shapes.map(case).into()
}

pub fn block_attention() -> Vec<Case> {
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
        CompressedAttention {
            index: Some(EntryIndex { top_k: 200, head_dim: 32, ..index }),
            head_dim: 32,
            scale: 0.2,
            ..shape
        },
    ];
    let mut cases = vec![];
    for shape in shapes {
        for weighted in [false, true] {
            let (TokenForm::Grouped { kv_heads }, Some(index)) = (shape.form, shape.index) else { panic!() };
            let mut r = Recorder::new(5);
            let q = r.input(shape.heads * shape.head_dim);
            let [k, v] = [(); 2].map(|()| r.input(kv_heads * shape.head_dim));
            let weights = weighted.then(|| r.input(index.heads));
            let (index_q, index_k) = (r.input(index.heads * index.head_dim), r.input(index.head_dim));
            let index_inputs = IndexInputs { q: index_q, k: index_k, weights };
            let inputs = BlockInputs { q, k, v, index: index_inputs };
            let out = r.graph.block_attention(inputs, shape).unwrap();
            let case = r.case(format!("{shape:?} weighted: {weighted}"), out).in_pairs().without_poison();
            cases.push(if index.top_k >= 200 { case } else { case.in_f32() });
        }
    }
    cases
}

/// Tables in parts; an end among the tokens.
pub fn ngrams() -> Vec<Case> {
    let head_rows = vec![11, 13, 17, 19, 23, 29];
    let case = |multipliers: Vec<u64>| {
        let mut r = Recorder::new(5);
        let parts = [1, 60, 51].map(|rows| r.matrix(DType::F32, rows, 5));
        let ngrams = NGrams { multipliers, head_rows: head_rows.clone(), end: 9 };
        let name = format!("{ngrams:?}");
        let out = r.graph.ngram_embed(parts.to_vec(), ngrams).unwrap();
        // Tables have no NaN, and there is no other input.
        r.case(name, out).in_pairs().without_poison()
    };
    [vec![3, 5, 7, 9], vec![0x1234_5678_9abd, 0x7777_1111], vec![1, 1 << 40, 3]].map(case).into()
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
    let mut r = Recorder::new(5);
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
    let rope = r.graph.rotation(Rope {
        style: RopeStyle::HalfSplit,
        inv_freq: vec![1.0],
        magnitude: 1.0,
        axes: vec![],
    });
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
        g.grouped_linear(b, vector, 2, Precision::F32).err(),
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
        g.top_softmax(a, 0).err(),
        g.top_softmax(a, a.width() + 1).err(),
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
