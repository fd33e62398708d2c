//! On devices with matrix units for bytes, a row's result does not depend on how many rows are beside it.

use moeflux_compute::backend::KvType;
use moeflux_compute::graph::{Activation, Attention, ExpertMlp, Precision, Weighted};
use moeflux_compute::{BlockScale, DType, Half, MatrixScale, Zeros};

use super::case::{Batching, Case, Recorder, Schedule};
use super::checks::{assert_same_bits, compile, difference, run_all};
use super::errors::{MODES, Mode};
use super::experts::{large_moe_case_of, moe_case_of};
use super::linear::linear_case;
use crate::support::devices::{
    CUDA, METAL, MakeDevice, batch_invariant_devices, devices, is_in_part, is_tried,
};
use crate::support::weights::{affine, dtypes, grouped_integers};

/// Encodings whose products take activations of eight bits.
pub(super) fn encodings() -> Vec<DType> {
    use DType::{IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS};
    use DType::{MXFP4, MXFP4_Planes, Q2_K, Q3_K, Q4_0, Q4_K, Q5_0, Q5_K, Q6_K, Q8_0};
    let affine = [affine(4, 64, Half::BF16), affine(8, 32, Half::F16)];
    let of_files = [Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_0, Q4_0, Q5_0, IQ4_NL, IQ4_XS, MXFP4, MXFP4_Planes];
    let coded = [IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M];
    of_files
        .into_iter()
        .chain(coded)
        .chain(affine)
        .chain([DType::NVFP4 { matrix: MatrixScale::Divisor }])
        .chain(grouped_integers())
        .collect()
}

/// The same bits with all rows at once or in pieces of different sizes, and row by row.
fn check_bits(cases: impl IntoIterator<Item = Case>) {
    let devices = batch_invariant_devices();
    for (number, case) in cases.into_iter().filter(|_| is_in_part()).enumerate() {
        let schedules = case.batching.schedules();
        for (name, device) in devices.iter().filter(|(name, _)| *name != METAL) {
            let mut executable = compile(&case, &device(1), MODES[1]);
            let alone = run_all(&case, &mut *executable, &schedules[4]);
            let of = if *name == CUDA { 1 } else { 2 };
            for (_, index) in [0, 3].into_iter().enumerate().filter(|(i, _)| is_tried(number + i, of)) {
                let got = run_all(&case, &mut *executable, &schedules[index]);
                assert_same_bits(&got, &alone, &format!("{} on {name}, schedule {index}", case.name));
            }
        }
    }
}

#[test]
fn linear_layers_of_a_batch_have_the_bits_of_single_rows() {
    check_bits(encodings().into_iter().flat_map(|dtype| {
        let block = dtype.block_len().max(64);
        [
            // Fewer pieces than a tree of sums has leaves, and more; rows that fill no tile.
            linear_case(dtype, 67, 3 * block, true, Precision::Fast),
            linear_case(dtype, 40, 2304, false, Precision::Fast),
        ]
    }));
}

#[test]
fn routers_of_a_batch_have_the_bits_of_single_rows() {
    let int4 = DType::Int { bits: 4, group: 32, scale: Half::F16, zeros: Zeros::Stored };
    let dtypes = [DType::F32, DType::F16, DType::BF16].map(|dtype| (dtype, 296));
    let small = [(affine(8, 64, Half::BF16), 320), (int4, 2208)];
    check_bits(
        dtypes
            .into_iter()
            .chain(small)
            .map(|(dtype, cols)| linear_case(dtype, 13, cols, true, Precision::F32)),
    );
}

/// Rows of 32 pieces, which have kernels of their own, and of more.
#[test]
fn experts_with_long_rows_have_the_bits_of_single_rows() {
    use DType::{Q4_K, Q6_K, Q8_0};
    check_bits(
        [(Q4_K, 2048), (Q6_K, 2048), (Q8_0, 1024), (Q8_0, 1280)].map(|(dtype, hidden)| {
            moe_case_of(2, 1, [dtype, dtype, Q8_0], [hidden, 32], ExpertMlp::default())
        }),
    );
}

