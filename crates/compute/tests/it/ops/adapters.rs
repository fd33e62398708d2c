//! Adapters beside linear layers and experts: sequences have the first, none or the second, in turn.

use moeflux_compute::DType;
use moeflux_compute::graph::{
    ExpertLowRank, ExpertMlp, ExpertSetId, LinearOp, LowRank, MatrixSpec, Op, Precision, StackedLowRank,
    WeightId, Weighted,
};

use super::case::{Case, LONG, OnDevices, Recorder};
use super::checks::{assert_same_bits, compile, run_all};
use super::experts::moe_case_of;
use super::linear::linear_case;
use crate::support::devices::{CUDA, devices};
use crate::support::random::Random;
use crate::support::weights::weight;

/// The adapter of a sequence.
pub fn of_sequence(sequence: usize) -> Option<u32> {
    [Some(0), None, Some(1)][sequence % 3]
}

/// Adds a random matrix to the case's weights.
fn add(case: &mut Case, random: &mut Random, dtype: DType, rows: usize, cols: usize) -> WeightId {
    case.weights.push(weight(random, dtype, rows, cols));
    case.graph.adapter_weight("adapter", MatrixSpec { dtype, rows, cols })
}

/// Two adapters of different ranks and encodings; also one whose update is of no sequence.
pub fn linear_with_adapters() -> Vec<Case> {
    let shapes = [
        (DType::F32, 67, 83, Precision::F32),
        (DType::Q8_0, 33, 96, Precision::Fast),
        (DType::Q4_K, 5, 512, Precision::Fast),
        (DType::F16, 300, 7, Precision::Fast),
    ];
    let of = |(dtype, rows, cols, precision)| {
        let mut case = linear_case(dtype, rows, cols, true, precision);
        let random = &mut Random::new(rows as u64);
        let node = case.graph.nodes().iter().position(|node| matches!(node.op, Op::Linear(_))).unwrap();
        for (adapter, rank, dtype) in [(0, 3, DType::F32), (1, 16, DType::BF16), (2, 1, DType::F16)] {
            let a = add(&mut case, random, dtype, rank, cols);
            let b = add(&mut case, random, dtype, rows, rank);
            case.graph.adapt_linear(node, LowRank { adapter, a, b, scale: 0.75 }).unwrap();
        }
        let name = format!("{} with adapters", case.name);
        Case { name, ..case }.of("Linear")
    };
    shapes.into_iter().map(of).chain([normed_products()]).collect()
}

/// Products of one input that a norm makes, of which one is added to another value, as in a layer: what adapters add reads what
/// devices leave to the products, and follows what runs beside each other.
fn normed_products() -> Case {
    let mut r = Recorder::new(8);
    let x = r.input(96);
    let norm = r.vector(96);
    let normed = r.graph.rms_norm(x, norm, 1, 1e-5).unwrap();
    let dtypes = [DType::Q8_0, DType::Q4_0, DType::F16];
    let products = dtypes.map(|dtype| {
        let weight = r.matrix(dtype, 96, 96);
        r.graph.linear(normed, weight, None, Precision::Fast).unwrap()
    });
    let sum = r.graph.add(products[0], products[1]).unwrap();
    let sum = r.graph.add(sum, products[2]).unwrap();
    let weight = r.matrix(DType::Q8_0, 30, 96);
    let last = r.graph.linear(sum, weight, None, Precision::Fast).unwrap();
    let beside = r.graph.slice(x, 1, 0, 30).unwrap();
    let out = r.graph.add(beside, last).unwrap();
    let mut case = r.case("a layer's products with adapters", out).of("Linear").in_dtype(DType::Q8_0);
    let random = &mut Random::new(3);
    // Not the product that results leave through.
    for node in 0..case.graph.nodes().len() - 1 {
        let Op::Linear(LinearOp { weight, .. }) = case.graph.nodes()[node].op else { continue };
        let MatrixSpec { rows, cols, .. } = case.graph.weights()[weight.index()].matrix;
        for (adapter, rank) in [(0, 4), (1, 9)] {
            let a = add(&mut case, random, DType::BF16, rank, cols);
            let b = add(&mut case, random, DType::F32, rows, rank);
            case.graph.adapt_linear(node, LowRank { adapter, a, b, scale: 0.1 }).unwrap();
        }
    }
    case
}

