//! Operations on single rows.

use moeflux_compute::DType;
use moeflux_compute::backend::Backend;
use moeflux_compute::cpu::{CpuBackend, Simd};
use moeflux_compute::graph::{
    Activation, BlockFloat, Gate, Gelu, Placement, PositionScale, Rope, RopeStyle, Value,
};
use moeflux_compute::reference::layer_norm;

use super::case::{Batching, Case, LONG, Recorder, VOCABULARY, WHOLE};
use super::checks::{assert_same_bits, compile, run_all};
use super::errors::MODES;
use super::linear::columns;
use crate::support::devices::devices;
use crate::support::weights::{codebooks, dtypes};

pub fn embed() -> Vec<Case> {
    let case = |dtype: DType, width: usize| {
        let mut r = Recorder::new(1);
        let table = r.matrix(dtype, VOCABULARY, width);
        let x = r.graph.embed(table);
        // The table has no NaN: another input brings it in.
        let zeros = r.input_of(width, |_| 0.0);
        let out = r.graph.add(x, zeros).unwrap();
        let case = r.case(format!("{dtype} {width}"), out).of("Embed").in_dtype(dtype);
        // Rows of a copy do not meet, and wide ones are multiplied with the identity.
        Case { batching: Batching::Lengths(&[6, 3, 1]), ..case }
    };
    let wide = dtypes().into_iter().map(|dtype| case(dtype, columns(dtype)[1]));
    wide.chain(codebooks().into_iter().map(|dtype| case(dtype, dtype.block_len()))).collect()
}

pub fn norms() -> Vec<Case> {
    let case = |(width, groups, eps): (usize, usize, f32)| {
        let mut r = Recorder::new(5);
        let x = r.input(width);
        let weight = r.vector(width / groups);
        let out = r.graph.rms_norm(x, weight, groups, eps).unwrap();
        r.case(format!("{width} in {groups}, eps {eps}"), out)
    };
    let shapes = [(1, 1, 1e-6), (7, 1, 0.5), (64, 4, 1e-5), (60, 5, 1e-6), (300, 1, 1e-6), (96, 96, 1e-2)];
    let mut cases: Vec<Case> = shapes.into_iter().map(case).collect();
    for scale in [1e-18, 1e17] {
        let mut r = Recorder::new(6);
        let x = r.input_of(48, |random| random.normal() * scale);
        let weight = r.vector(48);
        let out = r.graph.rms_norm(x, weight, 1, 1e-6).unwrap();
        cases.push(r.case(format!("scale {scale}"), out));
    }

    let mut r = Recorder::new(5);
    let x = r.input(24);
    let out = r.graph.unit_norm(x, 3, 0.1).unwrap();
    cases.push(r.case("without weights", out).in_pairs());

    let mut r = Recorder::new(5);
    let (x, weight) = (r.input(12), r.vector(12));
    let out = r.graph.rms_norm(x, weight, 3, 0.1).unwrap();
    cases.push(r.case("weights of each part", out).in_pairs());

    for width in [1, 7, 33] {
        let mut r = Recorder::new(2);
        let (x, weight, bias) = (r.input(width), r.vector(width), r.vector(width));
        let out = r.graph.layer_norm(x, weight, bias, 0.1).unwrap();
        cases.push(r.case(format!("{width}"), out).in_pairs());
    }
    cases
}

