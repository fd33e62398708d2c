//! Token ids to text while they are being generated.

use super::Tokenizer;
use crate::Result;

/// Tokens that a window may wait for the rest of a character before its U+FFFD are taken for text.
const MAX_HELD_TOKENS: usize = 32;

/// Decodes ids one by one and gives out only complete characters.
///
/// The pieces together are the text that [`Tokenizer::decode`] gives for all ids, except that a `tokenizer.json` with
/// byte tokens like `<0x0A>` may show a different number of U+FFFD for bytes that are not UTF-8.
#[derive(Debug)]
pub struct DecodeStream<'t> {
    tokenizer: &'t Tokenizer,
    skip_special: bool,
    state: State,
}

#[derive(Debug)]
enum State {
    /// Every token is some bytes.
    Bytes {
        /// The beginning of a character.
        held: Vec<u8>,
        /// Nothing but skipped tokens has come so far.
        at_start: bool,
    },
    /// The text of a token depends on those around it: the text of a window of tokens is compared with the text of
    /// its beginning.
    Window {
        ids: Vec<u32>,
        /// So many of `ids` have been given out.
        given: usize,
    },
}

impl<'t> DecodeStream<'t> {
    pub(super) fn new(tokenizer: &'t Tokenizer, skip_special: bool) -> Self {
        let state = if tokenizer.decodes_by_token() {
            State::Bytes { held: Vec::new(), at_start: true }
        } else {
            State::Window { ids: Vec::new(), given: 0 }
        };
        Self { tokenizer, skip_special, state }
    }

    /// Makes the stream continue the text of `context`.
    pub(super) fn skip(&mut self, context: &[u32]) -> Result<()> {
        // The last tokens are enough to complete a character and to know that this is not the beginning.
        let tail = &context[context.len().saturating_sub(8)..];
        match &mut self.state {
            State::Bytes { held, at_start } => {
                let mut bytes = Vec::new();
                for id in context {
                    self.tokenizer.decode_token(*id, self.skip_special, &mut bytes)?;
                    *at_start &= bytes.is_empty();
                    bytes.clear();
                }
                for id in tail {
                    self.tokenizer.decode_token(*id, self.skip_special, held)?;
                }
                take_complete(held);
            }
            State::Window { ids, given } => {
                self.tokenizer.decode(context, self.skip_special)?;
                ids.extend_from_slice(tail);
                *given = ids.len();
            }
        }
        Ok(())
    }

    /// The text that `id` completes, which may be empty.
    pub fn push(&mut self, id: u32) -> Result<String> {
        match &mut self.state {
            State::Bytes { held, at_start } => {
                let before = held.len();
                self.tokenizer.decode_token(id, self.skip_special, held)?;
                if *at_start && held.len() > before {
                    *at_start = false;
                    if self.tokenizer.strips_first_space() && held.first() == Some(&b' ') {
                        held.remove(0);
                    }
                }
                Ok(take_complete(held))
            }
            State::Window { ids, given } => {
                ids.push(id);
                let old = self.tokenizer.decode(&ids[..*given], self.skip_special)?;
                let new = self.tokenizer.decode(ids, self.skip_special)?;
                let is_held =
                    new.ends_with(char::REPLACEMENT_CHARACTER) && ids.len() - *given < MAX_HELD_TOKENS;
                if is_held || new.len() <= old.len() {
                    return Ok(String::new());
                }
                let text = new.get(old.len()..).unwrap_or_default().to_owned();
                ids.drain(..*given);
                *given = ids.len();
                Ok(text)
            }
        }
    }

    /// What is still held; the unfinished beginning of a character becomes U+FFFD.
    pub fn finish(self) -> Result<String> {
        match self.state {
            State::Bytes { held, .. } => Ok(String::from_utf8_lossy(&held).into_owned()),
            State::Window { ids, given } => {
                let old = self.tokenizer.decode(&ids[..given], self.skip_special)?;
                let new = self.tokenizer.decode(&ids, self.skip_special)?;
                Ok(new.get(old.len()..).unwrap_or_default().to_owned())
            }
        }
    }
}

/// Takes the complete characters out of `held`, with U+FFFD for what cannot become one.
fn take_complete(held: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut taken = 0;
    while taken < held.len() {
        match std::str::from_utf8(&held[taken..]) {
            Ok(rest) => {
                text.push_str(rest);
                taken = held.len();
            }
            Err(error) => {
                let valid = &held[taken..taken + error.valid_up_to()];
                text.push_str(&String::from_utf8_lossy(valid));
                taken += valid.len();
                match error.error_len() {
                    Some(invalid) => {
                        text.push(char::REPLACEMENT_CHARACTER);
                        taken += invalid;
                    }
                    None => break,
                }
            }
        }
    }
    held.drain(..taken);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_the_lossy_text(bytes in proptest::collection::vec(any::<u8>(), 0..40), cut in 1_usize..5) {
            let mut held = Vec::new();
            let mut text = String::new();
            for chunk in bytes.chunks(cut) {
                held.extend_from_slice(chunk);
                text.push_str(&take_complete(&mut held));
                prop_assert!(held.len() < 4);
            }
            text.push_str(&String::from_utf8_lossy(&held));
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }
}
