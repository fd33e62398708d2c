//! Excerpts of graphs: which layers are alike, and what is left of a model when only some are taken.

use moeflux_compute::DType;
use moeflux_compute::graph::{
    Attention, ExpertSet, Graph, GraphBuilder, MatrixSpec, Op, Precision, Route, Value,
};

const HIDDEN: usize = 64;
const VOCAB: usize = 300;

fn spec(dtype: DType, rows: usize, cols: usize) -> MatrixSpec {
    MatrixSpec { dtype, rows, cols }
}

/// Layers of attention and experts stored in `dtypes`; with `leak`, each also adds what the embedding gave.
fn model(dtypes: &[DType], leak: bool) -> Graph {
    let mut g = GraphBuilder::new();
    g.scope("embed_tokens");
    let table = g.weight("embed", spec(DType::BF16, VOCAB, HIDDEN));
    let embedded = g.embed(table);
    let mut x = embedded;
    for (layer, dtype) in dtypes.iter().enumerate() {
        x = self::layer(&mut g, layer, *dtype, x);
        if leak {
            let narrow = g.slice(embedded, 1, 0, 32).unwrap();
            let weight = g.weight("leak", spec(DType::F32, HIDDEN, 32));
            let wide = g.linear(narrow, weight, None, Precision::Fast).unwrap();
            g.scope(format!("layers.{layer}.leak"));
            let more = g.slice(wide, 1, 0, HIDDEN).unwrap();
            x = g.add(x, more).unwrap();
        }
    }
    g.scope("lm_head");
    let rows = g.gather_rows(x);
    let logits = g.linear(rows, table, None, Precision::Fast).unwrap();
    g.finish(logits)
}

fn layer(g: &mut GraphBuilder, layer: usize, dtype: DType, x: Value) -> Value {
    g.scope(format!("layers.{layer}.self_attn"));
    let mut project = |name: &str| {
        let weight = g.weight(name, spec(dtype, HIDDEN, HIDDEN));
        g.linear(x, weight, None, Precision::Fast).unwrap()
    };
    let [q, k, v] = ["q", "k", "v"].map(&mut project);
    let shape = Attention::grouped(2, 2, 32, 1.0);
    let mixed = g.attention(q, k, v, shape).unwrap();
    let x = g.add(x, mixed).unwrap();
    g.scope(format!("layers.{layer}.mlp"));
    let router = g.weight("router", spec(DType::F32, 4, HIDDEN));
    let logits = g.linear(x, router, None, Precision::F32).unwrap();
    let routing = g.route(logits, None, Route::softmax(4, 2, true)).unwrap();
    let matrix = spec(dtype, HIDDEN, HIDDEN);
    let set = ExpertSet { layer, experts: 4, gate: Some(matrix), up: matrix, down: matrix };
    let set = g.expert_set(set).unwrap();
    let out = g.moe_experts(x, routing, set).unwrap();
    g.add(x, out).unwrap()
}

#[test]
fn layers_are_alike_if_they_do_the_same() {
    let (a, b) = (DType::Q8_0, DType::BF16);
    assert_eq!(model(&[a, b, a, a], false).layer_kinds().unwrap(), [vec![0, 2, 3], vec![1]]);
    assert_eq!(model(&[], false).layer_kinds().unwrap(), Vec::<Vec<usize>>::new());
}

#[test]
fn an_excerpt_of_all_layers_is_the_model() {
    let whole = model(&[DType::Q8_0, DType::BF16], false);
    let excerpt = whole.excerpt(&[0, 1], usize::MAX).unwrap();
    assert_eq!(excerpt.vocab_size(), VOCAB);
    let ops = |graph: &Graph| graph.nodes().iter().map(|node| node.out).collect::<Vec<_>>();
    assert_eq!(ops(&excerpt), ops(&whole));
    // The head has weights of its own.
    assert_eq!(excerpt.weights().len(), whole.weights().len() + 1);
    assert_eq!(excerpt.expert_sets(), whole.expert_sets());
}

#[test]
fn layers_can_be_taken_out_and_repeated() {
    let whole = model(&[DType::Q8_0, DType::BF16], false);
    let excerpt = whole.excerpt(&[1, 1, 1], 16).unwrap();
    assert_eq!(excerpt.vocab_size(), 16);
    let matrices: Vec<MatrixSpec> = excerpt.weights().iter().map(|weight| weight.matrix).collect();
    assert_eq!(matrices[0], spec(DType::F32, 16, HIDDEN));
    assert_eq!(matrices.last(), Some(&spec(DType::BF16, 16, HIDDEN)));
    assert_eq!(matrices.len(), 2 + 3 * 4);
    assert_eq!((excerpt.caches().len(), excerpt.expert_sets().len()), (3, 3));
    assert!(excerpt.expert_sets().iter().all(|set| set.up.dtype == DType::BF16));
    let experts = excerpt.nodes().iter().filter(|node| matches!(node.op, Op::MoeExperts(_))).count();
    assert_eq!(experts, 3);
    let none = whole.excerpt(&[], 16).unwrap();
    assert_eq!((none.weights().len(), none.nodes().len()), (2, 3));
}

#[test]
fn layers_that_see_more_than_the_stream_are_refused() {
    let error = model(&[DType::Q8_0, DType::Q8_0], true).excerpt(&[1], 16).unwrap_err();
    assert!(error.to_string().contains("residual stream"), "{error}");
}