pub fn rope() -> Vec<Case> {
    let case = |(style, heads, head_dim, pairs): (RopeStyle, usize, usize, usize)| {
        let mut r = Recorder::new(7);
        let x = r.input(heads * head_dim);
        let inv_freq = (0..pairs).map(|i| 500f32.powf(-(i as f32) / pairs as f32)).collect();
        let rotation = r.graph.rotation(Rope { style, inv_freq, magnitude: 1.25, axes: vec![] });
        let out = r.graph.rope(x, heads, rotation).unwrap();
        let name = format!("{style:?}, {heads} heads of {head_dim}, {pairs} pairs");
        Case { batching: LONG, ..r.case(name, out) }
    };
    let shapes = [
        (RopeStyle::HalfSplit, 3, 16, 8),
        (RopeStyle::HalfSplit, 1, 20, 5),
        (RopeStyle::HalfSplit, 2, 9, 4),
        (RopeStyle::Interleaved, 3, 16, 8),
        (RopeStyle::Interleaved, 2, 20, 6),
        (RopeStyle::Interleaved, 1, 2, 1),
    ];
    let mut cases: Vec<Case> = shapes.into_iter().map(case).collect();
    for (first, inverse, stride) in [(4, false, 1), (0, true, 1), (4, false, 5), (3, true, 7)] {
        for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
            let mut r = Recorder::new(5);
            let x = r.input(30);
            let rope = r.graph.rotation(Rope {
                style,
                inv_freq: vec![0.7, 0.1, 0.01],
                magnitude: 1.3,
                axes: vec![],
            });
            let place = Placement { first, inverse, stride };
            let out = r.graph.placed_rope(x, 3, rope, place).unwrap();
            cases.push(r.case(format!("{style:?}, {place:?}"), out).in_pairs());
        }
    }
    for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
        let mut r = Recorder::new(8);
        let x = r.input(24);
        let inv_freq = vec![0.7, 0.1, 0.03, 0.01];
        let rope = r.graph.rotation(Rope { style, inv_freq, magnitude: 1.3, axes: vec![0, 2, 1, 0] });
        let out = r.graph.rope(x, 3, rope).unwrap();
        let case = r.case(format!("{style:?}, pairs on three axes"), out).in_pairs();
        cases.push(Case { axes: true, ..case });
    }
    cases
}

pub fn position_scale() -> Vec<Case> {
    let scales = [
        PositionScale::steps(0.3, 1, 13),
        PositionScale::steps(0.3, 0, 1),
        PositionScale::power(0.7, 1, 13),
        PositionScale::constant(0.7),
    ];
    let case = |scale| {
        let mut r = Recorder::new(5);
        let x = r.input(10);
        let out = r.graph.position_scale(x, scale);
        r.case(format!("{scale:?}"), out).in_pairs()
    };
    let of_outputs = |scale| {
        let mut r = Recorder::new(5);
        let x = r.input(10);
        let rows = r.graph.gather_rows(x);
        let out = r.graph.position_scale(rows, scale);
        r.case_of_outputs(format!("{scale:?} of outputs"), out)
    };
    let some = [scales[0], scales[3]];
    scales.map(case).into_iter().chain(some.map(of_outputs)).collect()
}

pub fn head_scale() -> Vec<Case> {
    let case = |(heads, width)| {
        let mut r = Recorder::new(5);
        let (x, base, slope) = (r.input(width), r.vector(heads), r.vector(heads));
        let out = r.graph.head_scale(x, heads, base, slope).unwrap();
        r.case(format!("{heads} heads of {width}"), out).in_pairs()
    };
    [(1, 1), (3, 12), (5, 320)].map(case).into()
}

/// A case of two inputs, the first of which is large.
fn of_two(width: usize, record: impl FnOnce(&mut Recorder, Value, Value) -> Value) -> Case {
    let mut r = Recorder::new(10);
    let (a, b) = (r.input_of(width, |random| random.normal() * 6.0), r.input(width));
    let out = record(&mut r, a, b);
    r.case(format!("{width}"), out)
}

pub fn elementwise() -> Vec<Case> {
    let cases = |width| {
        [
            of_two(width, |r, a, b| r.graph.swiglu(a, b).unwrap()),
            of_two(width, |r, a, b| r.graph.add(a, b).unwrap()),
            of_two(width, |r, a, _| r.graph.clamp(a, 1.5)),
            of_two(width, |r, a, b| r.graph.sigmoid_gate(b, a).unwrap()),
            of_two(width, |r, a, b| r.graph.gate(b, a, Gate::Softplus).unwrap()),
            of_two(width, |_, a, _| a).of("GatherRows"),
        ]
    };
    let mut cases: Vec<Case> = [1, 37, 500].into_iter().flat_map(cases).collect();
    for (parts, each) in [(1, 37), (4, 10), (3, 33)] {
        for function in [Gate::Sigmoid, Gate::Softplus] {
            let mut r = Recorder::new(14);
            let (x, gate) = (r.input(parts * each), r.input(parts));
            let out = r.graph.gate(x, gate, function).unwrap();
            cases.push(r.case(format!("{parts} parts of {each}, {function:?}"), out));
        }
    }
    let mut r = Recorder::new(5);
    let x = r.input(13);
    let out = r.graph.scaled_silu(x, 0.25);
    cases.push(r.case("13", out).in_pairs());
    cases
}

