//! The tokens that devices choose are those that the processor chooses of the same logits.

use std::sync::Arc;

use moeflux_compute::backend::{Batch, Executable, Span};
use moeflux_compute::draw::{Adjustment, Draw};
use moeflux_compute::graph::{GraphBuilder, MatrixSpec, Precision};
use moeflux_compute::{DType, Tensor, TokenSet};

use crate::ops::checks::Source;
use crate::support::devices::devices;
use crate::support::random::Random;

/// A graph whose logits of token t are row t of a table.
fn compile(table: &[Vec<f32>], device: &moeflux_compute::gpu::GpuBackend) -> Box<dyn Executable> {
    use moeflux_compute::backend::{Backend, CompileOptions};
    let (rows, width) = (table.len(), table[0].len());
    // Columns of a matrix, of which each token takes one.
    let columns: Vec<f32> = (0..width).flat_map(|i| table.iter().map(move |row| row[i])).collect();
    let mut unit = vec![0.0; rows * rows];
    (0..rows).for_each(|i| unit[i * rows + i] = 1.0);
    let mut graph = GraphBuilder::new();
    let spec = |rows, cols| MatrixSpec { dtype: DType::F32, rows, cols };
    let tokens = graph.weight("tokens", spec(rows, rows));
    let matrix = graph.weight("matrix", spec(width, rows));
    let x = graph.embed(tokens);
    let logits = graph.linear(x, matrix, None, Precision::F32).unwrap();
    let weights =
        vec![Tensor::from_f32(rows, rows, &unit).unwrap(), Tensor::from_f32(width, rows, &columns).unwrap()];
    let options = CompileOptions { max_rows: 16, ..CompileOptions::default() };
    device.compile(&graph.finish(logits), weights, options).unwrap()
}

fn run(executable: &mut dyn Executable, draws: &[Option<Draw>], vocab_size: usize) -> Vec<Option<u32>> {
    let tokens: Vec<u32> = (0..draws.len() as u32).collect();
    executable.reserve_pages(1).unwrap();
    let spans = [Span { rows: 0..draws.len(), start: 0, pages: &[0], ..Span::default() }];
    let batch = Batch { tokens: &tokens, spans: &spans, outputs: &tokens, ..Batch::default() };
    let experts = vec![];
    let source = &mut Source { experts: &experts, order: 0 };
    executable.run_and_draw(&batch, source, &mut || draws.to_vec(), vocab_size).unwrap()
}

/// What the processor chooses of the first `vocab_size` logits.
fn expected(row: &[f32], draw: &Draw, vocab_size: usize) -> Option<u32> {
    let mut logits = row[..vocab_size].to_vec();
    for change in &draw.adjustments {
        let logit = &mut logits[change.token as usize];
        *logit = change.of(*logit);
    }
    if let Some(allowed) = &draw.allowed {
        allowed.forbid_others(&mut logits);
    }
    draw.choose(&logits)
}

/// Ways to choose from a vocabulary: each rule by itself and with others, few and many tokens, changed logits.
fn ways(random: &mut Random, vocab_size: usize) -> Vec<Option<Draw>> {
    let tempered =
        |temperature, top_k, top_p, min_p| Draw { temperature, top_k, top_p, min_p, ..Draw::default() };
    let forbidden = |token| Adjustment { token, add: f32::NEG_INFINITY, repetition: 1.0, subtract: 0.0 };
    let changed = |token| Adjustment { token, add: 0.5, repetition: 1.3, subtract: 0.25 };
    let mut ways = vec![
        tempered(0.0, 3, 0.5, 0.5),
        tempered(1.0, 0, 1.0, 0.0),
        tempered(0.7, 0, 1.0, 0.0),
        tempered(8.0, 0, 1.0, 0.0),
        tempered(0.8, 0, 0.9, 0.0),
        tempered(1.5, 0, 0.02, 0.0),
        tempered(1.0, 0, 0.999_99, 0.0),
        tempered(1.0, 1, 1.0, 0.0),
        tempered(1.2, 40, 1.0, 0.0),
        tempered(1.2, vocab_size - vocab_size / 3, 1.0, 0.0),
        tempered(2.0, vocab_size + 5, 0.5, 0.0),
        tempered(2.0, 50, 0.8, 0.01),
        tempered(3.0, 0, 1.0, 0.2),
        tempered(0.01, 0, 1.0, 1e-6),
        tempered(1.5, vocab_size - vocab_size / 4, 0.95, 1e-4),
        tempered(0.9, vocab_size / 2, 0.3, 0.0),
    ];
    let all = vocab_size as u32;
    ways[0].adjustments = (0..all / 2).map(forbidden).collect();
    ways[1].adjustments = (all / 3..all / 2).map(changed).collect();
    ways[4].adjustments = vec![forbidden(all - 1), changed(0), forbidden(all / 2)];
    // Every third token; one alone; none; all.
    let set = |tokens: &mut dyn Iterator<Item = u32>| {
        let mut set = TokenSet::none(vocab_size);
        tokens.for_each(|token| set.insert(token));
        Some(Arc::new(set))
    };
    ways[2].allowed = set(&mut (0..all).step_by(3));
    ways[4].allowed = set(&mut (all / 3..all));
    ways[5].allowed = set(&mut (all - 1..all));
    ways[8].allowed = set(&mut (0..0));
    ways[12].allowed = set(&mut (0..all));
    for way in &mut ways {
        way.random = random.next();
    }
    ways.into_iter().map(Some).chain([None]).collect()
}

