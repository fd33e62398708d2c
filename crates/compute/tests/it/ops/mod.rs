//! Every operation × encoding × backend against `reference`, and what does not depend on the batch.
//!
//! A [`Case`] is a tiny graph around one operation. Its inputs are embeddings of float tables, so that a token's inputs
//! depend on its id alone; its result leaves through an exact identity matrix. Each case runs under several schedules
//! (whole sequences alone or together, in other orders, in pieces, token by token). One schedule is compared with the
//! reference, the others with it bit for bit.

mod batches;
mod case;
pub(crate) mod checks;
mod experts;
mod refusals;

use std::process::Command;

use moeflux_compute::backend::{Backend, PAGE_TOKENS};
use moeflux_compute::graph::{Attention, Precision, Rope, RopeStyle};
use moeflux_compute::reference::Reference;
use moeflux_compute::{BlockScale, Bytes, DType, Half, Tensor};

use crate::support::devices::devices;
use crate::support::weights::{affine, codebooks, dtypes, weight};
use case::{Case, LONG, MODES, Recorder, Tested, VOCABULARY};
use checks::{backends, check, compile, run, schedules};

/// Row lengths for an encoding: one block, and several that are no multiple of 256.
fn columns(dtype: DType) -> [usize; 2] {
    match dtype.block_len() {
        1 => [5, 83],
        n => [n, 3 * n],
    }
}

/// Passes if the devices to be tested are here; the test below runs it alone.
#[test]
fn what_is_to_be_tested_is_here() {
    crate::support::devices::devices();
}

#[test]
fn a_backend_that_is_not_here_passes_no_test() {
    let passes = |only: &str| {
        let mut tests = Command::new(std::env::current_exe().unwrap());
        let output =
            tests.arg("what_is_to_be_tested_is_here").env("MOEFLUX_TEST_ONLY", only).output().unwrap();
        output.status.success() && String::from_utf8_lossy(&output.stdout).contains("1 passed")
    };
    assert!(passes("CPU") && passes("the emulator"));
    assert!(!passes("cuda") && !passes(""));
    #[cfg(target_os = "linux")]
    assert_eq!(passes("CUDA"), moeflux_compute::gpu::cuda::Cuda::open(0, None).is_ok());
}

#[test]
fn embed() {
    let case = |dtype: DType, width: usize| {
        let mut r = Recorder::new(1);
        let table = r.matrix(dtype, VOCABULARY, width);
        let x = r.graph.embed(table);
        // The table has no NaN: another input brings it in.
        let zeros = r.input_of(width, |_| 0.0);
        let out = r.graph.add(x, zeros).unwrap();
        // Rows of a copy do not meet, and wide ones are multiplied with the identity.
        Case { lengths: &[6, 3, 1], ..r.case(format!("{dtype} {width}"), Tested::Embed, dtype, out) }
    };
    check(dtypes().into_iter().map(|dtype| case(dtype, columns(dtype)[1])));
    check(codebooks().into_iter().map(|dtype| case(dtype, dtype.block_len())));
}

/// Recorder and value of a linear layer on normal inputs.
fn linear_case(dtype: DType, rows: usize, cols: usize, bias: bool, precision: Precision) -> Case {
    let mut r = Recorder::new(rows as u64 * 1000 + cols as u64);
    let x = r.input(cols);
    let weight = r.matrix(dtype, rows, cols);
    let bias = bias.then(|| r.vector(rows));
    let out = r.graph.linear(x, weight, bias, precision).unwrap();
    let tested = if precision == Precision::F32 { Tested::LinearF32 } else { Tested::Linear };
    r.case(format!("{dtype} {rows}×{cols}, bias {bias:?}"), tested, dtype, out)
}

#[test]
fn linear() {
    check(dtypes().into_iter().flat_map(|dtype| {
        let [short, long] = columns(dtype);
        [
            linear_case(dtype, 1, long, true, Precision::Fast),
            linear_case(dtype, 67, short, false, Precision::Fast),
            linear_case(dtype, 33, long, true, Precision::F32),
        ]
    }));
}

