//! Attention over blocks of tokens that an index chooses.

use super::case::{Case, Recorder, SHORT, VOCABULARY};
use super::checks::{compile, run_all};
use super::errors::MODES;
use moeflux_compute::Error;
use moeflux_compute::backend::{Backend, KvType, PAGE_TOKENS, page_bytes};
use moeflux_compute::cpu::CpuBackend;
use moeflux_compute::graph::{
    Activation, Attention, BlockChoice, BlockScore, Chosen, EntryIndex, IndexInputs, LatentAttention,
    LatentInputs, LatentWeights, Value,
};
use moeflux_compute::reference::{Reference, seen};

const INDEX: EntryIndex = EntryIndex { heads: 3, head_dim: 5, top_k: 4 };

/// Ways of choosing: single tokens, pools, blocks that end within pages and beyond, more blocks than there are.
fn choices() -> Vec<BlockChoice> {
    let choice = BlockChoice { index: INDEX, block: 1, score: BlockScore::Sum };
    let best = BlockChoice { block: 7, score: BlockScore::BestToken { local: 1 }, ..choice };
    vec![
        choice,
        BlockChoice { index: EntryIndex { top_k: 200, ..INDEX }, ..choice },
        BlockChoice { block: 5, ..choice },
        BlockChoice {
            block: PAGE_TOKENS + 1,
            index: EntryIndex { top_k: 1, heads: 1, head_dim: 2 },
            ..choice
        },
        best,
        BlockChoice { score: BlockScore::BestToken { local: 0 }, ..best },
        BlockChoice { score: BlockScore::BestToken { local: 4 }, block: 3, ..best },
        BlockChoice { block: 1, ..best },
        BlockChoice { block: PAGE_TOKENS + 1, index: EntryIndex { top_k: 1, heads: 6, ..INDEX }, ..best },
    ]
}

/// A choice of a recorder's own inputs.
fn chosen(r: &mut Recorder, choice: BlockChoice) -> Chosen {
    chosen_by(r, choice, Recorder::input)
}

/// A choice of inputs that `input` makes of so many columns.
fn chosen_by(r: &mut Recorder, choice: BlockChoice, input: fn(&mut Recorder, usize) -> Value) -> Chosen {
    let index = choice.index;
    let (q, k) = (input(r, index.heads * index.head_dim), input(r, index.head_dim));
    let weights = (choice.score == BlockScore::Sum).then(|| input(r, index.heads));
    let blocks = r.graph.choose_blocks(IndexInputs { q, k, weights }, choice).unwrap();
    Chosen { blocks, groups: choice.groups(), block: choice.block, tail: choice.score == BlockScore::Sum }
}

pub fn chosen_blocks() -> Vec<Case> {
    let case = |choice: BlockChoice| {
        let mut r = Recorder::new(5);
        let blocks = chosen(&mut r, choice).blocks;
        assert_eq!(blocks.width(), choice.groups() * choice.index.top_k);
        // Blocks are numbers.
        r.case(format!("{choice:?}"), blocks).in_pairs().in_f32().without_poison()
    };
    choices().into_iter().map(case).collect()
}

pub fn attention_over_chosen_blocks() -> Vec<Case> {
    let mut cases = vec![];
    let shape = Attention::grouped(6, 2, 8, 0.4);
    for (i, choice) in choices().into_iter().enumerate() {
        // One key head for all, and keys that heads with different choices share.
        for (j, (kv_heads, value_dim)) in [(1, 8), (2, 5), (6, 8)].into_iter().enumerate() {
            let shape = Attention { kv_heads, value_dim, ..shape };
            let mut r = Recorder::new(6);
            let [q, k, v] = [6 * 8, kv_heads * 8, kv_heads * value_dim].map(|width| r.input(width));
            let sinks = (kv_heads == 2).then(|| r.vector(6));
            let chosen = chosen(&mut r, choice);
            let out = r.graph.attention_over([q, k, v], shape, sinks, Some(chosen)).unwrap();
            let case = r.case(format!("{shape:?} {choice:?}"), out).in_pairs().in_f32().without_poison();
            cases.push(if (i + j) % 3 == 0 { case } else { case.off_devices() });
        }
    }
    cases.extend(published_blocks());
    cases
}