#[test]
fn experts_of_a_batch_have_the_bits_of_single_rows() {
    let limited = Activation::LimitedSwiGlu { limit: 6.0 };
    let mlps = [
        ExpertMlp::default(),
        ExpertMlp { activation: limited, weighted: Weighted::Input, ..ExpertMlp::default() },
        ExpertMlp {
            activation: Activation::SituGlu { beta: 1.5, linear_beta: Some(2.5) },
            ..ExpertMlp::default()
        },
    ];
    check_bits(encodings().into_iter().enumerate().map(|(i, dtype)| {
        let widths = if dtype.block_len() >= 128 { [256, 256] } else { [96, 64].map(|n| n * 2) };
        // More pairs of an expert than a tile has.
        moe_case_of(3, 2, [dtype; 3], widths, mlps[i % mlps.len()])
    }));
}

/// A linear layer of so many outputs that some are enough.
pub(super) fn wide_linear_case(dtype: DType, rows: usize, cols: usize) -> Case {
    let mut r = Recorder::new(cols as u64);
    let x = r.input(cols);
    let weight = r.matrix(dtype, rows, cols);
    let all = r.graph.linear(x, weight, None, Precision::Fast).unwrap();
    let out = if rows > 128 { r.graph.slice(all, 1, rows - 128, 128).unwrap() } else { all };
    r.case(format!("{dtype} {rows}×{cols}"), out).of("Linear").in_dtype(dtype)
}

/// Up to eight rows share large layers on CUDA, and where batches have no kernels of their own a few more take those for few
/// rows too. Emulated devices, for which smaller weights are large, do so in `copies.rs`.
#[test]
fn few_rows_that_share_large_layers_have_the_bits_of_single_rows() {
    // Rows of as many pieces as a warp has lanes, of more, and of so many that activations find no room beside each other.
    few_rows_have_the_bits_of_single_rows(encodings().into_iter().flat_map(|dtype| {
        [[2304, 2048], [1152, 4096], [640, 12288]].map(|[rows, cols]| wide_linear_case(dtype, rows, cols))
    }));
}

/// As above, of experts.
#[test]
fn few_rows_that_share_large_experts_have_the_bits_of_single_rows() {
    use DType::{IQ4_XS, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, Q8_0};
    // Of 1024 columns of Q5_K a warp's rows leave no room for activations.
    let experts =
        [(Q4_K, 256), (Q5_K, 768), (Q6_K, 768), (Q8_0, 256), (Q8_0, 640), (Q4_K, 1280), (Q5_K, 1024)];
    let of = |count, top_k, dtype, inner| large_moe_case_of(count, top_k, [Q4_K, Q4_K, dtype], [1536, inner]);
    // Of the last ones a multiprocessor has one group.
    let wide =
        [(Q4_K, 1536), (Q6_K, 1536), (Q6_K, 1792)].into_iter().map(|(dtype, inner)| of(12, 8, dtype, inner));
    // More experts than a warp chooses among: they are known before.
    let known = [130].into_iter().map(|count| of(count, 3, Q6_K, 256));
    let low = [Q2_K, Q3_K, IQ4_XS].into_iter().map(|dtype| of(6, 2, dtype, 768));
    // In planes: rows of as many pieces as lanes that share one have, of fewer and of more.
    let int = |bits, group, zeros| DType::Int { bits, group, scale: Half::F16, zeros };
    let affine = |bits| affine(bits, 64, Half::BF16);
    let nvfp4 = DType::NVFP4 { matrix: MatrixScale::Divisor };
    let in_planes = [
        (int(4, 128, Zeros::Stored), 768),
        (int(4, 32, Zeros::Middle), 1536),
        (int(8, 128, Zeros::Stored), 1408),
        (affine(4), 768),
        (affine(4), 2048),
        (affine(8), 512),
        (nvfp4, 768),
    ];
    let in_planes = in_planes.into_iter().map(|(dtype, inner)| of(12, 8, dtype, inner));
    let experts = experts.into_iter().map(|(dtype, inner)| of(6, 2, dtype, inner));
    let experts = experts.chain(wide).chain(known).chain(low).chain(in_planes);
    // Gates of as many pieces as a warp has lanes, and of fewer.
    let gates = [
        (Q4_K, 2048),
        (Q5_K, 768),
        (Q6_K, 1280),
        (Q8_0, 192),
        (Q2_K, 2048),
        (Q3_K, 2048),
        (IQ4_XS, 1024),
        // Of rows that a warp takes two at a time.
        (Q4_K, 4096),
        (Q6_K, 3072),
        (Q8_0, 2048),
        (int(4, 128, Zeros::Stored), 2048),
        (int(4, 32, Zeros::Middle), 4096),
        (int(8, 128, Zeros::Stored), 1408),
        (affine(4), 3072),
        (nvfp4, 1536),
    ];
    let gates =
        gates.into_iter().map(|(dtype, hidden)| large_moe_case_of(6, 2, [dtype, dtype, Q8_0], [hidden, 96]));
    few_rows_have_the_bits_of_single_rows(experts.chain(gates));
}