/// Code 255 of a power of two is NaN, and so are results where the reference's are: not infinite, which a softmax or a
/// sigmoid after it would make a number again.
#[test]
fn scales_that_are_no_numbers_are_seen() {
    let scale = BlockScale::E8M0;
    for dtype in [DType::MXFP4, DType::MXFP4_Planes, DType::Fp8 { scale }, DType::Fp8_Whole { scale }] {
        let mut r = Recorder::new(16);
        // All of one sign, so that products are infinite where they are not NaN.
        let x = r.input_of(64, |random| 1.0 + random.uniform());
        let (scales, at) = if dtype.planes() > 1 { (1, 0) } else { (0, 0) };
        let tensor = weight(&mut r.random, dtype, 5, 64);
        let mut planes: Vec<Vec<u8>> =
            (0..dtype.planes()).map(|plane| tensor.view().plane(plane).to_vec()).collect();
        planes[scales][at] = 255;
        let planes = planes.into_iter().map(Bytes::new).collect();
        let spoilt = r.declare(Tensor::new(dtype, 5, 64, planes).unwrap());
        let rows = r.graph.gather_rows(x);
        let logits = r.graph.linear(rows, spoilt, None, Precision::Fast).unwrap();
        let (graph, weights) = (r.graph.finish(logits), r.weights);
        let name = format!("{dtype} with a scale that is no number");
        let tested = Tested::Linear;
        let case = Case { name, tested, dtype, graph, weights, experts: vec![], lengths: &[20, 3, 1] };
        let schedules = schedules(case.lengths);
        let nans = |backend: &dyn Backend, mode| -> Vec<bool> {
            let results = run(&case, &mut *compile(&case, backend, mode), &schedules[0], None, 1);
            results.values().flatten().map(|v| v.is_nan()).collect()
        };
        let expected = nans(&Reference, MODES[0]);
        assert!(expected.contains(&true) && (dtype.block_len() == 1 || expected.contains(&false)));
        for mode in MODES {
            for level in backends() {
                assert!(nans(&level.one, mode) == expected, "{dtype} {mode:?} on {}", level.one.describe());
            }
            for (device, make) in devices() {
                assert!(nans(&make(1), mode) == expected, "{dtype} {mode:?} on {device}");
            }
        }
    }
}

#[test]
fn linear_layers_that_share_an_input() {
    let mut r = Recorder::new(4);
    let x = r.input(96);
    // All before the first addition: layers that follow each other run as one.
    let dtypes = [DType::Q8_0, DType::F32, DType::Q4_0, affine(4, 32, Half::F16)];
    let layers = dtypes.map(|dtype| {
        let (weight, bias) = (r.matrix(dtype, 45, 96), r.vector(45));
        r.graph.linear(x, weight, Some(bias), Precision::Fast).unwrap()
    });
    let out = layers.into_iter().reduce(|sum, layer| r.graph.add(sum, layer).unwrap()).unwrap();
    check([r.case("shared input".into(), Tested::Linear, DType::Q8_0, out)]);
}

#[test]
fn rms_norm() {
    let case = |(width, groups, eps): (usize, usize, f32)| {
        let mut r = Recorder::new(5);
        let x = r.input(width);
        let weight = r.vector(width / groups);
        let out = r.graph.rms_norm(x, weight, groups, eps).unwrap();
        r.case(format!("{width} in {groups}, eps {eps}"), Tested::RmsNorm, DType::F32, out)
    };
    let shapes = [(1, 1, 1e-6), (7, 1, 0.5), (64, 4, 1e-5), (60, 5, 1e-6), (300, 1, 1e-6), (96, 96, 1e-2)];
    check(shapes.into_iter().map(case));
}

#[test]
fn rms_norm_of_tiny_and_huge_rows() {
    for scale in [1e-18, 1e17] {
        let mut r = Recorder::new(6);
        let x = r.input_of(48, |random| random.normal() * scale);
        let weight = r.vector(48);
        let out = r.graph.rms_norm(x, weight, 1, 1e-6).unwrap();
        check([r.case(format!("scale {scale}"), Tested::RmsNorm, DType::F32, out)]);
    }
}

#[test]
fn rope() {
    let case = |(style, heads, head_dim, pairs): (RopeStyle, usize, usize, usize)| {
        let mut r = Recorder::new(7);
        let x = r.input(heads * head_dim);
        let inv_freq = (0..pairs).map(|i| 500f32.powf(-(i as f32) / pairs as f32)).collect();
        let rotation = r.graph.rotation(Rope { style, inv_freq, magnitude: 1.25 });
        let out = r.graph.rope(x, heads, rotation).unwrap();
        let name = format!("{style:?}, {heads} heads of {head_dim}, {pairs} pairs");
        Case { lengths: LONG, ..r.case(name, Tested::Rope, DType::F32, out) }
    };
    let shapes = [
        (RopeStyle::HalfSplit, 3, 16, 8),
        (RopeStyle::HalfSplit, 1, 20, 5),
        (RopeStyle::HalfSplit, 2, 9, 4),
        (RopeStyle::Interleaved, 3, 16, 8),
        (RopeStyle::Interleaved, 2, 20, 6),
        (RopeStyle::Interleaved, 1, 2, 1),
    ];
    check(shapes.into_iter().map(case));
}