/// Whole numbers, which are the same in f16: so are choices then.
pub fn whole_input(r: &mut Recorder, width: usize) -> Value {
    r.input_of(width, |random| (random.uniform() * 9.0).floor() - 4.0)
}

/// With heads as published models have them: GPUs with tensor cores have kernels of their own for these.
fn published_blocks() -> Vec<Case> {
    let index = EntryIndex { heads: 2, head_dim: 4, top_k: 3 };
    let best = BlockChoice { index, block: 16, score: BlockScore::BestToken { local: 1 } };
    let sums = BlockChoice { block: 5, score: BlockScore::Sum, index: EntryIndex { top_k: 9, ..index } };
    let wide = Attention::grouped(40, 2, 128, 0.1);
    let shapes = [
        (wide, best, false),
        (wide, sums, true),
        (Attention::grouped(10, 2, 64, 0.2), BlockChoice { block: 37, ..best }, true),
        (Attention::grouped(32, 2, 64, 0.2), BlockChoice { block: 1, ..sums }, false),
    ];
    let case = |(shape, choice, sinks): (Attention, BlockChoice, bool)| {
        let mut r = Recorder::new(6);
        let dim = shape.head_dim;
        let [q, k, v] = [shape.heads, shape.kv_heads, shape.kv_heads].map(|heads| r.input(heads * dim));
        let sinks = sinks.then(|| r.vector(shape.heads));
        let chosen = chosen_by(&mut r, choice, whole_input);
        let out = r.graph.attention_over([q, k, v], shape, sinks, Some(chosen)).unwrap();
        let case = r.case(format!("{shape:?} {choice:?}"), out).of("Attention");
        case.in_pairs().without_poison().on_hardware()
    };
    shapes.map(case).into()
}

/// Latent attention with what few models have.
fn latent(r: &mut Recorder, rope: usize, sinks: bool, chosen: Option<Chosen>) -> Value {
    let shape = LatentAttention { heads: 10, nope: 6, rope, rank: 9, value: 7, scale: 0.3 };
    latent_of(r, shape, sinks, chosen)
}

fn latent_of(r: &mut Recorder, shape: LatentAttention, sinks: bool, chosen: Option<Chosen>) -> Value {
    let LatentAttention { heads, nope, rope, rank, value, .. } = shape;
    let [q_nope, c] = [heads * nope, rank].map(|width| r.input(width));
    let rotated = (rope > 0).then(|| [r.input(heads * rope), r.input(rope)]);
    let sinks = sinks.then(|| r.vector(heads));
    let rows = heads * (nope + value);
    let scale = (rank as f32).sqrt().recip();
    let values: Vec<f32> = r.random.normals(rows * rank).iter().map(|v| v * scale).collect();
    let weights = LatentWeights::Joint(r.weight(rows, rank, &values));
    let inputs = LatentInputs { q_nope, c, rotated, sinks, chosen };
    r.graph.latent_attention(inputs, weights, shape).unwrap()
}

pub fn latent_attention_over_chosen_blocks() -> Vec<Case> {
    let mut cases = vec![shared_choice()];
    for (i, choice) in choices().into_iter().filter(|choice| choice.groups() == 1).enumerate() {
        for (j, (rope, sinks)) in [(4, true), (0, false)].into_iter().enumerate() {
            let mut r = Recorder::new(7);
            let chosen = chosen(&mut r, choice);
            let out = latent(&mut r, rope, sinks, Some(chosen));
            let case = r
                .case(format!("rope {rope}, sinks {sinks}, {choice:?}"), out)
                .in_pairs()
                .in_f32()
                .without_poison();
            cases.push(if (i + j) % 2 == 0 { case } else { case.off_devices() });
        }
    }
    for (rope, sinks) in [(4, true), (0, false), (0, true)] {
        let mut r = Recorder::new(8);
        let out = latent(&mut r, rope, sinks, None);
        cases.push(r.case(format!("rope {rope}, sinks {sinks}"), out).in_pairs().in_f32());
    }
    cases.extend(published());
    cases
}

