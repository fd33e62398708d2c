//! Block scales that are no numbers.

use moeflux_compute::backend::Backend;
use moeflux_compute::graph::Precision;
use moeflux_compute::reference::Reference;
use moeflux_compute::{BlockScale, Bytes, DType, Tensor};

use super::case::{Batching, Case, OnDevices, Recorder};
use super::checks::{backends, compile, run};
use super::errors::MODES;
use crate::support::devices::devices;
use crate::support::weights::weight;

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
        let tested = graph.nodes().last().expect("a product").op.clone();
        let batching = Batching::Lengths(&[20, 3, 1]);
        let case = Case {
            name,
            tested,
            dtype,
            graph,
            weights,
            experts: vec![],
            batching,
            on_devices: OnDevices::All,
            f32_only: false,
            poisoned: false,
            axes: false,
            head: true,
        };
        let schedules = batching.schedules();
        let nans = |backend: &dyn Backend, mode| -> Vec<bool> {
            let results = run(&case, &mut *compile(&case, backend, mode), &schedules[0], None);
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
