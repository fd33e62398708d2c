//! A tokenizer as Hugging Face's `tokenizer.json`: for programs that need one and cannot read a GGUF file.

use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer as Pipeline};

use super::gguf::Exported;
use super::{Backend, Tokenizer};
use crate::{Error, Result};

impl Tokenizer {
    /// The text of a `tokenizer.json` with which Hugging Face's library gives the same ids.
    ///
    /// Of a GGUF file's it finds special tokens from left to right, the longest first; llama.cpp, which is the reference here,
    /// takes the longest of the whole text first. That differs only where one begins within another.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] for what that format cannot say: merging by score (SentencePiece in a GGUF file) or by the whole's
    /// rank (tiktoken), and numbers that are cut by more than patterns.
    pub fn to_json(&self) -> Result<String> {
        let fail = |reason: String| Error::Tokenizer { path: self.path.clone(), reason };
        let pipeline = match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.pipeline().clone(),
            Backend::Tiktoken(_) => {
                return Err(fail("no tokenizer.json can merge as tiktoken does".to_owned()));
            }
            Backend::Gguf(tokenizer) => {
                with_special_tokens(tokenizer.export().map_err(|reason| fail(reason.to_owned()))?)
                    .map_err(fail)?
            }
        };
        pipeline.to_string(false).map_err(|error| fail(error.to_string()))
    }
}

/// Adds what is around the words: special tokens, how bytes become text, and what a text begins and ends with.
fn with_special_tokens(exported: Exported<'_>) -> Result<Pipeline, String> {
    let Exported { pipeline, special, before, after } = exported;
    let mut pipeline = pipeline.clone();
    pipeline.with_decoder(Some(tokenizers::decoders::byte_level::ByteLevel::default()));
    for (text, hidden) in special {
        let token = AddedToken::from(text, hidden).normalized(false);
        let added = if hidden { pipeline.add_special_tokens([token]) } else { pipeline.add_tokens([token]) };
        added.map_err(|error| error.to_string())?;
    }
    if before.is_some() || after.is_some() {
        let parts = |sequence: &str| {
            let around = [before.map(|(text, _)| text), Some(sequence), after.map(|(text, _)| text)];
            around.into_iter().flatten().map(|part| format!("{part}:0")).collect::<Vec<_>>()
        };
        let tokens =
            [before, after].into_iter().flatten().map(|(text, id)| (text.to_owned(), id)).collect::<Vec<_>>();
        let template = TemplateProcessing::builder()
            .try_single(parts("$A"))
            .map_err(|error| error.clone())?
            .special_tokens(tokens)
            .build()
            .map_err(|error| error.to_string())?;
        pipeline.with_post_processor(Some(template));
    }
    Ok(pipeline)
}
