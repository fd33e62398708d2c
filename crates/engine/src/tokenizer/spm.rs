//! SentencePiece byte-pair merging driven by token scores, as GGUF files of model `llama` store it.
//!
//! Adjacent symbols whose text together is a token are merged, highest token score first and leftmost among equal
//! scores, until nothing merges; what is then no token is spelled in byte tokens. The `tokenizers` crate cannot express
//! this exactly: its merges have ranks that are all different and join tokens only, while here tokens share scores
//! and a merge may begin from a character that is no token itself.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// The white space of SentencePiece vocabularies, U+2581.
pub(super) const ESCAPED_SPACE: &str = "\u{2581}";

/// Vocabulary of a SentencePiece tokenizer.
#[derive(Debug)]
pub(super) struct Spm {
    ids: HashMap<String, u32>,
    /// Score of every token.
    scores: Vec<f32>,
    /// Token for each byte, where the vocabulary has one.
    byte_ids: Box<[Option<u32>; 256]>,
    unk: Option<u32>,
}

/// A byte that neither a byte token, nor a one-character token, nor an unknown token covers.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Unencodable(pub(super) u8);

/// A run of text that is one symbol now; removed symbols have no length.
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

/// A merge that was possible when it was queued.
struct Candidate {
    score: f32,
    left: usize,
    right: usize,
    /// Length of both symbols together, to notice that one has changed since.
    len: usize,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Candidate {}

impl Spm {
    /// `ids` and `scores` describe the same tokens; no score is NaN.
    pub(super) fn new(ids: HashMap<String, u32>, scores: Vec<f32>, unk: Option<u32>) -> Self {
        // -0.0 and 0.0 are one score: equal scores merge from the left.
        let scores = scores.into_iter().map(|score| score + 0.0).collect();
        let byte_ids = Box::new(std::array::from_fn(|byte| {
            let literal =
                u8::try_from(byte).ok().filter(u8::is_ascii).map(|byte| char::from(byte).to_string());
            ids.get(&format!("<0x{byte:02X}>")).or_else(|| ids.get(&literal?)).copied()
        }));
        Self { ids, scores, byte_ids, unk }
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    /// Appends the tokens of `text`, whose spaces are already escaped.
    pub(super) fn encode(&self, text: &str, output: &mut Vec<u32>) -> Result<(), Unencodable> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                prev: index.checked_sub(1),
                next: Some(index + 1),
            })
            .collect();
        let Some(last) = symbols.last_mut() else { return Ok(()) };
        last.next = None;

        let mut queue = BinaryHeap::new();
        for right in 1..symbols.len() {
            queue.extend(self.candidate(text, &symbols, Some(right - 1), Some(right)));
        }
        while let Some(Candidate { left, right, len, .. }) = queue.pop() {
            let (left_len, right_len) = (symbols[left].len, symbols[right].len);
            if left_len == 0 || right_len == 0 || left_len + right_len != len {
                continue;
            }
            symbols[left].len = len;
            symbols[right].len = 0;
            let next = symbols[right].next;
            symbols[left].next = next;
            if let Some(next) = next {
                symbols[next].prev = Some(left);
            }
            queue.extend(self.candidate(text, &symbols, symbols[left].prev, Some(left)));
            queue.extend(self.candidate(text, &symbols, Some(left), next));
        }

        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let piece = &text[symbol.start..symbol.start + symbol.len];
            match self.ids.get(piece) {
                Some(&id) => output.push(id),
                None => {
                    for byte in piece.bytes() {
                        let id = self.byte_ids[usize::from(byte)].or(self.unk).ok_or(Unencodable(byte))?;
                        output.push(id);
                    }
                }
            }
        }
        Ok(())
    }

    fn candidate(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: Option<usize>,
        right: Option<usize>,
    ) -> Option<Candidate> {
        let (left, right) = (left?, right?);
        let len = symbols[left].len + symbols[right].len;
        let start = symbols[left].start;
        let id = *self.ids.get(&text[start..start + len])?;
        let score = *self.scores.get(id as usize)?;
        Some(Candidate { score, left, right, len })
    }
}