fn few_rows_have_the_bits_of_single_rows(cases: impl Iterator<Item = Case>) {
    let hardware =
        |devices: Vec<(&'static str, MakeDevice)>| devices.into_iter().find(|(name, _)| *name == CUDA);
    let [Some((_, device)), Some((_, invariant))] = [devices(), batch_invariant_devices()].map(hardware)
    else {
        return;
    };
    for case in cases {
        check_few(case, &[(device, &[2, 3, 5, 8]), (invariant, &[2, 8, 9, 12, 14])]);
    }
}

/// Tiles of CUDA's products of f32 are small where there are few, which changes no bit.
#[test]
fn exact_products_have_the_same_bits_in_tiles_of_any_size() {
    let Some((_, device)) = devices().into_iter().find(|(name, _)| *name == CUDA) else { return };
    check_pieces(wide_linear_case(DType::F32, 2048, 500), device, &[160], &[160, 40]);
}

/// What CUDA's kernels of prompts give a row depends neither on how wide tiles are nor on how many blocks sort pairs; batches take
/// them too, of many rows or for large layers.
#[test]
fn prompts_have_the_same_bits_in_pieces_of_any_size() {
    use DType::{Q4_K, Q6_K, Q8_0};
    let Some((_, device)) = devices().into_iter().find(|(name, _)| *name == CUDA) else { return };
    // The first fills the multiprocessors with tiles of the widest kind.
    for (dtype, rows, cols) in [(Q4_K, 25344, 256), (Q6_K, 1152, 768), (Q8_0, 640, 256)] {
        check_pieces(wide_linear_case(dtype, rows, cols), device, &[528], &[528, 264]);
    }
    check_pieces(wide_linear_case(Q6_K, 51200, 256), device, &[320], &[320, 64]);
    let experts = moe_case_of(16, 8, [Q4_K; 3], [256, 256], ExpertMlp::default());
    check_pieces(experts, device, &[520], &[520, 260]);
}

/// Experts of a batch that pass through CUDA's shared memory do so by tiles of eight pairs or of sixteen.
#[test]
fn experts_of_a_batch_have_the_same_bits_in_tiles_of_any_size() {
    use DType::{
        IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, IQ4_NL, IQ4_XS, MXFP4, MXFP4_Planes,
        MXFP8_Planes,
    };
    use DType::{Q2_K, Q3_K, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
    let Some((_, device)) = devices().into_iter().find(|(name, _)| *name == CUDA) else { return };
    let int = |bits, group, zeros| DType::Int { bits, group, scale: Half::F16, zeros };
    let low_bit = [Q2_K, Q3_K, Q4_0, IQ4_NL, IQ4_XS, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ1_S, IQ1_M];
    let encodings = [Q4_K, Q5_K, Q6_K, Q8_0, MXFP4, MXFP4_Planes, MXFP8_Planes];
    let encodings = encodings.into_iter().chain(low_bit).chain([
        affine(4, 64, Half::BF16),
        affine(8, 128, Half::F16),
        int(4, 32, Zeros::Middle),
        int(4, 128, Zeros::Stored),
        DType::NVFP4 { matrix: MatrixScale::Factor },
        DType::Fp8 { scale: BlockScale::F32 },
    ]);
    for dtype in encodings {
        // 72 pairs of six experts are too many for tiles of eight, 36 are not.
        let experts = moe_case_of(6, 2, [dtype; 3], [512, 256], ExpertMlp::default());
        check_pieces(experts, device, &[36], &[36, 18, 9]);
    }
}

/// Of a batch's linear layers, blocks of a cluster share tiles: their sums are divided, which a prompt's are not.
#[test]
fn clusters_add_up_what_a_block_does() {
    use DType::{Q4_K, Q6_K, Q8_0};
    let Some((_, device)) = devices().into_iter().find(|(name, _)| *name == CUDA) else { return };
    for (dtype, rows, cols) in [(Q4_K, 2048, 4096), (Q6_K, 500, 1536), (Q8_0, 5120, 2048), (Q4_K, 192, 768)] {
        let case = Case { batching: Batching::Lengths(&[384]), ..wide_linear_case(dtype, rows, cols) };
        let schedule = |rows: usize| Schedule { batches: vec![vec![(0, rows)]; 384 / rows], stride: 1 };
        let mut executable = compile(&case, &device(1), MODES[1]);
        let [alone, shared] = [384, 192].map(|rows| run_all(&case, &mut *executable, &schedule(rows)));
        let got = difference(&shared, &alone);
        assert!(got.mean_square > 0.0 && got.mean_square < 1e-10, "{}: {got}", case.name);
    }
}

/// The same bits in batches of each size, as many as are whole.
fn check_pieces(case: Case, device: MakeDevice, lengths: &'static [usize; 1], sizes: &[usize]) {
    let [tokens] = *lengths;
    let case = Case { batching: Batching::Lengths(lengths), ..case };
    let schedule =
        |rows: usize| Schedule { batches: (0..tokens / rows).map(|_| vec![(0, rows)]).collect(), stride: 1 };
    let mut executable = compile(&case, &device(1), MODES[1]);
    let all = run_all(&case, &mut *executable, &schedule(sizes[0]));
    for rows in &sizes[1..] {
        let got = run_all(&case, &mut *executable, &schedule(*rows));
        assert_same_bits(&got, &all, &format!("{}, {rows} rows", case.name));
    }
}

/// CUDA attends to the newest tokens of many short sequences by groups beside each other on a multiprocessor, of fewer by groups of
/// their own, with the same bits.
#[test]
fn sequences_have_the_same_bits_beside_any_others() {
    const TOKENS: usize = 20;
    let Some((_, device)) = devices().into_iter().find(|(name, _)| *name == CUDA) else { return };
    let mut r = Recorder::new(8);
    let [q, k, v] = [16, 8, 8].map(|heads| r.input(heads * 128));
    let out = r.graph.attention(q, k, v, Attention::grouped(16, 8, 128, 0.15)).unwrap();
    let case =
        Case { batching: Batching::Lengths(&[TOKENS; 42]), ..r.case("42 sequences", out).of("Attention") };
    // A token of each of some sequences, then of each of the others.
    let schedule = |some: usize| Schedule {
        batches: (0..TOKENS)
            .flat_map(|_| [0..some, some..42].map(|part| part.map(|sequence| (sequence, 1)).collect()))
            .filter(|batch: &Vec<_>| !batch.is_empty())
            .collect(),
        stride: 1,
    };
    let mut executable = compile(&case, &device(1), MODES[1]);
    let [all, parts] = [42, 26].map(|some| run_all(&case, &mut *executable, &schedule(some)));
    assert_same_bits(&parts, &all, &case.name);
}

/// What a product of several rows takes in eight bits is rounded where attention ends, of a row alone where the product begins.
#[test]
fn what_attention_rounds_has_the_bits_of_single_rows() {
    const SEQUENCES: usize = 16;
    // Rounding products by themselves or not changes one value in some 500,000.
    const LENGTHS: [[usize; SEQUENCES]; 2] = [[3; SEQUENCES], [80; SEQUENCES]];
    for (name, device) in batch_invariant_devices().into_iter().filter(|(name, _)| *name != METAL) {
        // CUDA reads a weight once for up to eight rows if it is large; the emulator has batches from fifteen rows on.
        let (heads, rows, together) = if name == CUDA { (16, 1024, 8) } else { (4, 32, SEQUENCES) };
        let lengths = &LENGTHS[usize::from(name == CUDA)];
        let mut r = Recorder::new(3);
        let [q, k, v] = [heads, heads / 2, heads / 2].map(|heads| r.input(heads * 128));
        let mixed = r.graph.attention(q, k, v, Attention::grouped(heads, heads / 2, 128, 0.15)).unwrap();
        let weight = r.matrix(DType::Q4_K, rows, heads * 128);
        let out = r.graph.linear(mixed, weight, None, Precision::Fast).unwrap();
        let case = Case { batching: Batching::Lengths(lengths), ..r.case(name, out).of("Attention") };
        let schedule = |each: usize| {
            let parts = (0..SEQUENCES).step_by(each).map(|first| first..SEQUENCES.min(first + each));
            let tokens = (0..lengths[0]).flat_map(|_| parts.clone());
            Schedule {
                batches: tokens.map(|part| part.map(|sequence| (sequence, 1)).collect()).collect(),
                stride: 1,
            }
        };
        let mut executable = compile(&case, &device(1), MODES[1]);
        let [alone, all] = [1, together].map(|each| run_all(&case, &mut *executable, &schedule(each)));
        assert_same_bits(&all, &alone, name);
    }
}

/// Single tokens attend to keys and values of eight bits by kernels of their own, which round them as those of batches do.
#[test]
fn single_tokens_read_and_write_the_same_eight_bits() {
    let mode = Mode { kv_type: KvType::Q8_0, ..MODES[0] };
    for (heads, kv_heads, head_dim) in [(5, 1, 64), (2, 2, 128), (2, 1, 256)] {
        let mut r = Recorder::new(8);
        let [q, k, v] = [heads, kv_heads, kv_heads].map(|n| r.input(n * head_dim));
        let shape = Attention::grouped(heads, kv_heads, head_dim, 0.15);
        let out = r.graph.attention(q, k, v, shape).unwrap();
        let name = format!("{heads}/{kv_heads} heads of {head_dim} over q8_0");
        let case = Case { batching: Batching::Lengths(&[150, 10]), ..r.case(name, out).of("Attention") };
        let schedules = case.batching.schedules();
        for (device_name, device) in devices() {
            let mut executable = compile(&case, &device(1), mode);
            let [together, single] = [0, 4].map(|i| run_all(&case, &mut *executable, &schedules[i]));
            let got = difference(&single, &together);
            assert!(got.mean_square < 1e-11, "{} on {device_name}: {got}", case.name);
        }
    }
}

/// The same bits row by row and in batches of each of the counts.
fn check_few(case: Case, devices: &[(MakeDevice, &[usize])]) {
    const MOST: usize = 14;
    let case = Case { batching: Batching::Lengths(&[MOST]), ..case };
    let schedule = |rows: usize| Schedule {
        batches: (0..MOST).step_by(rows).map(|first| vec![(0, rows.min(MOST - first))]).collect(),
        stride: 1,
    };
    for (device, counts) in devices {
        let mut executable = compile(&case, &device(1), MODES[1]);
        let alone = run_all(&case, &mut *executable, &schedule(1));
        for rows in counts.iter().copied() {
            let got = run_all(&case, &mut *executable, &schedule(rows));
            assert_same_bits(&got, &alone, &format!("{}, {rows} rows", case.name));
        }
    }
}

/// Up to eight rows share weights that are unpacked to floats, and large ones of plain floats.
#[test]
fn few_rows_that_share_floats_have_the_bits_of_single_rows() {
    use DType::{BF16, F16, Fp8, Fp8_Rows, Fp8_Whole, IQ2_XXS, MXFP8_Planes, Q2_K, Q4_1};
    let is_fp8 =
        |dtype: &DType| matches!(dtype, Fp8 { .. } | Fp8_Rows { .. } | Fp8_Whole { .. } | MXFP8_Planes);
    let unpacked = dtypes().into_iter().filter(is_fp8);
    let unpacked = unpacked.chain([Q2_K, Q4_1, IQ2_XXS]).map(|dtype| (dtype, 67, 512));
    let plain = [(BF16, 640, 512), (F16, 640, 512), (BF16, 8195, 64), (F16, 8195, 64)];
    let cases: Vec<_> = unpacked.chain(plain).collect();
    for (name, device) in devices() {
        let own = cases.iter().copied().filter(|_| is_in_part()).enumerate();
        let own = own.filter(|(number, _)| name == CUDA || is_tried(number + usize::from(name == METAL), 2));
        for (_, (dtype, rows, cols)) in own {
            check_few(linear_case(dtype, rows, cols, true, Precision::Fast), &[(device, &[2, 3, 5, 8])]);
        }
    }
}
