//! CUDA's kernels for tensor cores, which an emulated device runs with a stand-in for their fragments, against the reference.

use moeflux_compute::gpu::emulator::Ran;
use moeflux_compute::graph::{ExpertMlp, Precision};
use moeflux_compute::reference::Reference;
use moeflux_compute::{DType, Half};

use super::batches::wide_linear_case;
use super::case::{Batching, Case, Recorder, Schedule};
use super::checks::{assert_same_bits, check_close, compile, difference, run_all, try_run};
use super::errors::{MODES, TF32_PAIR, allowed};
use super::experts::moe_case_of;
use crate::support::devices::{Copies, EMULATOR, is_in_part, is_tested, on_tensor_cores, tensor_fault};
use crate::support::weights::affine;

/// Slots for experts that are too few for all.
const FEW_SLOTS: usize = 2;

/// Batches of these rows of each case are as close to the reference as the table says, experts in few slots have the same bits as
/// those that are resident, and these kernels have run.
fn check(cases: impl IntoIterator<Item = (Case, &'static [usize])>, copies: Copies, kernels: &[&str]) {
    if !is_tested(EMULATOR) {
        return;
    }
    let ran = Ran::default();
    let [device, streaming] = [None, Some(FEW_SLOTS)].map(|slots| on_tensor_cores(&ran, copies, slots));
    let mut are_all = true;
    for (case, rows) in cases {
        if !is_in_part() {
            are_all = false;
            continue;
        }
        let case = Case { batching: Batching::Lengths(rows), ..case };
        let batches = rows.iter().enumerate().map(|(i, count)| vec![(i, *count)]).collect();
        let schedule = Schedule { batches, stride: 1 };
        let right = run_all(&case, &mut *compile(&case, &Reference, MODES[0]), &schedule);
        let got = run_all(&case, &mut *compile(&case, &device, MODES[1]), &schedule);
        let bound = allowed(&case.tested, case.dtype, MODES[1]).max(TF32_PAIR);
        check_close(&got, &right, bound, &case.name);
        if !case.experts.is_empty() {
            let streamed = run_all(&case, &mut *compile(&case, &streaming, MODES[1]), &schedule);
            assert_same_bits(&streamed, &got, &format!("{}, in few slots", case.name));
        }
    }
    let ran = ran.lock().expect("no device has panicked");
    for kernel in kernels {
        assert!(!are_all || ran.contains(*kernel), "{kernel} is not among {ran:?}");
    }
}

/// Layers of one input with biases, the last with a residual.
fn layers_case(dtypes: [DType; 3], [rows, cols]: [usize; 2]) -> Case {
    let mut r = Recorder::new(7);
    let x = r.input(cols);
    let [a, b, c] = dtypes.map(|dtype| {
        let (weight, bias) = (r.matrix(dtype, rows, cols), r.vector(rows));
        r.graph.linear(x, weight, Some(bias), Precision::Fast).unwrap()
    });
    let two = r.graph.add(a, b).unwrap();
    let out = r.graph.add(two, c).unwrap();
    r.case(format!("{dtypes:?} {rows}×{cols}"), out).of("Linear").in_dtype(dtypes[0])
}

#[test]
fn linear_layers_are_close_to_the_reference() {
    use DType::{Q4_K, Q6_K};
    let cases: [(Case, &[usize]); 6] = [
        // Rows that are no multiple of a tile's; tiles of tokens that are not full.
        (wide_linear_case(Q4_K, 70, 768), &[17, 9]),
        (wide_linear_case(Q6_K, 33, 512), &[9, 40]),
        (wide_linear_case(Q4_K, 40, 256), &[65]),
        (wide_linear_case(Q6_K, 16, 1280), &[64, 66]),
        (layers_case([Q4_K, Q6_K, Q4_K], [72, 512]), &[33]),
        // So many that weights of f32 are split in two tf32.
        (wide_linear_case(DType::F32, 40, 68), &[520]),
    ];
    let products = ["q4_k", "q6_k"]
        .map(|encoding| [16, 32, 64].map(|tile| format!("panel_products_{tile}_{encoding}")))
        .concat();
    let kernels: Vec<&str> =
        products.iter().map(String::as_str).chain(["blocks_of", "exact_linear_64"]).collect();
    check(cases, Copies::Ahead, &kernels);
}

fn experts_case(count: usize, dtypes: [DType; 3], widths: [usize; 2]) -> Case {
    moe_case_of(count, 2, dtypes, widths, ExpertMlp::default())
}

/// In tiles of eight tokens and of sixteen.
#[test]
fn experts_that_pass_through_shared_memory_are_close_to_the_reference() {
    use DType::{IQ2_XXS, Q4_K, Q6_K};
    let affine = affine(4, 64, Half::BF16);
    let cases: [(Case, &[usize]); 5] = [
        (experts_case(4, [Q4_K, Q4_K, Q6_K], [512, 256]), &[26, 9]),
        (experts_case(12, [Q6_K, Q6_K, Q4_K], [256, 512]), &[17]),
        (experts_case(4, [IQ2_XXS; 3], [256, 512]), &[9]),
        // Rows that are no multiples of 256 columns.
        (experts_case(4, [affine; 3], [384, 256]), &[18, 33]),
        // So few outputs that a group has few warps.
        (experts_case(3, [Q4_K, Q4_K, Q6_K], [256, 256]), &[64]),
    ];
    let kernels = [
        "enter_experts",
        "stream_gate_up_16_q4_k",
        "stream_gate_up_8_q6_k",
        "stream_gate_up_8_iq2_xxs",
        "stream_gate_up_16_affine4",
        "stream_down_16_few_q6_k",
    ];
    check(cases, Copies::Ahead, &kernels);
}

#[test]
fn experts_that_go_straight_into_registers_are_close_to_the_reference() {
    use DType::{Q4_K, Q6_K};
    let cases: [(Case, &[usize]); 2] = [
        (experts_case(3, [Q4_K, Q4_K, Q6_K], [768, 256]), &[17, 9]),
        (experts_case(5, [Q6_K, Q6_K, Q4_K], [256, 512]), &[40]),
    ];
    let kernels = ["tensor_sort", "blocks_of", "panel_gate_up_q4_k", "panel_down_q6_k", "panel_gate_up_q6_k"];
    check(cases, Copies::None, &kernels);
}

#[test]
fn faults_of_kernels_for_tensor_cores_are_caught() {
    if !is_tested(EMULATOR) {
        return;
    }
    let of_products = [
        ("products_no_barrier", "dynamic: read of offset"),
        ("products_not_awaited", "dynamic: read of offset"),
        ("products_copy_too_long", "bytes at offset"),
        ("products_row", "is not within"),
        ("products_fragment", "is not within"),
        ("products_lanes_apart", "lane operation"),
    ];
    let of_experts = [
        ("stream_not_awaited", "dynamic: read of offset"),
        ("stream_still_read", "dynamic: "),
        ("stream_sums_not_made", "dynamic: read of offset"),
        ("stream_factors", "variables: "),
        ("stream_copy_too_long", "bytes"),
        ("stream_row", "nothing has written"),
        ("stream_scale", "is not within"),
    ];
    are_caught(wide_linear_case(DType::Q4_K, 70, 768), &of_products);
    are_caught(experts_case(4, [DType::Q4_K; 3], [512, 256]), &of_experts);
}

/// With each of these faults a batch of the case ends with an error like that, and with none it does not.
fn are_caught(case: Case, faults: &[(&'static str, &str)]) {
    let case = Case { batching: Batching::Lengths(&[33]), ..case };
    let schedule = Schedule { batches: vec![vec![(0, 33)]], stride: 1 };
    let right = run_all(&case, &mut *compile(&case, &Reference, MODES[0]), &schedule);
    let bound = allowed(&case.tested, case.dtype, MODES[1]).max(TF32_PAIR);
    let run = |seed, fault| {
        let mut executable = compile(&case, &tensor_fault(seed, fault), MODES[1]);
        let got = try_run(&case, &mut *executable, &schedule, None).map_err(|error| error.to_string())?;
        let found = difference(&got, &right);
        let is_close = found.mean_square <= bound.mean_square && found.largest <= bound.largest;
        if is_close { Ok(()) } else { Err(format!("{found} is not within {bound}")) }
    };
    assert_eq!(run(0, "none"), Ok(()), "no fault");
    for (fault, expected) in faults {
        for seed in 0..2 {
            let error = run(seed, fault).expect_err(fault);
            assert!(error.contains(expected), "{fault}: {error}");
        }
    }
}
