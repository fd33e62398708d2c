//! What does not fit is refused, while recording or at the latest while compiling.

use moeflux_compute::backend::{Backend, CompileOptions};
use moeflux_compute::graph::{
    Attention, ExpertMlp, ExpertSet, GraphBuilder, GroupRank, Groups, MatrixSpec, OutputNorm, Precision,
    Rope, RopeStyle, Route, Routing, Value, WeightId, Weighted,
};
use moeflux_compute::reference::Reference;
use moeflux_compute::{DType, Result, Tensor};

use super::checks::backends;
use super::linear::linear_case;
use crate::support::random::Random;
use crate::support::weights::weight;

#[test]
fn weights_that_are_not_the_declared_ones_are_refused() {
    let case = linear_case(DType::Q8_0, 3, 32, true, Precision::Fast);
    let check = |weights: Vec<Tensor>, expected: &str| {
        let tested = backends();
        // None of the processor if another is all that is to be tested.
        let tested = tested.first().map(|tested| &tested.one as &dyn Backend);
        for backend in [Some(&Reference as &dyn Backend), tested].into_iter().flatten() {
            let outcome = backend.compile(&case.graph, weights.clone(), CompileOptions::default());
            let error = outcome.err().expect("refused").to_string();
            assert!(error.contains("weight weight") && error.contains(expected), "{error}");
        }
    };
    let mut random = Random::new(13);
    check(case.weights[..2].to_vec(), "got None");
    for (dtype, rows, cols) in [(DType::Q4_0, 3, 32), (DType::Q8_0, 2, 32), (DType::Q8_0, 3, 64)] {
        let mut weights = case.weights.clone();
        weights[1] = weight(&mut random, dtype, rows, cols);
        check(weights, "expected MatrixSpec { dtype: Q8_0, rows: 3, cols: 32 }, got Some(");
    }
}

/// Recording with values of six and of eight columns fails with a message that says `expected`.
fn refused<T>(expected: &str, record: impl FnOnce(&mut GraphBuilder, Value, Value) -> Result<T>) {
    let mut g = GraphBuilder::new();
    let [six, eight] = [6, 8].map(|cols| {
        let table = g.weight("table", MatrixSpec { dtype: DType::F32, rows: 4, cols });
        g.embed(table)
    });
    let error = record(&mut g, six, eight).err().expect(expected).to_string();
    assert!(error.contains(expected), "{error} lacks {expected}");
}

fn vector(g: &mut GraphBuilder, dtype: DType, len: usize) -> WeightId {
    g.weight("vector", MatrixSpec { dtype, rows: 1, cols: len })
}

fn routing(g: &mut GraphBuilder, logits: Value, experts: usize, top_k: usize) -> Result<Routing> {
    g.route(logits, None, Route::softmax(experts, top_k, false))
}

fn matrix(rows: usize, cols: usize) -> MatrixSpec {
    MatrixSpec { dtype: DType::F32, rows, cols }
}

#[test]
fn shapes_that_do_not_fit_are_refused_while_recording() {
    let attention = |heads, kv_heads, head_dim| Attention::grouped(heads, kv_heads, head_dim, 1.0);

    refused("linear: columns of the weight: expected 6, got 5", |g, six, _| {
        let weight = g.weight("w", matrix(3, 5));
        g.linear(six, weight, None, Precision::Fast)
    });
    refused("linear: length of the bias: expected 3, got 4", |g, six, _| {
        let (weight, bias) = (g.weight("w", matrix(3, 6)), vector(g, DType::F32, 4));
        g.linear(six, weight, Some(bias), Precision::Fast)
    });
    refused("linear is not supported for F16", |g, six, _| {
        let (weight, bias) = (g.weight("w", matrix(3, 6)), vector(g, DType::F16, 3));
        g.linear(six, weight, Some(bias), Precision::Fast)
    });
    refused("rms_norm: width left over by groups: expected 0, got 2", |g, six, _| {
        let weight = vector(g, DType::F32, 1);
        g.rms_norm(six, weight, 4, 1e-6)
    });
    refused("rms_norm: length of the weight: expected 3, got 5", |g, six, _| {
        let weight = vector(g, DType::F32, 5);
        g.rms_norm(six, weight, 2, 1e-6)
    });
    refused("rms_norm: length of the weight: expected 6, got 1", |g, six, _| {
        let weight = vector(g, DType::F32, 1);
        g.rms_norm(six, weight, 0, 1e-6)
    });
    let pairs =
        |n| Rope { style: RopeStyle::HalfSplit, inv_freq: vec![1.0; n], magnitude: 1.0, axes: vec![] };
    refused("rope: width left over by heads: expected 0, got 2", |g, six, _| {
        let rotation = g.rotation(pairs(1));
        g.rope(six, 4, rotation)
    });
    refused("rope: rotary width: expected 3, got 4", |g, six, _| {
        let rotation = g.rotation(pairs(2));
        g.rope(six, 2, rotation)
    });
    refused("attention: query heads left over by kv heads", |g, six, eight| {
        g.attention(six, eight, eight, attention(3, 2, 2))
    });
    refused("attention: width of q: expected 8, got 6", |g, six, eight| {
        g.attention(six, eight, eight, attention(4, 4, 2))
    });
    refused("attention: width of k: expected 8, got 6", |g, six, eight| {
        g.attention(eight, six, eight, attention(4, 4, 2))
    });
    refused("attention: width of v: expected 8, got 6", |g, six, eight| {
        g.attention(eight, eight, six, attention(4, 4, 2))
    });
    refused("swiglu: width of up: expected 6, got 8", |g, six, eight| g.swiglu(six, eight));
    refused("add: width of b: expected 8, got 6", |g, six, eight| g.add(eight, six));
    refused("gate: width left over by gates: expected 0, got 6", |g, six, eight| g.sigmoid_gate(six, eight));
    refused("head_scale: width left over by heads: expected 0, got 2", |g, six, _| {
        let four = vector(g, DType::F32, 4);
        g.head_scale(six, 4, four, four)
    });
    refused("head_scale: slopes: expected 3, got 4", |g, six, _| {
        let (three, four) = (vector(g, DType::F32, 3), vector(g, DType::F32, 4));
        g.head_scale(six, 3, three, four)
    });
    refused("slice: width left over by groups", |g, six, _| g.slice(six, 4, 0, 1));
    refused("slice: end of the columns: expected 3, got 4", |g, six, _| g.slice(six, 2, 1, 3));
    refused("slice: end of the columns", |g, six, _| g.slice(six, 2, usize::MAX, 2));
    refused("slice: end of the columns: expected 3, got 1", |g, six, _| g.slice(six, 2, 1, 0));
}

