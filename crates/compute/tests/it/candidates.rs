//! The most likely tokens that a device finds are those of the logits.

use moeflux_compute::backend::{Batch, Candidates, Executable, Span};
use moeflux_compute::graph::{GraphBuilder, MatrixSpec, Precision};
use moeflux_compute::{DType, Tensor};

use crate::ops::checks::Source;
use crate::support::devices::devices;
use crate::support::random::Random;

/// Candidates of a row, at most.
const MOST: usize = 256;

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

fn find(executable: &mut dyn Executable, rows: usize, vocab_size: usize) -> Vec<Candidates> {
    let tokens: Vec<u32> = (0..rows as u32).collect();
    executable.reserve_pages(1).unwrap();
    let spans = [Span { rows: 0..rows, start: 0, pages: &[0], slots: Default::default() }];
    let batch = Batch { tokens: &tokens, spans: &spans, outputs: &tokens };
    let experts = vec![];
    executable.run_candidates(&batch, &mut Source { experts: &experts, order: 0 }, vocab_size).unwrap()
}

/// `vocab_size` of a row can be chosen; the rest is padding.
fn check(row: &[f32], vocab_size: usize, found: &Candidates) {
    let tokens = &row[..vocab_size];
    let best = tokens.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    assert_eq!(found.maximum, best);
    let total: f64 = tokens.iter().map(|x| f64::from(x - best).exp()).sum();
    assert!((f64::from(found.total) / total - 1.0).abs() < 1e-5, "{} is not {total}", found.total);
    let mut right: Vec<(u32, f32)> =
        (0..).zip(tokens.iter().copied()).filter(|(_, x)| *x >= found.least).collect();
    if right.len() > MOST {
        right.clear();
    } else {
        // As many as there are segments of 32 or more, or 128.
        assert!(right.len() >= (vocab_size / 32).min(128), "{} of {vocab_size}", right.len());
    }
    let mut got = found.tokens.clone();
    got.sort_unstable_by_key(|(id, _)| *id);
    assert_eq!(got, right);
}

#[test]
fn candidates_are_the_largest_logits() {
    for (vocab, vocab_size) in [(9, 9), (70, 61), (1000, 1000), (2500, 2491), (20011, 20011)] {
        let mut random = Random::new(vocab as u64);
        let mut table: Vec<Vec<f32>> =
            (0..3).map(|_| (0..vocab).map(|_| random.normal() * 4.0).collect()).collect();
        // Flat, and one far above the others; what is padding may be larger than all.
        table.push(vec![0.25; vocab]);
        table[1][vocab / 2] = 90.0;
        for row in &mut table {
            row[vocab_size..].fill(99.0);
        }
        for (_, device) in devices() {
            let mut executable = compile(&table, &device(3));
            assert!(executable.has_candidates());
            // More rows than the buffers had room for.
            for rows in [1, 4] {
                let found = find(&mut *executable, rows, vocab_size);
                assert_eq!(found.len(), rows);
                table.iter().zip(&found).for_each(|(row, found)| check(row, vocab_size, found));
            }
            let mut logits = vec![];
            executable.read_logits(2, &mut logits).unwrap();
            assert_eq!(logits, table[2]);
        }
    }
}

#[test]
fn a_logit_that_is_not_finite_is_told() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 640, 699] {
            let mut table = vec![vec![1.0; 700]; 2];
            table[1][at] = bad;
            for (_, device) in devices() {
                // The product with zero of another token's column is NaN as well: one token alone.
                let alone = [table[1].clone()];
                let found = find(&mut *compile(&alone, &device(3)), 1, 650);
                assert!(found[0].maximum.is_nan(), "{bad} at {at}: {:?}", found[0]);
            }
        }
    }
}
