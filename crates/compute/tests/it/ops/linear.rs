//! Linear layers.

use moeflux_compute::graph::Precision;
use moeflux_compute::{DType, Half};

use super::case::{Case, Recorder};
use crate::support::weights::{affine, dtypes};

/// Row lengths for an encoding: one block, and several that are no multiple of 256.
pub fn columns(dtype: DType) -> [usize; 2] {
    match dtype.block_len() {
        1 => [5, 83],
        n => [n, 3 * n],
    }
}

/// A linear layer on normal inputs.
pub fn linear_case(dtype: DType, rows: usize, cols: usize, bias: bool, precision: Precision) -> Case {
    let mut r = Recorder::new(rows as u64 * 1000 + cols as u64);
    let x = r.input(cols);
    let weight = r.matrix(dtype, rows, cols);
    let bias = bias.then(|| r.vector(rows));
    let out = r.graph.linear(x, weight, bias, precision).unwrap();
    r.case(format!("{dtype} {rows}×{cols}, {precision:?}, bias {bias:?}"), out).in_dtype(dtype)
}

pub fn linear() -> Vec<Case> {
    let cases = |dtype| {
        let [short, long] = columns(dtype);
        [
            linear_case(dtype, 1, long, true, Precision::Fast),
            linear_case(dtype, 67, short, false, Precision::Fast),
            linear_case(dtype, 33, long, true, Precision::F32),
        ]
    };
    // Rows as wide as kernels take them, and beyond.
    let wide = [(DType::Q4_K, 5, 12288), (DType::Q8_0, 3, 24576), (DType::Q6_K, 2, 24832)];
    let wide = wide.map(|(dtype, rows, cols)| linear_case(dtype, rows, cols, true, Precision::Fast));
    // So many that each is a warp's, in what has no kernels of its own.
    let many = linear_case(DType::Q4_1, 515, 64, true, Precision::F32);
    dtypes().into_iter().flat_map(cases).chain(wide).chain([many]).collect()
}

pub fn linear_of_an_input() -> Vec<Case> {
    let mut r = Recorder::new(4);
    let x = r.input(96);
    // All before the first addition: layers that follow each other run as one.
    let dtypes = [DType::Q8_0, DType::F32, DType::Q4_0, affine(4, 32, Half::F16)];
    let layers = dtypes.map(|dtype| {
        let (weight, bias) = (r.matrix(dtype, 45, 96), r.vector(45));
        r.graph.linear(x, weight, Some(bias), Precision::Fast).unwrap()
    });
    let out = layers.into_iter().reduce(|sum, layer| r.graph.add(sum, layer).unwrap()).unwrap();
    let mut cases = vec![r.case("shared input", out).of("Linear").in_dtype(DType::Q8_0)];

    for (rows, cap) in [(1, 0.5), (37, 1.3), (301, 30.0)] {
        let mut r = Recorder::new(6);
        let x = r.input(24);
        let (weight, bias) = (r.matrix(DType::F32, rows, 24), r.vector(rows));
        let out = r.graph.capped_linear(x, weight, Some(bias), Precision::Fast, cap).unwrap();
        cases.push(r.case(format!("{rows} outputs capped at {cap}"), out).of("Linear"));
    }
    cases
}

pub fn linear_in_groups() -> Vec<Case> {
    let case = |(dtype, groups, each, cols)| {
        let mut r = Recorder::new(5);
        let x = r.input(groups * cols);
        let weight = r.matrix(dtype, groups * each, cols);
        let out = r.graph.grouped_linear(x, weight, groups, Precision::Fast).unwrap();
        r.case(format!("{groups} groups of {each} × {cols}, {dtype}"), out).in_dtype(dtype).in_pairs()
    };
    let small =
        [(DType::F32, 3, 7, 10), (DType::F32, 1, 5, 3), (DType::F32, 2, 64, 32), (DType::Q8_0, 2, 30, 96)];
    // Rows as long as a warp reads at once, and longer.
    let published = [(DType::BF16, 8, 200, 512), (DType::Q8_0, 3, 64, 1056), (DType::Q4_K, 4, 192, 4096)];
    small.map(case).into_iter().chain(published.map(|shape| case(shape).on_hardware())).collect()
}
