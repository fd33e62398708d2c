//! A byte-level BPE vocabulary of any size, made by rule: the 256 bytes, merges of common letters, ChatML's special
//! tokens. It reads and writes every text; its words are not those of a language.

use crate::tokenizer::byte_level;

/// Name of the splitting rule, as GGUF files give it.
pub(super) const PRE_TOKENIZER: &str = "qwen2";
/// Special tokens, the last ids of the vocabulary.
pub(super) const SPECIAL_TOKENS: [&str; 3] = [END_OF_TEXT, "<|im_start|>", END_OF_TURN];
/// Ends a document; also pads.
pub(super) const END_OF_TEXT: &str = "<|endoftext|>";
/// Ends a turn.
pub(super) const END_OF_TURN: &str = "<|im_end|>";
/// ChatML.
pub(super) const CHAT_TEMPLATE: &str = "{% for message in messages %}\
    {{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
    {% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// English letters from the most to the least frequent.
const LETTERS: &str = "etaoinshrdlcumwfgypbvkjxqz";
/// How the byte-level alphabet shows a space.
const SPACE: &str = "Ġ";

/// Tokens by id, and the merges that make those longer than a byte.
#[derive(Debug)]
pub(super) struct Vocabulary {
    pub(super) tokens: Vec<String>,
    pub(super) merges: Vec<(String, String)>,
    /// Tokens before the special ones; those that no merge makes are unused.
    pub(super) ordinary: usize,
}

impl Vocabulary {
    /// A vocabulary of `size` tokens, at least the bytes and the special ones.
    pub(super) fn new(size: usize) -> Self {
        let ordinary = size.saturating_sub(SPECIAL_TOKENS.len()).max(256);
        let mut tokens: Vec<String> = byte_level::alphabet().map(|(_, c)| c.to_string()).collect();
        let merges: Vec<(String, String)> = merges().take(ordinary - tokens.len()).collect();
        tokens.extend(merges.iter().map(|(left, right)| format!("{left}{right}")));
        // Beyond what merges reach.
        tokens.extend((tokens.len()..ordinary).map(|id| format!("[unused{id}]")));
        tokens.extend(SPECIAL_TOKENS.map(str::to_owned));
        Self { tokens, merges, ordinary }
    }

    /// The id of a special token.
    pub(super) fn special(&self, token: &str) -> usize {
        let at = SPECIAL_TOKENS.iter().position(|special| *special == token);
        self.ordinary + at.expect("one of the special tokens")
    }
}

/// Merges by rank: a space and a letter, two letters, the two together, two pairs of letters. Each makes a text of
/// its own, and common letters come first.
fn merges() -> impl Iterator<Item = (String, String)> {
    let letters: Vec<String> = LETTERS.chars().map(String::from).collect();
    let join = |left: &[String], right: &[String]| -> Vec<(String, String)> {
        diagonal(left.len(), right.len()).map(|(i, j)| (left[i].clone(), right[j].clone())).collect()
    };
    let text = |merges: &[(String, String)]| -> Vec<String> {
        merges.iter().map(|(left, right)| format!("{left}{right}")).collect()
    };
    let spaced = join(&[SPACE.to_owned()], &letters);
    let pairs = join(&letters, &letters);
    let (spaced_texts, pair_texts) = (text(&spaced), text(&pairs));
    let words = join(&spaced_texts, &pair_texts);
    let quads = diagonal(pair_texts.len(), pair_texts.len());
    let quads = quads.map(move |(i, j)| (pair_texts[i].clone(), pair_texts[j].clone()));
    spaced.into_iter().chain(pairs).chain(words).chain(quads)
}

/// Every (i, j) with i < `rows` and j < `cols`, by ascending i + j.
fn diagonal(rows: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..rows + cols)
        .flat_map(move |sum| (sum.saturating_sub(cols - 1)..rows.min(sum + 1)).map(move |i| (i, sum - i)))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn every_token_has_a_text_of_its_own() {
        for size in [259, 512, 1024, 32_000, 151_936] {
            let vocabulary = Vocabulary::new(size);
            assert_eq!(vocabulary.tokens.len(), size);
            assert_eq!(vocabulary.tokens.iter().collect::<HashSet<_>>().len(), size);
            assert_eq!(vocabulary.merges.len(), size - 259);
            assert_eq!(vocabulary.special(END_OF_TURN), size - 1);
        }
    }

    #[test]
    fn merges_join_tokens_of_lower_rank() {
        let vocabulary = Vocabulary::new(151_936);
        let mut known: HashSet<String> = vocabulary.tokens[..256].iter().cloned().collect();
        for (left, right) in &vocabulary.merges {
            assert!(known.contains(left) && known.contains(right), "{left} {right}");
            known.insert(format!("{left}{right}"));
        }
    }

    #[test]
    fn a_vocabulary_beyond_all_merges_is_padded() {
        let vocabulary = Vocabulary::new(500_000);
        assert_eq!(vocabulary.tokens.len(), 500_000);
        assert!(vocabulary.merges.len() < vocabulary.ordinary - 256);
    }
}