#[test]
fn experts_that_do_not_fit_are_refused_while_recording() {
    let set = |gate, up, down| ExpertSet { layer: 0, experts: 2, gate: Some(gate), up, down };
    refused("route: logits: expected 5, got 6", |g, six, _| routing(g, six, 5, 1));
    refused("route: top_k: expected 6, got 7", |g, six, _| routing(g, six, 6, 7));
    refused("route: top_k: expected 6, got 0", |g, six, _| routing(g, six, 6, 0));
    let grouped = |top_k, count, keep| Route {
        groups: Some(Groups { count, keep, rank: GroupRank::Best }),
        ..Route::softmax(6, top_k, true)
    };
    refused("route: experts left over by groups", |g, six, _| g.route(six, None, grouped(1, 4, 1)));
    refused("route: groups kept: expected 3, got 4", |g, six, _| g.route(six, None, grouped(1, 3, 4)));
    refused("route: groups kept: expected 3, got 0", |g, six, _| g.route(six, None, grouped(1, 3, 0)));
    refused("route: groups kept: expected 0, got 1", |g, six, _| g.route(six, None, grouped(1, 0, 1)));
    refused("route: top_k: expected 4, got 5", |g, six, _| g.route(six, None, grouped(5, 3, 2)));
    refused("route: length of the bias: expected 6, got 5", |g, six, _| {
        let bias = vector(g, DType::F32, 5);
        g.route(six, Some(bias), Route::softmax(6, 1, true))
    });
    refused("expert set: rows of up", |g, _, _| g.expert_set(set(matrix(5, 8), matrix(4, 8), matrix(8, 5))));
    refused("expert set: columns of up", |g, _, _| {
        g.expert_set(set(matrix(5, 8), matrix(5, 7), matrix(8, 5)))
    });
    refused("expert set: columns of down", |g, _, _| {
        g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 6)))
    });
    refused("expert set: rows of down", |g, _, _| {
        g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(6, 5)))
    });
    refused("moe_experts: columns of up: expected 6, got 8", |g, six, eight| {
        let experts = g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 5)))?;
        let routing = routing(g, eight, 8, 2)?;
        g.moe_experts(six, routing, experts)
    });
    refused("moe_experts: experts that the router chooses from: expected 2, got 8", |g, _, eight| {
        let experts = g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 5)))?;
        let routing = routing(g, eight, 8, 2)?;
        g.moe_experts(eight, routing, experts)
    });
    refused("moe_experts: experts that return what they take, weighted there", |g, _, eight| {
        let experts = g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 5)))?;
        let routing = routing(g, eight, 8, 2)?;
        let mlp = ExpertMlp { identities: 6, weighted: Weighted::Input, ..ExpertMlp::default() };
        g.moe_experts_with(eight, routing, experts, mlp)
    });
    refused("moe_experts: weights of the norm: expected 8, got 5", |g, _, eight| {
        let experts = g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 5)))?;
        let two = g.slice(eight, 1, 0, 2)?;
        let routing = routing(g, two, 2, 2)?;
        let norm = Some(OutputNorm { weight: g.weight("norm", matrix(1, 5)), eps: 0.0 });
        g.moe_experts_with(eight, routing, experts, ExpertMlp { norm, ..ExpertMlp::default() })
    });
    refused("moe_experts: experts that return what they take, beside a norm", |g, _, eight| {
        let experts = g.expert_set(set(matrix(5, 8), matrix(5, 8), matrix(8, 5)))?;
        let routing = routing(g, eight, 8, 2)?;
        let norm = Some(OutputNorm { weight: g.weight("norm", matrix(1, 8)), eps: 0.0 });
        g.moe_experts_with(eight, routing, experts, ExpertMlp { identities: 6, norm, ..ExpertMlp::default() })
    });
}