/// Of one adapter some projections only.
pub fn experts_with_adapters() -> Vec<Case> {
    use DType::{F16, F32, Q8_0};
    let shapes = [
        (5, 2, [F32; 3], [33, 20], Weighted::Output),
        (4, 3, [Q8_0, Q8_0, Q8_0], [64, 96], Weighted::Output),
        (3, 1, [F16; 3], [24, 40], Weighted::Input),
    ];
    let many = (6, 2, [Q8_0; 3], [64, 96], Weighted::Output);
    let of = |(count, top_k, dtypes, [hidden, inner], weighted): (usize, usize, _, [usize; 2], _)| {
        let mlp = ExpertMlp { weighted, ..ExpertMlp::default() };
        let mut case = moe_case_of(count, top_k, dtypes, [hidden, inner], mlp);
        let random = &mut Random::new(hidden as u64);
        for (adapter, rank, has) in [(0, 3, [true; 3]), (1, 5, [false, true, false])] {
            let mut project = |rows: usize, cols: usize| StackedLowRank {
                a: add(&mut case, random, F32, count * rank, cols),
                b: add(&mut case, random, F16, count * rows, rank),
                scales: (0..count).map(|expert| expert as f32 * 0.5).collect(),
            };
            let all = [project(inner, hidden), project(inner, hidden), project(hidden, inner)];
            let mut has = has.into_iter();
            let projections = all.map(|own| has.next().unwrap().then_some(own));
            case.graph.adapt_experts(ExpertSetId(0), ExpertLowRank { adapter, projections }).unwrap();
        }
        let name = format!("{} with adapters", case.name);
        Case { name, ..case }.of("MoeExperts")
    };
    // More rows than emulated devices have time for, which GPUs multiply in wide tiles.
    let many = Case { batching: LONG, ..of(many).on_hardware() };
    shapes.into_iter().map(of).chain([many]).collect()
}

/// On devices rows without an adapter take the kernels that they take where there are none, whatever others have.
#[test]
fn rows_without_an_adapter_have_the_bits_of_a_graph_without() {
    let cases = || linear_with_adapters().into_iter().chain(experts_with_adapters());
    for (case, mut without) in cases().zip(cases()) {
        let own = case.graph.weights().iter().position(|weight| weight.name == "adapter").unwrap();
        without.graph = case.graph.without_adapters(own);
        without.weights.truncate(own);
        let schedules = case.batching.schedules();
        for (name, device) in devices() {
            if case.on_devices == OnDevices::Hardware && name != CUDA {
                continue;
            }
            for mode in case.modes() {
                let mut with = compile(&case, &device(1), *mode);
                let mut plain = compile(&without, &device(1), *mode);
                // All at once, and in batches of a few rows each.
                for schedule in [&schedules[0], &schedules[3]] {
                    let mut got = run_all(&case, &mut *with, schedule);
                    got.retain(|(sequence, _), _| of_sequence(*sequence).is_none());
                    let expected = run_all(&without, &mut *plain, schedule);
                    assert_same_bits(&got, &expected, &format!("{} on {name}, {mode:?}", case.name));
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let mut case = linear_case(DType::F32, 4, 6, false, Precision::F32);
    let random = &mut Random::new(1);
    let (a, b) = (add(&mut case, random, DType::F32, 2, 6), add(&mut case, random, DType::F32, 4, 2));
    let wrong = add(&mut case, random, DType::F32, 2, 5);
    let node = case.graph.nodes().iter().position(|node| matches!(node.op, Op::Linear(_))).unwrap();
    let mut adapt = |node, a, b| {
        let low_rank = LowRank { adapter: 0, a, b, scale: 1.0 };
        case.graph.adapt_linear(node, low_rank).map_err(|error| error.to_string())
    };
    assert!(adapt(node, wrong, b).unwrap_err().contains("columns of A"));
    assert!(adapt(node, a, a).unwrap_err().contains("rows of B"));
    assert!(adapt(0, a, b).unwrap_err().contains("linear layers"));
    assert!(adapt(node, a, b).is_ok());
}
