//! The emulated device runs kernels as a GPU would, and reports their faults: copies of kernels with a planted fault
//! must each be caught.

use moeflux_compute::backend::{Backend, CompileOptions};
use moeflux_compute::gpu::emulator::Emulator;
use moeflux_compute::gpu::{BufferId, Device, Dispatch, GpuBackend, GpuOptions, Grid, Order, constants};
use moeflux_compute::graph::{GraphBuilder, MatrixSpec, Precision};
use moeflux_compute::{DType, Result, Tensor, reference};

/// A dispatch with what is in its buffers.
struct Run {
    dispatch: Dispatch,
    /// What each buffer holds; the last is the result, which a second dispatch reads.
    inputs: Vec<Vec<u8>>,
    result: usize,
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn wave(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i as f32 * 0.37).sin()).collect()
}

impl Run {
    fn new(unit: &'static str, kernel: &'static str, inputs: Vec<Vec<u8>>, result: usize) -> Self {
        let dispatch = Dispatch {
            unit,
            kernel: kernel.into(),
            buffers: vec![],
            constants: vec![],
            grid: Grid::Fixed([1, 1, 1]),
            threads: 32,
            shared: 0,
            cluster: 1,
            order: Order::After,
        };
        Self { dispatch, inputs, result }
    }

    fn with(mut self, constants: Vec<u8>, grid: [u32; 3], threads: u32) -> Self {
        (self.dispatch.constants, self.dispatch.grid, self.dispatch.threads) =
            (constants, Grid::Fixed(grid), threads);
        self
    }

