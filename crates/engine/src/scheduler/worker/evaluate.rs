//! Evaluating one batch of sequences of a kind.

use moeflux_compute::draw::Draw;

use super::Worker;
use crate::Result;
use crate::batch::Part;
use crate::engine::Outputs;
use crate::scheduler::sequence::{Kind, Sequence, Task};

/// What a sequence got of a batch.
pub(super) enum Row {
    /// Nothing: it is in the middle of its prompt.
    None,
    Logits(Vec<f32>),
    /// The token that was chosen where the logits are.
    Token(u32),
}

impl Row {
    fn of(logits: Vec<f32>) -> Self {
        if logits.is_empty() { Self::None } else { Self::Logits(logits) }
    }
}

impl Worker<'_> {
    /// Evaluates what was given to sequences of a kind.
    pub(super) fn evaluate(&mut self, kind: Kind, given: &[usize]) -> Result<Vec<Row>> {
        if kind == Kind::Embeddings {
            return self.embed(given);
        }
        let vocab_size = self.shared.tokenizer.vocab_size();
        let draws_tokens = self.engine.draws_tokens();
        let drawing = self.running.iter().filter(|_| draws_tokens);
        let draws: Vec<Option<Draw>> = drawing.map(Sequence::draw).collect();
        let mut parts: Vec<Part<'_>> =
            self.running.iter_mut().zip(given).map(|(sequence, given)| part(sequence, *given)).collect();
        if !draws_tokens {
            return Ok(self.engine.eval_batch(&mut parts)?.into_iter().map(Row::of).collect());
        }
        let has_output: Vec<bool> =
            parts.iter().map(|part| part.outputs.is_some() && !part.tokens.is_empty()).collect();
        let chosen = self.engine.eval_and_draw(&mut parts, &draws, vocab_size)?;
        let mut rows = vec![];
        let mut outputs = 0;
        for (token, has_output) in chosen.into_iter().zip(has_output) {
            rows.push(match token {
                Some(token) => Row::Token(token),
                None if has_output => Row::Logits(self.engine.read_logits(outputs)?),
                None => Row::None,
            });
            outputs += usize::from(has_output);
        }
        Ok(rows)
    }

    /// Evaluates inputs of embeddings.
    fn embed(&mut self, given: &[usize]) -> Result<Vec<Row>> {
        let (mut parts, mut pooled) = (vec![], vec![]);
        for (sequence, given) in self.running.iter_mut().zip(given).filter(|(_, given)| **given > 0) {
            let Sequence { task: Task::Embed(embedding), tokens, session, .. } = sequence else { continue };
            let from = session.position();
            let outputs = embedding.outputs(from + given == tokens.len());
            parts.push(Part { tokens: &tokens[from..from + given], session, outputs });
            pooled.push(&mut embedding.pooled);
        }
        self.engine.eval_pooled(&mut parts, &mut pooled)?;
        Ok(self.running.iter().map(|_| Row::None).collect())
    }

    /// The same, each by itself.
    pub(super) fn evaluate_one_by_one(&mut self, kind: Kind, given: &[usize]) -> Vec<Result<Row>> {
        let mut results = vec![];
        if kind == Kind::Embeddings {
            for index in 0..given.len() {
                let only: Vec<usize> =
                    given.iter().enumerate().map(|(i, given)| if i == index { *given } else { 0 }).collect();
                results.push(self.embed(&only).map(|_| Row::None));
            }
            return results;
        }
        for (sequence, given) in self.running.iter_mut().zip(given) {
            let result = self.engine.eval_batch(&mut [part(sequence, *given)]);
            results.push(result.map(|mut logits| Row::of(logits.pop().unwrap_or_default())));
        }
        results
    }
}

/// The next `given` tokens of a sequence, with logits if they are its last.
fn part<'a>(sequence: &'a mut Sequence<'_>, given: usize) -> Part<'a> {
    let from = sequence.session.position();
    let last = from + given == sequence.tokens.len();
    Part {
        tokens: &sequence.tokens[from..from + given],
        session: &mut sequence.session,
        outputs: last.then_some(Outputs::Last),
    }
}