pub fn activations() -> Vec<Case> {
    let clamped = Activation::ClampedSwiGlu { alpha: 1.7, limit: 0.7 };
    let capped = |limit| Activation::CappedSwiGlu { limit };
    let gated = [
        (21, Activation::LimitedSwiGlu { limit: 0.7 }),
        (1, clamped),
        (7, clamped),
        (33, clamped),
        (1, capped(0.4)),
        (37, capped(0.4)),
        (500, capped(1.3)),
        (1, Activation::GeGlu),
        (37, Activation::GeGlu),
        (500, Activation::GeGlu),
        (37, Activation::Bilinear),
    ];
    let mut cases = vec![];
    for (width, activation) in gated {
        let mut r = Recorder::new(3);
        let (gate, up) = (r.input(width), r.input(width));
        let out = r.graph.activate(activation, Some(gate), up).unwrap();
        cases.push(r.case(format!("{width}, {activation:?}"), out).in_pairs());
    }
    for width in [1, 37, 500] {
        let mut r = Recorder::new(5);
        let x = r.input(width);
        let out = r.graph.squared_relu(x);
        cases.push(r.case(format!("{width}, squared ReLU"), out).in_pairs());
    }
    cases
}

pub fn situ_activations() -> Vec<Case> {
    let case = |(width, beta, linear_beta)| {
        let activation = Activation::SituGlu { beta, linear_beta };
        let mut r = Recorder::new(4);
        let gate = r.input_of(width, |random| random.normal() * 4.0);
        let up = r.input_of(width, |random| random.normal() * 4.0);
        let out = r.graph.activate(activation, Some(gate), up).unwrap();
        r.case(format!("{width}, {activation:?}"), out)
    };
    [(1, 4.0, None), (37, 0.5, Some(2.5)), (500, 4.0, Some(25.0))].map(case).into()
}

/// Where experts are computed may not show.
#[test]
fn activations_have_the_same_bits_on_the_processor_and_on_devices() {
    let situ = |linear_beta| Activation::SituGlu { beta: 3.0, linear_beta };
    let limit = 0.7;
    for activation in [
        Activation::SwiGlu,
        Activation::LimitedSwiGlu { limit },
        Activation::ClampedSwiGlu { alpha: 1.7, limit },
        Activation::CappedSwiGlu { limit },
        Activation::GeGlu,
        Activation::Bilinear,
        situ(Some(7.0)),
        situ(None),
    ] {
        let mut r = Recorder::new(4);
        let [gate, up] = [(); 2].map(|()| r.input_of(500, |random| (random.normal() * 4.0).exp2()));
        let signs = r.input(500);
        let [gate, up] = [gate, up].map(|value| r.graph.product(value, signs).unwrap());
        let out = r.graph.activate(activation, Some(gate), up).unwrap();
        let case = r.case(format!("{activation:?}"), out);
        let schedule = &case.batching.schedules()[0];
        let all = |backend: &dyn Backend| run_all(&case, &mut *compile(&case, backend, MODES[0]), schedule);
        let expected = all(&CpuBackend::with_simd(1, Simd::detect()));
        for (name, device) in devices() {
            assert_same_bits(&all(&device(1)), &expected, &format!("{activation:?} on {name}"));
        }
    }
}

pub fn rounded_blocks() -> Vec<Case> {
    let mut cases = vec![];
    for form in [BlockFloat::E4m3, BlockFloat::E2m1, BlockFloat::E2m1ByE4m3] {
        for (blocks, block, size) in [(1, 1, 1.0), (3, 32, 0.01), (2, 16, 30.0), (1, 7, 5e6)] {
            let mut r = Recorder::new(4);
            // Halves of steps too, and zeros.
            let x = r.input_of(blocks * block, |random| (random.normal() * 8.0).round() * size);
            let out = r.graph.round_blocks(x, block, form).unwrap();
            cases.push(r.case(format!("{blocks} of {block}, {size}, {form:?}"), out));
        }
    }
    cases
}

pub fn gelus() -> Vec<Case> {
    let case = |(width, form): (usize, Gelu)| {
        let mut r = Recorder::new(4);
        let x = r.input_of(width, |random| random.normal() * 4.0);
        let out = r.graph.gelu(x, form);
        r.case(format!("{width}, {form:?}"), out)
    };
    [1, 37, 500].into_iter().flat_map(|width| [(width, Gelu::Erf), (width, Gelu::Tanh)]).map(case).collect()
}

