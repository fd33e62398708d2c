//! Hidden states and embeddings.
//!
//! A hidden state is what the model's head multiplies: a token's row after the last layer and the final norm. An embedding is
//! the hidden state of a text's last token, which has seen all of it, or the sum over all tokens; of length 1, so that the
//! product of two is the cosine of their angle. Nothing of the model is made for it: what generates text is evaluated as ever,
//! without the head.
//!
//! Not here: poolings by the token that texts begin with, projections behind the model, instructions that some models expect
//! before a text.

use moeflux_compute::backend::Batch;

use crate::batch::Part;
use crate::engine::{Engine, Outputs};
use crate::session::Session;
use crate::{Error, Result};

/// How hidden states become one embedding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Pooling {
    /// That of the last token.
    #[default]
    Last,
    /// The mean over all tokens.
    Mean,
}

impl Pooling {
    /// The hidden states that it takes.
    pub(crate) fn outputs(self) -> Outputs {
        match self {
            Self::Last => Outputs::Last,
            Self::Mean => Outputs::All,
        }
    }
}

/// Hidden states on their way to an embedding: their sum, in the order of their tokens, however those are divided into chunks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pooled {
    /// (hidden_size), or nothing yet.
    sum: Vec<f64>,
}

impl Pooled {
    fn add(&mut self, hidden: &[f32]) {
        self.sum.resize(hidden.len(), 0.0);
        self.sum.iter_mut().zip(hidden).for_each(|(sum, value)| *sum += f64::from(*value));
    }

    /// The embedding, (hidden_size), of length 1; all zeros stay what they are. A mean has the direction of the sum.
    pub(crate) fn embedding(&self) -> Vec<f32> {
        let length = self.sum.iter().map(|value| value * value).sum::<f64>().sqrt();
        let divisor = if length > 0.0 { length } else { 1.0 };
        self.sum.iter().map(|value| (value / divisor) as f32).collect()
    }
}

impl Engine {
    /// Width of hidden states and embeddings.
    pub fn hidden_size(&self) -> usize {
        self.model().graph.hidden().expect("graphs of models end with their head").width()
    }

    /// Appends `tokens` to `session` and returns hidden states (outputs, hidden_size), row-major: what the head multiplies, after
    /// the final norm. The session is afterwards as after [`Engine::eval`].
    ///
    /// After an error the session is as it was before the call.
    ///
    /// # Errors
    /// As [`Engine::eval`].
    pub fn eval_hidden(
        &mut self,
        session: &mut Session,
        tokens: &[u32],
        outputs: Outputs,
    ) -> Result<Vec<f32>> {
        let mut all = vec![];
        self.eval_with(session, tokens, outputs, |engine, batch, first| {
            engine.run_hidden(batch, |output| first + output, |_, row| all.extend_from_slice(row))
        })?;
        Ok(all)
    }

    /// The embedding, (hidden_size), of a text of at least one token, in a session of its own.
    ///
    /// # Errors
    /// As [`Engine::eval`]; [`Error::Option`] without tokens.
    pub fn embed(&mut self, tokens: &[u32], pooling: Pooling) -> Result<Vec<f32>> {
        if tokens.is_empty() {
            return Err(no_tokens());
        }
        let (mut session, mut pooled) = (self.session(), Pooled::default());
        self.eval_with(&mut session, tokens, pooling.outputs(), |engine, batch, first| {
            engine.run_hidden(batch, |output| first + output, |_, row| pooled.add(row))
        })?;
        Ok(pooled.embedding())
    }

    /// Appends the tokens of every part to its session, in one batch, and their hidden states to its sum. On the CPU a sum does
    /// not depend on the other parts.
    ///
    /// After an error all sessions and sums are as they were before the call.
    ///
    /// # Errors
    /// As [`Engine::eval_batch`].
    pub(crate) fn eval_pooled(&mut self, parts: &mut [Part<'_>], pooled: &mut [&mut Pooled]) -> Result<()> {
        let mut sums: Vec<Pooled> = pooled.iter().map(|pooled| (**pooled).clone()).collect();
        self.append(parts, |engine, batch, parts| {
            if batch.tokens.is_empty() {
                return Ok(());
            }
            // Part and position of every output.
            let mut outputs: Vec<(usize, usize)> = vec![];
            for (index, part) in parts.iter().enumerate() {
                let end = part.session.position() + part.tokens.len();
                outputs.extend((end - part.output_rows()..end).map(|position| (index, position)));
            }
            engine.run_hidden(
                batch,
                |output| outputs[output].1,
                |output, row| sums[outputs[output].0].add(row),
            )
        })?;
        pooled.iter_mut().zip(sums).for_each(|(pooled, sum)| **pooled = sum);
        Ok(())
    }

    /// Runs one batch without the head and calls `visit` with every output's number and hidden state; `position` says where an
    /// output is in its sequence.
    fn run_hidden(
        &mut self,
        batch: &Batch<'_>,
        position: impl Fn(usize) -> usize,
        mut visit: impl FnMut(usize, &[f32]),
    ) -> Result<()> {
        let width = self.hidden_size();
        let (mut output, mut bad) = (0, None);
        let mut each = |rows: &[f32]| {
            for row in rows.chunks_exact(width) {
                // No early end within a row: so it becomes vector instructions.
                if row.iter().fold(false, |bad, value| bad | !value.is_finite()) {
                    bad.get_or_insert(output);
                }
                visit(output, row);
                output += 1;
            }
        };
        self.counted(batch.tokens.len(), |executable, experts| {
            executable.run_hidden(batch, experts, &mut each)
        })?;
        bad.map_or(Ok(()), |output| Err(self.not_finite(position(output))))
    }
}

/// What to say of a text without tokens.
pub(crate) fn no_tokens() -> Error {
    Error::Option { option: "input", expected: "at least one token".into(), got: "none".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embeddings_have_length_one() {
        let of = |rows: &[&[f32]]| {
            let mut pooled = Pooled::default();
            rows.iter().for_each(|row| pooled.add(row));
            pooled.embedding()
        };
        assert_eq!(of(&[&[3.0, -4.0]]), [0.6, -0.8]);
        assert_eq!(of(&[&[1.0, 2.0], &[5.0, 6.0]]), [0.6, 0.8]);
        assert_eq!(of(&[&[1e38, 0.0], &[1e38, 0.0]]), [1.0, 0.0]);
        assert_eq!(of(&[&[0.0, 0.0]]), [0.0, 0.0]);
    }
}
