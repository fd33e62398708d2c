//! Evaluating one batch of sequences of a kind.

use std::panic::resume_unwind;
use std::thread::available_parallelism;

use moeflux_compute::draw::Draw;

use super::Worker;
use crate::Result;
use crate::batch::Part;
use crate::decoding::Decoding;
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
        let (mut parts, mut tasks): (Vec<Part<'_>>, Vec<&mut Task<'_>>) = self
            .running
            .iter_mut()
            .zip(given)
            .map(|(sequence, given)| part_and_task(sequence, *given))
            .unzip();
        if !self.engine.draws_tokens() {
            return Ok(self.engine.eval_batch(&mut parts)?.into_iter().map(Row::of).collect());
        }
        let has_output: Vec<bool> =
            parts.iter().map(|part| part.outputs.is_some() && !part.tokens.is_empty()).collect();
        let mut draws = || draws(tasks.iter_mut().zip(&has_output).map(|(task, has)| (&mut **task, *has)));
        let chosen = self.engine.eval_and_draw(&mut parts, &mut draws, vocab_size)?;
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

/// How the next token of each task that has an output is to be chosen where its logits are; constraints are asked at the same
/// time.
pub(super) fn draws<'a, 't: 'a>(tasks: impl Iterator<Item = (&'a mut Task<'t>, bool)>) -> Vec<Option<Draw>> {
    let mut decodings: Vec<Option<&mut Decoding<'t>>> = tasks
        .map(|(task, has_output)| match task {
            Task::Answer(answering) if has_output => Some(&mut answering.decoding),
            _ => None,
        })
        .collect();
    let draw =
        |decoding: &mut Option<&mut Decoding<'t>>| decoding.as_mut().and_then(|decoding| decoding.draw());
    let constrained = decodings.iter().flatten().filter(|decoding| decoding.is_constrained()).count();
    if constrained < 2 {
        return decodings.iter_mut().map(draw).collect();
    }
    let threads = available_parallelism().map_or(1, usize::from).min(constrained);
    let each = decodings.len().div_ceil(threads);
    std::thread::scope(|scope| {
        let parts: Vec<_> = decodings
            .chunks_mut(each)
            .map(|part| scope.spawn(move || part.iter_mut().map(draw).collect::<Vec<_>>()))
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// The next `given` tokens of a sequence, with logits if they are its last.
fn part<'a>(sequence: &'a mut Sequence<'_>, given: usize) -> Part<'a> {
    part_and_task(sequence, given).0
}

/// As [`part`], and what is made of the logits.
pub(super) fn part_and_task<'a, 't>(
    sequence: &'a mut Sequence<'t>,
    given: usize,
) -> (Part<'a>, &'a mut Task<'t>) {
    let from = sequence.session.position();
    let last = from + given == sequence.tokens.len();
    let part = Part {
        tokens: &sequence.tokens[from..from + given],
        session: &mut sequence.session,
        outputs: last.then_some(Outputs::Last),
    };
    (part, &mut sequence.task)
}