/// What stands for some tokens comes with the batch.
pub fn given_embeddings() -> Vec<Case> {
    let case = |width: usize| {
        let mut r = Recorder::new(15);
        let table = r.matrix(DType::F32, VOCABULARY, width);
        let x = r.graph.embed(table);
        let x = r.graph.given_embeddings(x, 0);
        let out = r.graph.given_embeddings(x, 1);
        r.case(format!("{width}"), out).without_poison()
    };
    [1, 7, 40].map(case).into()
}

pub fn blocks_of_rows() -> Vec<Case> {
    let case = |(width, rows): (usize, usize)| {
        let mut r = Recorder::new(15);
        let x = r.input(width);
        let out = r.graph.block_rows(x, rows);
        assert_eq!(out.width(), rows * width);
        Case { batching: WHOLE, ..r.case(format!("{rows} of {width}"), out) }
    };
    [(1, 1), (7, 4), (33, 3)].map(case).into()
}

pub fn standardized() -> Vec<Case> {
    let case = |width: usize| {
        let mut r = Recorder::new(15);
        let (x, mean, scale) = (r.input(width), r.vector(width), r.vector(width));
        let out = r.graph.standardize(x, mean, scale).unwrap();
        r.case(format!("{width}"), out)
    };
    [1, 7, 500].map(case).into()
}

pub fn limits_of_two_sizes() -> Vec<Case> {
    let case = |(width, limits): (usize, [f32; 2])| {
        let mut r = Recorder::new(15);
        let x = r.input(width);
        let out = r.graph.clamp_between(x, limits);
        r.case(format!("{width} within {limits:?}"), out)
    };
    [(7, [-0.5, 1.0]), (40, [f32::NEG_INFINITY, 0.25]), (3, [0.1, f32::INFINITY])].map(case).into()
}

pub fn parts_of_rows() -> Vec<Case> {
    let case = |(width, groups, start, len): (usize, usize, usize, usize)| {
        let mut r = Recorder::new(15);
        let x = r.input(width);
        // The poisoned column may lie outside the slice.
        let zeros = r.input_of(groups * len, |_| 0.0);
        let part = r.graph.slice(x, groups, start, len).unwrap();
        assert_eq!(part.width(), groups * len);
        let out = r.graph.add(part, zeros).unwrap();
        r.case(format!("{start}..+{len} of each of {groups} in {width}"), out).of("Slice")
    };
    let shapes =
        [(24, 1, 0, 24), (24, 4, 0, 3), (24, 4, 3, 3), (21, 3, 5, 2), (17, 1, 16, 1), (500, 2, 10, 200)];
    let mut cases: Vec<Case> = shapes.into_iter().map(case).collect();
    let mut r = Recorder::new(5);
    let x = r.input(5);
    let out = r.graph.repeat(x, 3);
    cases.push(r.case("5, three times", out).in_pairs());
    cases
}

pub fn joined_rows() -> Vec<Case> {
    let mut cases = vec![];
    for (left, right) in [(1, 1), (7, 5), (32, 40)] {
        let mut r = Recorder::new(15);
        let x = r.input(left);
        let given = r.graph.input_rows(right);
        let out = r.graph.join(x, given);
        assert_eq!(out.width(), left + right);
        cases.push(r.case(format!("{left} beside {right}"), out));
        let mut r = Recorder::new(15);
        let (a, b) = (r.input(left), r.input(right));
        let out = r.graph.join(a, b);
        cases.push(r.case(format!("{left} beside {right}, of embeddings"), out));
    }
    let mut r = Recorder::new(15);
    let out = r.graph.input_rows(9);
    cases.push(r.case("9", out).without_poison());
    cases
}

#[test]
fn formulas_of_the_reference() {
    let mut x = [1.0, 3.0];
    layer_norm(&mut x, &[2.0, 4.0], &[0.5, 0.25], 0.0);
    assert_eq!(x, [-1.5, 4.25]);
    assert!((PositionScale::power(0.5, 1, 3).at(8) - 2.0).abs() < 1e-6);
    assert!((PositionScale::steps(0.1, 1, 4).at(8) - 1.10986).abs() < 1e-5);
}