#[test]
fn attention() {
    let case = |(heads, kv_heads, head_dim, window): (usize, usize, usize, Option<usize>)| {
        let mut r = Recorder::new(8);
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|n| r.input(n * head_dim));
        // Larger than 1/√d, so that some keys matter much more than others.
        let scale = 1.7 / (head_dim as f32).sqrt();
        let shape = Attention { window, ..Attention::grouped(heads, kv_heads, head_dim, scale) };
        let out = r.graph.attention(q, k, v, shape).unwrap();
        let name = format!("{heads}/{kv_heads} heads of {head_dim}, window {window:?}");
        Case { lengths: LONG, ..r.case(name, Tested::Attention, DType::F32, out) }
    };
    let shapes = [
        (1, 1, 1, None),
        (4, 2, 12, None),
        (6, 1, 20, None),
        (3, 3, 16, None),
        (2, 1, 128, None),
        (4, 2, 12, Some(1)),
        (4, 2, 12, Some(13)),
        (2, 2, 8, Some(PAGE_TOKENS)),
        (2, 1, 8, Some(PAGE_TOKENS + 1)),
        (2, 1, 8, Some(100_000)),
    ];
    check(shapes.into_iter().map(case));
}

#[test]
fn two_attention_layers_keep_their_own_keys() {
    let mut r = Recorder::new(9);
    let shape = Attention::grouped(2, 1, 8, 0.3);
    let [q, k, v] = [16, 8, 8].map(|width| r.input(width));
    let first = r.graph.attention(q, k, v, shape).unwrap();
    let [k, v] = [8, 8].map(|width| r.input(width));
    let out = r.graph.attention(first, k, v, shape).unwrap();
    check([Case { lengths: LONG, ..r.case("two layers".into(), Tested::Attention, DType::F32, out) }]);
}

#[test]
fn elementwise() {
    let case = |(tested, width): (Tested, usize)| {
        let mut r = Recorder::new(10);
        let (a, b) = (r.input_of(width, |random| random.normal() * 6.0), r.input(width));
        let out = match tested {
            Tested::SwiGlu => r.graph.swiglu(a, b).unwrap(),
            Tested::Add => r.graph.add(a, b).unwrap(),
            Tested::Clamp => r.graph.clamp(a, 1.5),
            Tested::SigmoidGate => r.graph.sigmoid_gate(b, a).unwrap(),
            _ => a,
        };
        r.case(format!("{width}"), tested, DType::F32, out)
    };
    let all = [Tested::SwiGlu, Tested::Add, Tested::Clamp, Tested::SigmoidGate, Tested::GatherRows];
    check(all.into_iter().flat_map(|tested| [1, 37, 500].map(|width| case((tested, width)))));
}

#[test]
fn sigmoid_gates_of_parts_of_a_row() {
    let case = |(parts, each): (usize, usize)| {
        let mut r = Recorder::new(14);
        let (x, gate) = (r.input(parts * each), r.input(parts));
        let out = r.graph.sigmoid_gate(x, gate).unwrap();
        r.case(format!("{parts} parts of {each}"), Tested::SigmoidGate, DType::F32, out)
    };
    check([(1, 37), (4, 10), (3, 33)].map(case));
}

#[test]
fn slice() {
    let case = |(width, groups, start, len): (usize, usize, usize, usize)| {
        let mut r = Recorder::new(15);
        let x = r.input(width);
        // The poisoned column may lie outside the slice.
        let zeros = r.input_of(groups * len, |_| 0.0);
        let part = r.graph.slice(x, groups, start, len).unwrap();
        assert_eq!(part.width(), groups * len);
        let out = r.graph.add(part, zeros).unwrap();
        let name = format!("{start}..+{len} of each of {groups} in {width}");
        r.case(name, Tested::Slice, DType::F32, out)
    };
    let shapes =
        [(24, 1, 0, 24), (24, 4, 0, 3), (24, 4, 3, 3), (21, 3, 5, 2), (17, 1, 16, 1), (500, 2, 10, 200)];
    check(shapes.into_iter().map(case));
}
