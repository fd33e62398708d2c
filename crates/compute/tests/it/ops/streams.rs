//! Residual streams: hyper-connections, gates and means.

use moeflux_compute::graph::{HyperConnection, HyperKind};

use super::case::{Case, Recorder, VOCABULARY};

/// Columns of a stream.
const WIDTH: usize = 6;

pub fn hyper_connections() -> Vec<Case> {
    let mut cases = vec![];
    for (streams, iterations) in [(1, 1), (2, 3), (4, 20)] {
        let shape =
            HyperConnection { streams, norm_eps: 0.01, floor: 1e-3, kind: HyperKind::Mixed { iterations } };
        let mut r = Recorder::new(5);
        let (x, block) = (r.input(streams * WIDTH), r.input(WIDTH));
        let mix = r.input(shape.weights());
        let base = [r.vector(shape.weights()), r.vector(3)];
        let weights = r.graph.hyper_weights(x, mix, base, shape).unwrap();
        let expanded = r.graph.hyper_expand(x, block, weights, streams).unwrap();
        cases.push(r.case(format!("{shape:?}"), expanded).in_pairs());

        let mut r = Recorder::new(5);
        let (x, mix) = (r.input(streams * WIDTH), r.input(shape.weights()));
        let base = [r.vector(shape.weights()), r.vector(3)];
        let weights = r.graph.hyper_weights(x, mix, base, shape).unwrap();
        cases.push(r.case(format!("{shape:?}"), weights).in_pairs());

        let shape = HyperConnection { kind: HyperKind::Collapsed, ..shape };
        let mut r = Recorder::new(5);
        let (x, mix) = (r.input(streams * WIDTH), r.input(streams));
        let base = [r.vector(streams), r.vector(1)];
        let weights = r.graph.hyper_weights(x, mix, base, shape).unwrap();
        let collapsed = r.graph.hyper_collapse(x, weights, streams).unwrap();
        cases.push(r.case(format!("{shape:?}"), collapsed).in_pairs());
    }
    cases
}

pub fn independent_streams() -> Vec<Case> {
    let case = |streams| {
        let kind = HyperKind::Independent { magnitude: 1.7 };
        let shape = HyperConnection { streams, norm_eps: 0.01, floor: 0.1, kind };
        let mut r = Recorder::new(4);
        let (x, block) = (r.input(streams * WIDTH), r.input(WIDTH));
        let mix = r.input(shape.weights());
        let base = [r.vector(shape.weights()), r.vector(2)];
        let weights = r.graph.hyper_weights(x, mix, base, shape).unwrap();
        assert_eq!(weights.width(), 2 * streams);
        let expanded = r.graph.hyper_expand(x, block, weights, streams).unwrap();
        let collapsed = r.graph.hyper_collapse(expanded, weights, streams).unwrap();
        r.case(format!("{shape:?}"), collapsed).in_pairs()
    };
    [1, 2, 4].map(case).into()
}

pub fn mixed_values() -> Vec<Case> {
    let case = |(count, width): (usize, usize)| {
        let mut r = Recorder::new(5);
        let values = (0..count).map(|_| r.input(width)).collect();
        let logits = (0..count).map(|_| r.input(1)).collect();
        let out = r.graph.softmax_mix(values, logits).unwrap();
        r.case(format!("{count} of {width}"), out)
    };
    // Of more than seven, not all values find room beside their logits.
    [(1, 7), (2, 1), (5, 33), (9, 300), (14, 3)].map(case).into()
}

pub fn gated_streams() -> Vec<Case> {
    let mut cases = vec![];
    for streams in [1, 2, 4] {
        let width = 9;
        let mut r = Recorder::new(5);
        let (x, gate) = (r.input(streams * width), r.input(streams * width));
        let out = r.graph.gated_mean(x, gate, streams).unwrap();
        cases.push(r.case(format!("{streams}"), out).in_pairs());

        let mut r = Recorder::new(5);
        let (x, block, logits) = (r.input(streams * width), r.input(width), r.input(streams));
        let out = r.graph.stream_add(x, block, logits).unwrap();
        cases.push(r.case(format!("{streams}"), out).in_pairs());

        let mut r = Recorder::new(5);
        let (keys, queries) = (r.input(streams * width), r.input(streams * width));
        let value = r.input(width);
        let out = r.graph.stream_gate(keys, queries, value).unwrap();
        cases.push(r.case(format!("{streams}"), out).in_pairs());

        // A score of zero has no sign.
        let mut r = Recorder::new(5);
        let table = r.weight(VOCABULARY, streams * width, &vec![0.0; VOCABULARY * streams * width]);
        let (keys, queries, value) = (r.graph.embed(table), r.input(streams * width), r.input(width));
        let out = r.graph.stream_gate(keys, queries, value).unwrap();
        cases.push(r.case(format!("{streams} of nothing"), out).in_pairs());
    }
    cases
}