    /// The result, added to zeros by another kernel, so that what was not written shows. A kernel before it writes the
    /// first columns of the second input once more, which ends while this one is ahead.
    fn on(&self, mut device: Emulator) -> Result<Vec<f32>> {
        let mut dispatch = self.dispatch.clone();
        for input in &self.inputs {
            let buffer = device.alloc(input.len())?;
            device.upload(buffer.into(), input)?;
            dispatch.buffers.push(buffer.into());
        }
        let alloc = |device: &mut Emulator| device.alloc(self.result * 4);
        let (result, sum): (BufferId, BufferId) = (alloc(&mut device)?, alloc(&mut device)?);
        let zeros = alloc(&mut device)?;
        device.clear(zeros.into(), self.result * 4)?;
        dispatch.buffers.push(result.into());
        let add = Dispatch {
            unit: "elementwise",
            kernel: "add".into(),
            buffers: vec![result.into(), zeros.into(), sum.into()],
            constants: constants(&[&self.result, &0.0f32, &1u32]),
            grid: Grid::Fixed([self.result.div_ceil(256) as u32, 1, 1]),
            threads: 256,
            shared: 0,
            cluster: 1,
            order: Order::After,
        };
        let again = self.dispatch.kernel.starts_with("product").then(|| Dispatch {
            buffers: vec![dispatch.buffers[1], zeros.into(), dispatch.buffers[1]],
            ..add.clone()
        });
        device.run(&again.into_iter().chain([dispatch, add]).collect::<Vec<_>>())?;
        let mut out = vec![0; self.result * 4];
        device.download(sum.into(), &mut out)?;
        Ok(out.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }
}

fn norm() -> Run {
    let inputs = vec![bytes(&wave(3 * 300)), bytes(&wave(300))];
    Run::new("rms_norm", "rms_norm", inputs, 3 * 300).with(
        constants(&[&300u32, &1e-6f32, &1u32]),
        [3, 1, 1],
        128,
    )
}

fn add() -> Run {
    let inputs = vec![bytes(&wave(100)), bytes(&wave(100))];
    Run::new("elementwise", "add", inputs, 100).with(constants(&[&100u32, &0.0f32, &1u32]), [1, 1, 1], 256)
}

fn gather() -> Run {
    let rows: Vec<u8> = [2u32, 0].iter().flat_map(|row| row.to_le_bytes()).collect();
    Run::new("rows", "gather_rows", vec![bytes(&wave(3 * 40)), rows], 80).with(
        constants(&[&40u32]),
        [2, 1, 1],
        32,
    )
}

/// 20 tokens by 70 rows of 40 columns.
fn matmul() -> Run {
    let (weight, none) = (bytes(&wave(70 * 40)), bytes(&[0.0]));
    let inputs = vec![weight, none.clone(), none.clone(), bytes(&wave(20 * 40)), none.clone(), none];
    let format: [u32; 5] = [1, 40, 160, 0, 0];
    let words = constants(&[&format, &70u32, &20u32, &false, &false]);
    Run::new("linear", "matmul_any", inputs, 20 * 70).with(words, [2, 1, 1], 256)
}

/// The same by Metal's kernel.
fn simdgroup_matmul() -> Run {
    let mut run = matmul();
    (run.dispatch.unit, run.dispatch.kernel) = ("metal/gemm", "simdgroup_matmul_f32".into());
    run
}

/// One token by 3 rows of 32 columns, without a norm.
fn product() -> Run {
    let inputs = vec![bytes(&wave(3 * 32)), bytes(&wave(32)), bytes(&[0.0])];
    let part: [u32; 12] = [1, 32, 128, 0, 0, 0, 0, 0, u32::MAX, 3, 3, 1];
    let words = constants(&[&part, &false, &0.0f32, &u32::MAX, &false]);
    Run::new("few_rows", "product_f32", inputs, 3).with(words, [3, 1, 1], 128)
}

/// Two tokens of one head of 40 × 64; the state is in front of the result.
fn delta_rule() -> Run {
    let sequence: Vec<u8> = [0u32, 2, 0, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    let [keys, values, head] = [wave(80), wave(128), wave(2)].map(|v| bytes(&v));
    let state = vec![0; 40 * 64 * 4];
    let one = bytes(&[-0.5]);
    let inputs = vec![keys.clone(), keys, values, head.clone(), head, one.clone(), one, sequence, state];
    let words = constants(&[&1u32, &1u32, &40u32, &64u32, &false, &1e-6f32, &false, &0.0f32]);
    Run::new("delta_rule", "gated_delta_rule_8", inputs, 128).with(words, [2, 1, 1], 128)
}

/// Two tokens of two streams of 8.
fn hyper_weights() -> Run {
    let inputs = vec![bytes(&wave(32)), bytes(&wave(16)), bytes(&wave(8)), bytes(&wave(3))];
    let words = constants(&[&2u32, &16u32, &1e-6f32, &1e-3f32, &3u32, &2u32, &0.0f32]);
    Run::new("streams", "hyper_weights", inputs, 16).with(words, [2, 1, 1], 256)
}

/// A token at position 69 of two heads of 8, which sees entries of four tokens each.
fn entries() -> Run {
    let words = |values: &[u32]| values.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let page = 64 * 8 + 16 * 8;
    let cache = bytes(&wave(2 * page as usize));
    let inputs = vec![
        bytes(&wave(16)),
        cache,
        words(&[0]),
        words(&[69, 0]),
        words(&[1, 0]),
        bytes(&[0.3, -0.2]),
        bytes(&[0.0]),
    ];
    let layout: [u32; 5] = [page, 8, 8, 4, 1];
    let constants = constants(&[&layout, &[2u32, 1, 1, 8], &0.3f32, &[5u32, 0, 0, 1], &true]);
    Run::new("compressed", "attend_entries", inputs, 16).with(constants, [1, 1, 1], 128)
}

/// A token and the one before it choose rows of two heads of a table of 11 rows of 8.
fn ngrams() -> Run {
    let words = |values: &[u32]| values.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<u8>>();
    let numbers: [u64; 6] = [3, 5, 4, 7, 0, 4];
    let numbers = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
    let parts = words(&[0, 0, 0, 0, 0, 11, 0, 0, 0, 0]);
    let (table, none) = (bytes(&wave(11 * 8)), bytes(&[0.0]));
    let sequence = words(&[0, 2, 5, 0, 0]);
    let inputs = vec![
        table,
        none.clone(),
        none,
        numbers,
        parts,
        words(&[1, 2]),
        bytes(&[4.0]),
        sequence,
        words(&[0, 0]),
    ];
    let format: [u32; 5] = [1, 8, 32, 0, 0];
    let words = constants(&[&format, &2u32, &2u32, &9u32, &1u32]);
    Run::new("ngrams", "ngram_embed", inputs, 32).with(words, [2, 2, 1], 32)
}

/// Devices whose order of threads differs, with the planted fault `fault` if one is named, on both texts of the kernels.
fn devices(fault: Option<&'static str>) -> impl Iterator<Item = Emulator> {
    let device = move |seed| fault.map_or_else(|| Emulator::new(seed), |f| Emulator::with_fault(seed, f));
    (0..4).flat_map(move |seed| [device(seed), device(seed).metal()])
}

#[test]
fn norms_agree_with_the_reference_whatever_the_order_of_threads() {
    let (x, weight) = (wave(3 * 300), wave(300));
    for device in devices(None) {
        let got = norm().on(device).unwrap();
        for (got, x) in got.chunks(300).zip(x.chunks(300)) {
            let mut right = x.to_vec();
            reference::rms_norm(&mut right, &weight, 1e-6);
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * b.abs().max(1e-3);
            assert!(got.iter().zip(&right).all(close), "{got:?} {right:?}");
        }
    }
}

#[test]
fn planted_faults_are_caught() {
    let cases = [
        ("no_barrier", delta_rule(), "kernel gated_delta_rule"),
        ("no_barrier", hyper_weights(), "kernel hyper_weights"),
        ("no_barrier", entries(), "kernel attend_entries"),
        ("bound", ngrams(), "kernel ngram_embed"),
        ("bound", add(), "of 400"),
        ("divergence", norm(), "do not reach"),
        ("unwritten", gather(), "nothing has written"),
        ("early", product(), "before the dispatches before have ended"),
    ];
    for (fault, run, expected) in cases {
        // Every second device is Metal's, whose dispatches never begin early.
        let step = if fault == "early" { 2 } else { 1 };
        for (sound, faulty) in devices(None).zip(devices(Some(fault))).step_by(step) {
            run.on(sound).unwrap_or_else(|error| panic!("{fault}, not planted: {error}"));
            let error = run.on(faulty).expect_err(fault).to_string();
            assert!(error.contains(expected), "{fault}: {error}");
        }
    }
}

#[test]
fn faults_of_metals_own_kernel_are_caught() {
    let (sound, run) = (matmul().on(Emulator::new(0)).unwrap(), simdgroup_matmul());
    let close = |got: &[f32]| got.iter().zip(&sound).all(|(a, b)| (a - b).abs() < 1e-4);
    for seed in 0..4 {
        assert!(close(&run.on(Emulator::new(seed).metal()).unwrap()));
        let error =
            run.on(Emulator::with_fault(seed, "gemm_barrier").metal()).expect_err("a missing barrier");
        assert!(error.to_string().contains("tiles: "), "{error}");
        let faulty = run.on(Emulator::with_fault(seed, "gemm_line").metal());
        assert!(!faulty.is_ok_and(|got| close(&got)), "a wrong stride goes unnoticed");
    }
}

#[test]
fn a_wrong_stride_shows_in_the_result() {
    let (weight, x) = (wave(70 * 40), wave(20 * 40));
    let dot = |row: &[f32], x: &[f32]| row.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
    let right: Vec<f32> = x.chunks(40).flat_map(|x| weight.chunks(40).map(move |row| dot(row, x))).collect();
    let close = |got: &[f32]| got.iter().zip(&right).all(|(a, b)| (a - b).abs() < 1e-4);
    for (sound, faulty) in devices(None).zip(devices(Some("stride"))) {
        assert!(close(&matmul().on(sound).unwrap()));
        let faulty = matmul().on(faulty);
        assert!(!faulty.is_ok_and(|got| close(&got)), "a wrong stride goes unnoticed");
    }
}

#[test]
fn a_graph_beside_another_has_at_most_an_eighth_of_the_memory() {
    let mut g = GraphBuilder::new();
    let x = g.input_rows(64);
    let weight = g.weight("weight", MatrixSpec { dtype: DType::F32, rows: 32, cols: 64 });
    let out = g.linear(x, weight, None, Precision::Fast).unwrap();
    let graph = g.finish(out);
    let options = CompileOptions { max_rows: 9, ..CompileOptions::default() };
    let of = |memory: Option<u64>| {
        let gpu = GpuOptions { memory, ..GpuOptions::default() };
        GpuBackend::new("emulator", gpu, || Ok(Box::new(Emulator::new(1))))
    };
    let bytes = of(None).bytes_beside(&graph, options).unwrap().expect("there is much memory");
    let fits = |memory| of(Some(memory)).bytes_beside(&graph, options).unwrap();
    assert_eq!([fits(8 * bytes), fits(8 * bytes - 1)], [Some(bytes), None]);
    let weights = vec![Tensor::from_f32(32, 64, &[0.5; 32 * 64]).unwrap()];
    assert!(of(Some(8 * bytes)).compile_beside(&graph, weights, options).is_ok());
}