/// As published models have them: on compute capability 9.0 these have kernels of their own.
fn published() -> Vec<Case> {
    let choice = |top_k| {
        let index = EntryIndex { top_k, ..INDEX };
        BlockChoice { index, block: 1, score: BlockScore::Sum }
    };
    let deep = LatentAttention { heads: 70, nope: 32, rope: 64, rank: 512, value: 16, scale: 0.2 };
    let shapes = [
        (deep, 4, true),
        (LatentAttention { heads: 3, ..deep }, 100, false),
        (LatentAttention { heads: 5, rank: 256, ..deep }, 70, true),
        (LatentAttention { heads: 6, rope: 32, rank: 256, nope: 20, ..deep }, 200, false),
    ];
    let case = |(shape, top_k, sinks): (LatentAttention, usize, bool)| {
        let mut r = Recorder::new(7);
        let chosen = chosen_by(&mut r, choice(top_k), whole_input);
        let out = latent_of(&mut r, shape, sinks, Some(chosen));
        let name = format!("{shape:?}, sinks {sinks}, {top_k} tokens");
        let case = r.case(name, out).of("LatentAttention").in_pairs().without_poison().on_hardware();
        // Many heads take the reference long.
        if shape.heads > 64 { Case { batching: SHORT, ..case } } else { case }
    };
    shapes.map(case).into()
}

/// Two layers that share a choice have one cache of keys.
fn shared_choice() -> Case {
    let mut r = Recorder::new(9);
    let chosen = chosen(&mut r, BlockChoice { index: INDEX, block: 1, score: BlockScore::Sum });
    let first = latent(&mut r, 4, true, Some(chosen));
    let second = latent(&mut r, 4, false, Some(chosen));
    let out = r.graph.add(first, second).unwrap();
    let case = r.case("shared choice", out).of("LatentAttention").in_pairs().in_f32().without_poison();
    assert_eq!(page_bytes(&case.graph, KvType::F32), PAGE_TOKENS * (2 * (9 + 4) + INDEX.head_dim) * 4);
    case
}

/// A score that is no number makes every result that hangs on it one: it must not vanish in a choice.
#[test]
fn what_cannot_be_compared_is_seen_in_the_result() {
    for score in [BlockScore::Sum, BlockScore::BestToken { local: 1 }] {
        let mut r = Recorder::new(3);
        let index = EntryIndex { heads: 2, head_dim: 3, top_k: 2 };
        let choice = BlockChoice { index, block: 2, score };
        let q = r.weight(VOCABULARY, 6, &vec![f32::NAN; VOCABULARY * 6]);
        let q = r.graph.embed(q);
        let k = r.input(3);
        let blocks = r.graph.choose_blocks(IndexInputs { q, k, weights: None }, choice).unwrap();
        let chosen = Chosen { blocks, groups: choice.groups(), block: 2, tail: false };
        let [q, k, v] = [8, 8, 8].map(|width| r.input(width));
        let shape = Attention::grouped(2, 2, 4, 1.0);
        let out = r.graph.attention_over([q, k, v], shape, None, Some(chosen)).unwrap();
        let case = r.case("no number", out).in_pairs();
        let mut backends: Vec<Box<dyn Backend>> =
            vec![Box::new(Reference), Box::new(CpuBackend::new(2, None).unwrap())];
        backends
            .extend(crate::support::devices::devices().into_iter().map(|(_, make)| Box::new(make(7)) as _));
        for backend in backends {
            let [schedule, ..] = case.batching.schedules();
            for ((_, position), row) in run_all(&case, &mut *compile(&case, &*backend, MODES[0]), &schedule) {
                // Up to two blocks there is no choice.
                assert!(position >= 4 || row.iter().all(|v| v.is_finite()), "{score:?} at {position}");
                assert!(position < 8 || row.iter().all(|v| v.is_nan()), "{score:?} at {position}");
            }
        }
    }
}