/// Logits of every kind that matters to sums and ranks; those that are padding may be larger than all.
fn rows(random: &mut Random, vocab: usize, vocab_size: usize) -> Vec<Vec<f32>> {
    let mut rows: Vec<Vec<f32>> = vec![
        (0..vocab).map(|_| random.normal() * 4.0).collect(),
        (0..vocab).map(|_| random.normal() * 0.3).collect(),
        vec![0.25; vocab],
        (0..vocab).map(|i| if i % 2 == 0 { 1.0 } else { 0.5 }).collect(),
        (0..vocab).map(|_| random.normal()).collect(),
    ];
    rows[4][vocab_size / 2] = 90.0;
    rows.iter_mut().for_each(|row| row[vocab_size..].fill(99.0));
    rows
}

#[test]
fn devices_choose_the_tokens_that_the_processor_does() {
    for (vocab, vocab_size) in [(9, 9), (70, 61), (5003, 4991)] {
        let mut random = Random::new(vocab as u64);
        let mut table = rows(&mut random, vocab, vocab_size);
        // Of many rows with many tokens, groups look at more of them.
        let rounds = if vocab > 1000 { 1 } else { 2 };
        if rounds == 1 {
            table.extend(rows(&mut random, vocab, vocab_size));
        }
        for (name, device) in devices() {
            let mut executable = compile(&table, &device(3));
            assert!(executable.draws_tokens());
            let mut differ = 0;
            for round in 0..rounds {
                // Each row's ways, together with other rows' others; more rows than the buffers had room for.
                let ways: Vec<_> = table.iter().map(|_| ways(&mut random, vocab_size)).collect();
                for way in 0..ways[0].len() {
                    let count = if way == 0 && round == 0 { 1 } else { table.len() };
                    let draws: Vec<Option<Draw>> =
                        (0..count).map(|row| ways[row][(way + row * 4) % ways[0].len()].clone()).collect();
                    let chosen = run(&mut *executable, &draws, vocab_size);
                    for (row, (draw, chosen)) in draws.iter().zip(&chosen).enumerate() {
                        let right = draw.as_ref().and_then(|draw| expected(&table[row], draw, vocab_size));
                        assert_eq!(*chosen, right, "{name}, {vocab_size} tokens, row {row}: {draw:?}");
                        differ += usize::from(right.is_some_and(|token| token > 0));
                    }
                }
            }
            assert!(differ > 50, "{name}, {vocab_size} tokens: {differ}");
            // What was changed is as it was.
            let mut logits = vec![];
            executable.read_logits(1, &mut logits).unwrap();
            assert_eq!(logits, table[1]);
        }
    }
}

#[test]
fn a_logit_that_is_not_finite_gives_no_token() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 640, 699] {
            // The product with zero of another token's column is NaN as well: one token alone.
            let mut row = vec![1.0; 700];
            row[at] = bad;
            for (name, device) in devices() {
                let mut executable = compile(&[row.clone()], &device(3));
                for draw in ways(&mut Random::new(3), 650) {
                    assert_eq!(run(&mut *executable, &[draw], 650), [None], "{name}: {bad} at {at}");
                }
            }
        }
    }
}

#[test]
fn nothing_is_chosen_where_everything_is_forbidden() {
    let all = |temperature| Draw {
        temperature,
        adjustments: (0..70)
            .map(|token| Adjustment { token, add: f32::NEG_INFINITY, repetition: 1.0, subtract: 0.0 })
            .collect(),
        ..Draw::default()
    };
    for (name, device) in devices() {
        let mut executable = compile(&[vec![1.0; 70]], &device(3));
        for temperature in [0.0, 1.0] {
            assert_eq!(run(&mut *executable, &[Some(all(temperature))], 70), [None], "{name}");
        }
    }
}
