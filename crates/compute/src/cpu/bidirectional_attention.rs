//! Attention of every row to all rows of its span.
//!
//! A task is a block of rows and one head. Keys of a head are packed first, so that a block of them is read from the
//! nearest caches for all rows. Softmax is computed online, as in [`super::attention`]; a row visits keys in order
//! whatever else is in the batch.

use super::executable::{CpuCall, CpuExecutable, CpuOp};
use super::head_group::{Ahead, HeadSums, KeyBlock, Queries};
use super::shared::SharedMut;
use crate::Result;
use crate::graph::{BidirectionalAttentionOp, Graph, Op};

/// Rows that read a block of keys together.
const ROW_BLOCK: usize = 16;

/// Keys of a block.
const KEY_BLOCK: usize = 64;

/// Bytes of packed keys for batches of `max_rows` rows.
pub(super) fn scratch_bytes(graph: &Graph, max_rows: usize) -> usize {
    let width = |op: &Op| match op {
        Op::BidirectionalAttention(op) => op.k.width(),
        _ => 0,
    };
    let widest = graph.nodes().iter().map(|node| width(&node.op)).max().unwrap_or(0);
    (widest * size_of::<f32>()).saturating_mul(max_rows)
}

impl CpuOp for BidirectionalAttentionOp {
    fn run(&self, cpu: &mut CpuExecutable, call: &mut CpuCall<'_>) -> Result<()> {
        let Self { q, k, v, heads, scale } = *self;
        let (width, dim) = (q.width(), q.width() / heads);
        cpu.write(call.out(), call.tokens(), |cpu, out| {
            let (pool, simd) = (&cpu.context.pool, cpu.context.simd);
            let [q, k, v] = [q, k, v].map(|value| cpu.values.of(value));
            let out = SharedMut::new(out);
            let mut packed = vec![];
            for span in call.batch.spans {
                let (first, n) = (span.rows.start, span.rows.len());
                pack(&k[first * width..(first + n) * width], dim, heads, &mut packed);
                let blocks = n.div_ceil(ROW_BLOCK);
                pool.run(blocks * heads, &|task| {
                    let (block, head) = (task % blocks, task / blocks);
                    let rows = first + block * ROW_BLOCK..first + n.min((block + 1) * ROW_BLOCK);
                    let mut states = vec![(f32::NEG_INFINITY, 0.0); rows.len()];
                    let mut sums = vec![0.0; rows.len() * dim];
                    let mut scores = vec![0.0; rows.len() * KEY_BLOCK];
                    let q = &q[rows.start * width + head * dim..];
                    let keys = &packed[head * n * dim..(head + 1) * n * dim];
                    for (index, keys) in keys.chunks(KEY_BLOCK * dim).enumerate() {
                        let from = first + index * KEY_BLOCK;
                        let to = from + keys.len() / dim;
                        let values = &v[from * width + head * dim..(to - 1) * width + (head + 1) * dim];
                        HeadSums { states: &mut states, sums: &mut sums }.add(
                            simd,
                            Queries { q, stride: width, dim, scale },
                            KeyBlock { keys, values, stride: width },
                            &mut scores,
                            [Ahead::NONE; 2],
                        );
                    }
                    for (i, row) in rows.enumerate() {
                        let at = row * width + head * dim;
                        // SAFETY: a task writes only its head of its rows.
                        let out = unsafe { out.part(at..at + dim) };
                        let total = states[i].1;
                        out.iter_mut().zip(&sums[i * dim..]).for_each(|(o, s)| *o = s / total);
                    }
                });
            }
            Ok(())
        })
    }
}

/// Makes (rows, heads · dim) `keys` (heads, rows, dim).
fn pack(keys: &[f32], dim: usize, heads: usize, packed: &mut Vec<f32>) {
    packed.clear();
    for head in 0..heads {
        for row in keys.chunks_exact(heads * dim) {
            packed.extend_from_slice(&row[head * dim..(head + 1) * dim]);
        }
    }
}