#[test]
fn what_a_query_sees() {
    let mut r = Recorder::new(1);
    let blocks = r.input(6);
    let chosen = Chosen { blocks, groups: 2, block: 3, tail: true };
    let row = [0.0, 1.0, -1.0, 2.0, -1.0, -1.0];
    assert_eq!(seen(&chosen, &row, 7, 1, 4), [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(seen(&chosen, &row, 8, 2, 4), [6, 7, 8]);
    assert_eq!(seen(&Chosen { tail: false, ..chosen }, &row, 7, 2, 4), [6, 7]);
    assert_eq!(seen(&Chosen { tail: false, ..chosen }, &row, 4, 0, 4), [0, 1, 2, 3, 4]);
    assert!(seen(&Chosen { tail: false, ..chosen }, &[-1.0; 6], 4, 0, 4).is_empty());
}

#[test]
fn what_does_not_fit_is_refused_while_recording() {
    let mut r = Recorder::new(1);
    let (a, b, weights) = (r.input(15), r.input(5), r.input(3));
    let choice = BlockChoice { index: INDEX, block: 2, score: BlockScore::Sum };
    let best = BlockChoice { score: BlockScore::BestToken { local: 2 }, ..choice };
    let inputs = IndexInputs { q: a, k: b, weights: None };
    let vector = r.vector(5);
    let shape = Attention::grouped(5, 1, 3, 1.0);
    let [q, k, v] = [15, 3, 3].map(|width| r.input(width));
    let g = &mut r.graph;
    let blocks = g.choose_blocks(inputs, best).unwrap();
    let chosen = Chosen { blocks, groups: 3, block: 2, tail: false };
    let one = Chosen { groups: 1, ..chosen };
    let windowed = Attention { window: Some(3), ..shape };
    let latent = LatentAttention { heads: 3, nope: 5, rope: 0, rank: 5, value: 1, scale: 1.0 };
    let latent_inputs = LatentInputs { q_nope: a, c: b, rotated: None, sinks: None, chosen: None };
    let joint = LatentWeights::Joint(vector);
    let refused = [
        g.choose_blocks(inputs, BlockChoice { block: 0, ..choice }).err(),
        g.choose_blocks(inputs, BlockChoice { index: EntryIndex { top_k: 0, ..INDEX }, ..choice }).err(),
        g.choose_blocks(inputs, BlockChoice { score: BlockScore::BestToken { local: 5 }, ..choice }).err(),
        g.choose_blocks(IndexInputs { weights: Some(weights), ..inputs }, best).err(),
        g.choose_blocks(IndexInputs { weights: Some(b), ..inputs }, choice).err(),
        g.choose_blocks(IndexInputs { q: b, ..inputs }, choice).err(),
        g.choose_blocks(IndexInputs { k: a, ..inputs }, choice).err(),
        g.attention_over([q, k, v], shape, None, Some(chosen)).err(),
        g.attention_over([q, k, v], windowed, None, Some(one)).err(),
        g.attention_over([q, k, v], shape, None, Some(Chosen { block: 0, ..one })).err(),
        g.latent_attention(LatentInputs { chosen: Some(chosen), ..latent_inputs }, joint, latent).err(),
        g.latent_attention(LatentInputs { sinks: Some(vector), ..latent_inputs }, joint, latent).err(),
        g.latent_attention(LatentInputs { rotated: Some([a, b]), ..latent_inputs }, joint, latent).err(),
        g.layer_norm(a, vector, vector, 0.1).err(),
        g.activate(Activation::ClampedSwiGlu { alpha: 1.0, limit: 1.0 }, Some(a), b).err(),
    ];
    for (i, error) in refused.iter().enumerate() {
        assert!(matches!(error, Some(Error::Shape { .. })), "{i}: {error:?}");
    }
}
