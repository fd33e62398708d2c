//! [`TokenSet`]: tokens of a vocabulary, as those that may come next.

/// Tokens of a vocabulary, a bit each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenSet {
    words: Vec<u32>,
}

impl TokenSet {
    /// None of `vocab_size` tokens.
    #[must_use]
    pub fn none(vocab_size: usize) -> Self {
        Self { words: vec![0; vocab_size.div_ceil(32)] }
    }

    /// Adds a token; one beyond the vocabulary changes nothing.
    pub fn insert(&mut self, token: u32) {
        if let Some(word) = self.words.get_mut(token as usize / 32) {
            *word |= 1 << (token % 32);
        }
    }

    /// Whether it has the token.
    #[must_use]
    pub fn contains(&self, token: u32) -> bool {
        self.words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 != 0)
    }

    /// Token 32 · i + j is bit j, the least significant first, of word i.
    #[must_use]
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// As [`TokenSet::words`], to be changed.
    pub fn words_mut(&mut self) -> &mut [u32] {
        &mut self.words
    }

    /// Sets the logits of all other tokens to negative infinity.
    pub fn forbid_others(&self, logits: &mut [f32]) {
        for (i, logits) in logits.chunks_mut(32).enumerate() {
            match self.words.get(i).copied().unwrap_or(0) {
                u32::MAX => {}
                0 => logits.fill(f32::NEG_INFINITY),
                word => {
                    let others = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
                    others.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn others_are_forbidden() {
        let mut set = TokenSet::none(70);
        [0, 31, 33, 69, 96, u32::MAX].into_iter().for_each(|token| set.insert(token));
        set.words_mut()[1] |= 1 << 31;
        let mut logits = vec![1.0; 100];
        set.forbid_others(&mut logits);
        let left: Vec<usize> = (0..100).filter(|token| logits[*token] == 1.0).collect();
        assert_eq!(left, [0, 31, 33, 63, 69]);
        assert!(left.iter().all(|token| set.contains(*token as u32)));
        assert!(!set.contains(32) && !set.contains(5000));
        set.words_mut().fill(u32::MAX);
        let mut logits = vec![1.0; 70];
        set.forbid_others(&mut logits);
        assert_eq!(logits, [1.0; 70]);
    }
}
