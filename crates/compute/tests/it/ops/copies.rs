//! Kernels that copy weights to threadgroup memory ahead, and those that read a weight once for several rows: CUDA's alone, which an
//! emulated device runs too, with the bits of the common kernels.

use moeflux_compute::gpu::GpuBackend;
use moeflux_compute::gpu::emulator::Ran;
use moeflux_compute::graph::{ExpertMlp, Precision};
use moeflux_compute::{DType, Half, MatrixScale, Zeros};

use super::batches::{encodings, wide_linear_case};
use super::case::{Batching, Case, Recorder, Schedule};
use super::checks::{assert_same_bits, compile, run_all, try_run};
use super::errors::MODES;
use super::experts::moe_case_of;
use crate::support::devices::{
    EMULATOR, copying_ahead, copying_by_lanes, copying_with_fault, is_in_part, is_tested, plain,
};
use crate::support::weights::affine;

/// `check_on` of a device that copies ahead.
fn check(cases: impl IntoIterator<Item = Case>, rows: &'static [usize; 1], kernels: &[(&str, usize)]) {
    check_on(copying_ahead, cases, rows, kernels);
}

/// So many rows of each case, the first alone and the others at once, have the bits of rows that a device computes one by one which
/// copies nothing; each of these kernels has then run for so many encodings.
fn check_on(
    device: fn(&Ran) -> GpuBackend,
    cases: impl IntoIterator<Item = Case>,
    rows: &'static [usize; 1],
    kernels: &[(&str, usize)],
) {
    if !is_tested(EMULATOR) {
        return;
    }
    let ran = Ran::default();
    let devices = [plain(), device(&ran)];
    let counts = [vec![1; rows[0]], vec![1, rows[0] - 1]];
    let mut are_all = true;
    for case in cases {
        if !is_in_part() {
            are_all = false;
            continue;
        }
        let case = Case { batching: Batching::Lengths(rows), ..case };
        let [right, got] = [0, 1].map(|i| {
            let batches = counts[i].iter().map(|count| vec![(0, *count)]).collect();
            run_all(&case, &mut *compile(&case, &devices[i], MODES[1]), &Schedule { batches, stride: 1 })
        });
        assert_same_bits(&got, &right, &case.name);
    }
    let ran = ran.lock().expect("no device has panicked");
    for (kernel, expected) in kernels {
        // Of kernels whose names begin alike, the longest.
        let of =
            |name: &str| kernels.iter().map(|k| k.0).filter(|k| name.starts_with(k)).max_by_key(|k| k.len());
        let names: Vec<_> = ran.iter().filter(|name| of(name) == Some(*kernel)).collect();
        assert!(!are_all || names.len() == *expected, "{kernel}: {names:?}");
    }
}

fn int(bits: u8, group: u8, zeros: Zeros) -> DType {
    DType::Int { bits, group, scale: Half::F16, zeros }
}

/// Encodings of which experts' weights are copied; those of one plane first.
fn copied() -> [DType; 10] {
    use DType::{IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_0};
    let nvfp4 = DType::NVFP4 { matrix: MatrixScale::Divisor };
    [Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, Q8_0, affine(4, 64, Half::BF16), int(8, 128, Zeros::Stored), nvfp4]
}

/// Experts whose gates and ups are of Q8_0.
fn down_case(dtype: DType, [outputs, inner]: [usize; 2], count: usize, top_k: usize) -> Case {
    moe_case_of(count, top_k, [DType::Q8_0, DType::Q8_0, dtype], [outputs, inner], ExpertMlp::default())
}

/// Several layers of one input, of these encodings.
fn layers_case(dtypes: [DType; 3], rows: usize, cols: usize) -> Case {
    let mut r = Recorder::new(7);
    let x = r.input(cols);
    let [a, b, c] = dtypes.map(|dtype| {
        let weight = r.matrix(dtype, rows, cols);
        r.graph.linear(x, weight, None, Precision::Fast).unwrap()
    });
    let two = r.graph.add(a, b).unwrap();
    let out = r.graph.add(two, c).unwrap();
    r.case(format!("{dtypes:?} {rows}×{cols}"), out).of("Linear")
}

#[test]
fn linear_layers_that_are_shared_or_copied_have_the_bits_of_others() {
    use DType::{Q3_K, Q4_K, Q5_K, Q6_K, Q8_0};
    // Of as many pieces as a warp has lanes, and of more.
    let each = |dtype| [[160, 1024], [80, 2304]].map(|[rows, cols]| wide_linear_case(dtype, rows, cols));
    let of_several = [
        // A lane has two pieces of two rows at once, by several turns.
        wide_linear_case(affine(4, 64, Half::BF16), 80, 2048),
        wide_linear_case(affine(4, 64, Half::BF16), 40, 4160),
        // So many columns that activations find no room beside each other.
        wide_linear_case(Q4_K, 24, 12288),
        // Of several encodings; rows of a multiple of 16 bytes.
        wide_linear_case(Q3_K, 72, 2048),
        wide_linear_case(Q6_K, 40, 2048),
        layers_case([Q4_K, Q5_K, Q6_K], 24, 2048),
        layers_case([Q4_K, Q6_K, Q8_0], 48, 1024),
    ];
    let cases = encodings().into_iter().flat_map(each).chain(of_several);
    check(cases, &[8], &[("joint_products", 24), ("early_products", 8)]);
}

