//! How well a model predicts a text, and how far its predictions are from those of another run.
//!
//! The text is cut into windows that do not overlap; the second half of each is scored, so that every scored token has
//! at least half a window before it. This is what llama.cpp's perplexity tool does, beginning-of-text token included,
//! so figures can be compared. A text that is shorter than a window is one window of its own length.

mod base_file;
mod statistics;

pub use base_file::{BaseReader, BaseWriter};
pub use statistics::{Divergence, Mean};

use crate::engine::{Engine, Outputs};
use crate::tokenizer::{AddSpecial, Tokenizer};
use crate::{Error, Result};

/// Rows of logits that are kept at once: a compromise between speed and the memory of a large vocabulary.
const ROWS: usize = 64;
/// Shortest window: a token before the first scored one, and one that is scored.
const MIN_WINDOW: usize = 4;

/// Windows of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Windows {
    tokens: Vec<u32>,
    length: usize,
}

/// What the model expected at a scored token.
#[derive(Debug, Clone, Copy)]
pub struct Prediction<'a> {
    /// (vocab_size), f32: natural logarithms of probabilities.
    pub log_probabilities: &'a [f32],
    /// The token that the text has there.
    pub token: u32,
}

impl Windows {
    /// Cuts `text` into windows of `length` tokens; what is left over at the end is not used.
    ///
    /// # Errors
    /// [`Error::Option`] for a window or a text of fewer than four tokens, or if the text cannot be encoded.
    pub fn new(text: &str, tokenizer: &Tokenizer, length: usize) -> Result<Self> {
        let too_short = |option, got: String| {
            Err(Error::Option { option, expected: format!("at least {MIN_WINDOW} tokens"), got })
        };
        if length < MIN_WINDOW {
            return too_short("window", length.to_string());
        }
        let mut tokens = tokenizer.encode(text, AddSpecial::Yes)?;
        if tokens.len() < MIN_WINDOW {
            return too_short("text", format!("{} tokens", tokens.len()));
        }
        let length = length.min(tokens.len());
        tokens.truncate(tokens.len() / length * length);
        let begins = tokenizer.encode("", AddSpecial::Yes)?;
        if let Some(bos) = tokenizer.bos_id().filter(|bos| begins.first() == Some(bos)) {
            tokens.chunks_exact_mut(length).for_each(|window| window[0] = bos);
        }
        Ok(Self { tokens, length })
    }

    /// Number of windows.
    pub fn count(&self) -> usize {
        self.tokens.len() / self.length
    }

    /// Tokens of a window.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Tokens of all windows, one after the other.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens that are scored, over all windows.
    pub fn scored(&self) -> usize {
        self.count() * (self.length - 1 - self.length / 2)
    }

    /// Evaluates window number `index` and gives the prediction of each scored token to `visit`.
    ///
    /// # Errors
    /// As [`Engine::eval`], or what `visit` returns.
    pub fn evaluate<E: From<Error>>(
        &self,
        engine: &mut Engine,
        index: usize,
        mut visit: impl FnMut(Prediction<'_>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        let window = &self.tokens[index * self.length..][..self.length];
        let vocab_size = engine.model().graph.vocab_size();
        let first = self.length / 2;
        let mut session = engine.session();
        engine.eval(&mut session, &window[..first], Outputs::Last)?;
        let mut row = vec![];
        let mut next = first + 1;
        for part in window[first..self.length - 1].chunks(ROWS) {
            let logits = engine.eval(&mut session, part, Outputs::All)?;
            for logits in logits.chunks_exact(vocab_size) {
                log_softmax(logits, &mut row);
                visit(Prediction { log_probabilities: &row, token: window[next] })?;
                next += 1;
            }
        }
        Ok(())
    }
}

/// Natural logarithms of the probabilities that `logits` mean, summed in f64.
fn log_softmax(logits: &[f32], out: &mut Vec<f32>) {
    let max = logits.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    let log_sum = f64::from(max) + sum.ln();
    out.clear();
    out.extend(logits.iter().map(|l| (f64::from(*l) - log_sum) as f32));
}

#[cfg(test)]
mod tests {
    use super::log_softmax;

    #[test]
    fn probabilities_sum_to_one_whatever_the_offset() {
        for offset in [0.0, 1e4, -1e4] {
            let mut row = vec![];
            log_softmax(&[offset, offset + 1.0, offset + 2.0], &mut row);
            let expected = [-2.407_606, -1.407_606, -0.407_606];
            assert!(row.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{row:?}");
        }
    }
}
