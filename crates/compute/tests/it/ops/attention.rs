//! Attention of grouped heads.

use moeflux_compute::backend::PAGE_TOKENS;
use moeflux_compute::graph::Attention;

use super::case::{Case, LONG, Recorder, WHOLE};

pub fn attention() -> Vec<Case> {
    let case = |(heads, kv_heads, head_dim, window): (usize, usize, usize, Option<usize>)| {
        let mut r = Recorder::new(8);
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|n| r.input(n * head_dim));
        // Larger than 1/√d, so that some keys matter much more than others.
        let scale = 1.7 / (head_dim as f32).sqrt();
        let shape = Attention { window, ..Attention::grouped(heads, kv_heads, head_dim, scale) };
        let out = r.graph.attention(q, k, v, shape).unwrap();
        let name = format!("{heads}/{kv_heads} heads of {head_dim}, window {window:?}");
        Case { batching: LONG, ..r.case(name, out) }
    };
    let shapes = [
        (1, 1, 1, None),
        (4, 2, 12, None),
        (6, 1, 20, None),
        (3, 3, 16, None),
        (2, 1, 128, None),
        (5, 1, 32, Some(70)),
        (4, 2, 12, Some(1)),
        (4, 2, 12, Some(13)),
        (2, 2, 8, Some(PAGE_TOKENS)),
        (2, 1, 8, Some(PAGE_TOKENS + 1)),
        (2, 1, 8, Some(100_000)),
    ];
    // Heads that some devices have kernels for.
    let more =
        [(2, 1, 64, Some(70)), (1, 1, 256, None), (1, 1, 512, None)].map(|shape| case(shape).in_pairs());
    shapes.into_iter().map(case).chain([two_layers()]).chain(more).collect()
}

/// Layers with keys of their own.
fn two_layers() -> Case {
    let mut r = Recorder::new(9);
    let shape = Attention::grouped(2, 1, 8, 0.3);
    let [q, k, v] = [16, 8, 8].map(|width| r.input(width));
    let first = r.graph.attention(q, k, v, shape).unwrap();
    let [k, v] = [8, 8].map(|width| r.input(width));
    let out = r.graph.attention(first, k, v, shape).unwrap();
    Case { batching: LONG, ..r.case("two layers", out) }
}

pub fn attention_of_chunks() -> Vec<Case> {
    let grouped = Attention::grouped(6, 2, 12, 0.4);
    let shapes = [
        Attention { chunk: Some(1), ..grouped },
        Attention { chunk: Some(7), ..grouped },
        Attention { chunk: Some(PAGE_TOKENS + 1), ..grouped },
        Attention { chunk: Some(50), window: Some(9), ..grouped },
        // Values of another width.
        Attention { value_dim: 5, ..grouped },
        Attention { value_dim: 20, window: Some(30), ..grouped },
        Attention { value_dim: 32, ..Attention::grouped(6, 2, 64, 0.2) },
        // Heads that some devices have kernels for.
        Attention { chunk: Some(PAGE_TOKENS - 1), ..Attention::grouped(4, 2, 64, 0.2) },
        Attention { chunk: Some(PAGE_TOKENS), ..Attention::grouped(2, 1, 128, 0.2) },
    ];
    let case = |shape: Attention| {
        let mut r = Recorder::new(5);
        let [q, k] = [shape.heads, shape.kv_heads].map(|heads| r.input(heads * shape.head_dim));
        let (v, sinks) = (r.input(shape.kv_heads * shape.value_dim), r.vector(shape.heads));
        let out = r.graph.attention_with_sinks(q, k, v, shape, Some(sinks)).unwrap();
        r.case(format!("{shape:?}"), out).in_pairs()
    };
    shapes.map(case).into()
}

/// What a query says for each distance is added to scores.
pub fn attention_by_distance() -> Vec<Case> {
    let grouped = Attention::grouped(6, 2, 12, 0.4);
    let case = |(shape, extent): (Attention, usize)| {
        let mut r = Recorder::new(6);
        let [q, k, v] = [6, 2, 2].map(|heads| r.input(heads * 12));
        let added = r.input(6 * extent);
        let out = r.graph.attention_by_distance([q, k, v], shape, added).unwrap();
        r.case(format!("{extent}, {shape:?}"), out)
    };
    let window = Some(9);
    let mut cases: Vec<Case> =
        [(grouped, 1), (grouped, 7), (Attention { window, ..grouped }, 9)].map(case).into();
    cases.push(case((grouped, PAGE_TOKENS + 5)).in_pairs());
    cases
}

/// Rows see others after them.
pub fn attention_ahead() -> Vec<Case> {
    let case = |(head_dim, window): (usize, Option<usize>)| {
        let mut r = Recorder::new(8);
        let scale = 1.4 / (head_dim as f32).sqrt();
        let shape = Attention { window, ahead: true, ..Attention::grouped(4, 2, head_dim, scale) };
        let [q, k, v] = [4, 2, 2].map(|heads| r.input(heads * head_dim));
        let out = r.graph.attention(q, k, v, shape).unwrap();
        let case = r.case(format!("heads of {head_dim}, window {window:?}"), out);
        Case { batching: WHOLE, ..case }
    };
    // Heads that some devices have kernels for, and others.
    [(12, None), (12, Some(3)), (12, Some(40)), (64, Some(20)), (256, None)].map(case).into()
}

pub fn bidirectional_attention() -> Vec<Case> {
    let case = |(heads, head_dim): (usize, usize)| {
        let mut r = Recorder::new(8);
        let qkv = [(); 3].map(|()| r.input(heads * head_dim));
        let out = r.graph.bidirectional_attention(qkv, heads, 1.7 / (head_dim as f32).sqrt()).unwrap();
        let case = r.case(format!("{heads} heads of {head_dim}"), out);
        Case { batching: WHOLE, ..case }
    };
    [(1, 1), (4, 12), (3, 18), (2, 72)].map(case).into()
}