#[test]
fn down_projections_that_are_shared_or_copied_have_the_bits_of_others() {
    use DType::Q6_K;
    // Rows of as many pieces as lanes that share one have, of fewer and of more; of which activations find room beside them or not.
    let widths = [512, 768, 1280, 1024, 768, 768, 640, 1408, 512, 768];
    // As many groups as blocks of eight rows, and half as many.
    let each = copied()
        .into_iter()
        .zip(widths)
        .flat_map(|(dtype, inner)| [down_case(dtype, [64, 256], 3, 3), down_case(dtype, [128, inner], 4, 3)]);
    // So few outputs that tokens have groups of their own.
    let early = copied().into_iter().take(7).map(|dtype| down_case(dtype, [32, 256], 3, 2));
    let integers = int(8, 128, Zeros::Stored);
    let of_several = [
        // Of which a multiprocessor has one group.
        down_case(integers, [64, 1024], 4, 3),
        down_case(integers, [128, 1024], 4, 3),
        down_case(Q6_K, [128, 1536], 6, 5),
        // More experts than a warp chooses among: they are known before.
        down_case(Q6_K, [128, 256], 130, 3),
    ];
    let kernels =
        [("joint_down8", 10), ("joint_down8_turns", 10), ("joint_down8_eight", 2), ("early_down8", 7)];
    check(each.chain(early).chain(of_several), &[4], &kernels);
}

/// Gates of as many pieces as a warp has lanes, and of so many that it takes two rows at a time.
#[test]
fn gates_that_are_copied_have_the_bits_of_others() {
    let cases = copied().into_iter().flat_map(|dtype| {
        let has_short_pieces = matches!(dtype, DType::IQ4_XS | DType::Q8_0 | DType::Int { bits: 8, .. });
        let widths = if has_short_pieces { [1024, 1536] } else { [2048, 3072] };
        widths
            .map(|hidden| moe_case_of(3, 2, [dtype, dtype, DType::Q8_0], [hidden, 32], ExpertMlp::default()))
    });
    check(cases, &[3], &[("copied_gate_up8", 10), ("copied_gate_up8_wide", 10)]);
}

#[test]
fn copies_by_lanes_have_the_bits_of_others() {
    use DType::{Q4_K, Q6_K, Q8_0};
    let cases = [
        down_case(Q6_K, [64, 256], 3, 3),
        down_case(Q4_K, [128, 768], 4, 3),
        moe_case_of(3, 2, [Q4_K, Q4_K, Q8_0], [2048, 32], ExpertMlp::default()),
        wide_linear_case(Q4_K, 160, 1024),
        // Of which a multiprocessor has room for one group, of rows that eight lanes share.
        down_case(Q6_K, [128, 1536], 6, 5),
    ];
    let kernels = [
        ("joint_down8", 1),
        ("joint_down8_turns", 1),
        ("joint_down8_eight", 1),
        ("copied_gate_up8", 2),
        ("joint_products", 1),
    ];
    check_on(copying_by_lanes, cases, &[8], &kernels);
}

#[test]
fn faults_of_copies_are_caught() {
    if !is_tested(EMULATOR) {
        return;
    }
    let gates =
        || moe_case_of(3, 2, [DType::Q4_K, DType::Q4_K, DType::Q8_0], [256, 32], ExpertMlp::default());
    let down = || down_case(DType::Q4_K, [64, 256], 3, 3);
    // Rows at once: linear layers are shared by eight.
    let cases = [
        ("gates_not_awaited", gates(), 2, "dynamic: read of offset"),
        ("down_lanes_apart", down(), 3, "dynamic: read of offset"),
        ("down_early", down(), 3, "before the dispatches before have ended"),
        ("share_not_awaited", wide_linear_case(DType::Q8_0, 96, 512), 8, "words: read of offset"),
        ("one_more_copied", wide_linear_case(DType::Q4_K, 32, 512), 1, "dynamic: write of"),
    ];
    for (fault, case, rows, expected) in cases {
        let case = Case { batching: Batching::Lengths(&[8]), ..case };
        let schedule = Schedule { batches: vec![vec![(0, rows)]], stride: 1 };
        let run = |seed, fault| {
            let device = copying_with_fault(seed, fault);
            try_run(&case, &mut *compile(&case, &device, MODES[1]), &schedule, None)
        };
        run(0, "none").unwrap_or_else(|error| panic!("{fault}, not planted: {error}"));
        for seed in 0..3 {
            let error = run(seed, fault).expect_err(fault).to_string();
            assert!(error.contains(expected), "{fault}: {error}");
        }
    }
}
