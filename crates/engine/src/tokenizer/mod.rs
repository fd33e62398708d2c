//! Text to token ids and back, for the ways in which checkpoints carry a tokenizer.
//!
//! - [`Tokenizer::from_json_file`]: a Hugging Face `tokenizer.json`; gives the ids that transformers gives.
//! - [`Tokenizer::from_tiktoken_file`]: a `tiktoken.model`, as Kimi has it; gives the ids that tiktoken gives.
//! - [`Tokenizer::from_gguf`]: the vocabulary inside a GGUF file; gives the ids that llama.cpp gives.
//!
//! Splitting and byte-pair merging are the `tokenizers` crate's; only SentencePiece's merging by score and tiktoken's by rank
//! of the whole are done here, because that crate's merges cannot express them. Its regular expressions give up after a million backtracking steps
//! within one piece of text, which takes runs of hundreds of thousands of equal characters; the rest of such a piece
//! is then one word.
//!
//! Not here: WordPiece and Unigram vocabularies in GGUF files, `tekken.json`, `tiktoken` files with
//! other patterns than Kimi's.

pub(crate) mod byte_level;
mod decode_stream;
mod export;
mod gguf;
mod hugging_face;
mod outside;
pub(crate) mod pre_tokenizers;
mod special;
mod spm;
mod tiktoken;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use decode_stream::DecodeStream;
pub use gguf::GgufVocab;
pub(crate) use hugging_face::read_json;
use outside::Controls;

use crate::checkpoint::{Checkpoint, Format};
use crate::{Error, Result};

/// Tokens more that a beginning of a text may have than the same part of the whole, and then some.
const CUT_TOKENS: usize = 256;
/// Bytes of a token, as long as nothing is known of a text.
const TOKEN_BYTES: usize = 8;

/// Whether a text gets the tokens that the tokenizer puts around it, such as BOS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddSpecial {
    /// The text is a whole document or prompt.
    Yes,
    /// The text continues something, or brings its own special tokens, as a rendered chat template does.
    No,
}

/// A tokenizer, whatever file it came from.
#[derive(Debug)]
pub struct Tokenizer {
    /// For error messages.
    path: PathBuf,
    backend: Backend,
    named: Named,
    /// Made when text from outside is first looked at.
    controls: OnceLock<Controls>,
}

#[derive(Debug)]
enum Backend {
    HuggingFace(Box<hugging_face::HuggingFace>),
    Tiktoken(Box<tiktoken::Tiktoken>),
    Gguf(Box<gguf::Gguf>),
}

/// Tokens with a role.
#[derive(Debug)]
struct Named {
    bos: Option<u32>,
    /// Every id that ends a generation.
    eos: Vec<u32>,
    /// Text by role, as in `bos_token`.
    tokens: BTreeMap<String, String>,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. From the same folder, `tokenizer_config.json` adds special tokens and their roles,
    /// and `generation_config.json` (or `config.json`) the ids that end a generation, if these files are there.
    pub fn from_json_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (tokenizer, named) = hugging_face::HuggingFace::new(path)?;
        Ok(Self {
            path: path.to_owned(),
            backend: Backend::HuggingFace(Box::new(tokenizer)),
            named,
            controls: OnceLock::new(),
        })
    }

    /// Reads a `tiktoken.model`. From the same folder, `tokenizer_config.json` says which class made it and gives special
    /// tokens and their roles, `generation_config.json` (or `config.json`) the ids that end a generation.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] also for a class whose words are cut by a pattern that is not known.
    pub fn from_tiktoken_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (tokenizer, named) = tiktoken::Tiktoken::new(path)?;
        Ok(Self {
            path: path.to_owned(),
            backend: Backend::Tiktoken(Box::new(tokenizer)),
            named,
            controls: OnceLock::new(),
        })
    }

    /// Builds the tokenizer of the GGUF file at `path` from its metadata.
    pub fn from_gguf(path: impl AsRef<Path>, vocab: GgufVocab) -> Result<Self> {
        let path = path.as_ref();
        let (tokenizer, named) = gguf::Gguf::new(path, vocab)?;
        Ok(Self {
            path: path.to_owned(),
            backend: Backend::Gguf(Box::new(tokenizer)),
            named,
            controls: OnceLock::new(),
        })
    }

    /// The tokenizer of an open checkpoint.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint.format() {
            Format::Gguf => {
                let metadata = checkpoint.metadata();
                Self::from_gguf(metadata.path(), GgufVocab::from_metadata(metadata)?)
            }
            Format::HuggingFace | Format::Mlx => {
                let [json, ranks] =
                    ["tokenizer.json", tiktoken::FILE].map(|name| checkpoint.path().join(name));
                if !json.exists() && ranks.exists() {
                    return Self::from_tiktoken_file(ranks);
                }
                Self::from_json_file(json)
            }
        }
    }

    fn error(&self, reason: impl Into<String>) -> Error {
        Error::Tokenizer { path: self.path.clone(), reason: reason.into() }
    }

    fn no_such_id(&self, id: u32) -> Error {
        Error::UnknownToken { path: self.path.clone(), token: id, vocab_size: self.vocab_size() }
    }

    /// The ids of `text`. Special tokens that are written out in it become their ids.
    pub fn encode(&self, text: &str, add_special: AddSpecial) -> Result<Vec<u32>> {
        match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.encode(text, add_special),
            Backend::Tiktoken(tokenizer) => tokenizer.encode(text, true),
            Backend::Gguf(tokenizer) => tokenizer.encode(text, add_special, true),
        }
        .map_err(|reason| self.error(reason))
    }

    /// As [`Tokenizer::encode`], for a context of so many tokens: of a text that has many more, a beginning is tokenised that
    /// shows it, so that time and memory depend on the context and not on the text.
    ///
    /// # Errors
    /// [`Error::ContextFull`] with the tokens found so far; never for a text that fits.
    pub(crate) fn encode_within(
        &self,
        text: &str,
        add_special: AddSpecial,
        context: usize,
    ) -> Result<Vec<u32>> {
        // Where a text is cut, a few tokens stand for what may be one in the whole.
        let enough = context.saturating_add(CUT_TOKENS);
        let mut end = enough.saturating_mul(TOKEN_BYTES);
        while end < text.len() {
            let found = self.encode(&text[..text.floor_char_boundary(end)], add_special)?.len();
            if found > enough {
                return Err(Error::ContextFull { wanted: found, context });
            }
            end = end.saturating_mul(2);
        }
        self.encode(text, add_special)
    }

    /// The ids of `text` as ordinary text: special tokens written out in it are spelled, and none are added. For text
    /// from outside that must not steer the model.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>> {
        match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.encode_plain(text),
            Backend::Tiktoken(tokenizer) => tokenizer.encode(text, false),
            Backend::Gguf(tokenizer) => tokenizer.encode(text, AddSpecial::No, false),
        }
        .map_err(|reason| self.error(reason))
    }

    /// The text of `ids`; what is not UTF-8 becomes U+FFFD. `skip_special` leaves out special tokens.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        if let Backend::HuggingFace(tokenizer) = &self.backend
            && !tokenizer.byte_level
        {
            if let Some(id) = ids.iter().find(|id| tokenizer.id_to_token(**id).is_none()) {
                return Err(self.no_such_id(*id));
            }
            return tokenizer.decode(ids, skip_special).map_err(|reason| self.error(reason));
        }
        let mut stream = self.decode_stream(skip_special);
        let mut text = String::new();
        for id in ids {
            text.push_str(&stream.push(*id)?);
        }
        text.push_str(&stream.finish()?);
        Ok(text)
    }

    /// Decodes a text token by token.
    pub fn decode_stream(&self, skip_special: bool) -> DecodeStream<'_> {
        DecodeStream::new(self, skip_special)
    }

    /// Decodes a text token by token that continues `context`, of which it repeats nothing.
    pub fn decode_stream_after(&self, context: &[u32], skip_special: bool) -> Result<DecodeStream<'_>> {
        let mut stream = DecodeStream::new(self, skip_special);
        stream.skip(context)?;
        Ok(stream)
    }

    /// One more than the highest id.
    pub fn vocab_size(&self) -> usize {
        match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.vocab_size(),
            Backend::Tiktoken(tokenizer) => tokenizer.vocab_size(),
            Backend::Gguf(tokenizer) => tokenizer.vocab_size(),
        }
    }

    /// The id of the token with exactly this text, as the vocabulary writes it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.token_to_id(token),
            Backend::Tiktoken(tokenizer) => tokenizer.token_to_id(token),
            Backend::Gguf(tokenizer) => tokenizer.token_to_id(token),
        }
    }

    /// The text of a token as the vocabulary writes it, which is not always the text that it decodes to.
    pub fn id_to_token(&self, id: u32) -> Option<Cow<'_, str>> {
        match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.id_to_token(id).map(Cow::Owned),
            Backend::Tiktoken(tokenizer) => tokenizer.id_to_token(id).map(Cow::Owned),
            Backend::Gguf(tokenizer) => tokenizer.id_to_token(id).map(Cow::Borrowed),
        }
    }

    /// Every id that ends a generation; the first one is the model's main one.
    pub fn eos_ids(&self) -> &[u32] {
        &self.named.eos
    }

    /// The id that begins a text, if the model has one.
    pub fn bos_id(&self) -> Option<u32> {
        self.named.bos
    }

    /// Special tokens by role, as in `bos_token`; chat templates refer to them by these names.
    pub fn special_tokens(&self) -> &BTreeMap<String, String> {
        &self.named.tokens
    }

    /// The bytes that a token stands for within a text, special ones by their names; `None` if there is no such token.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        if self.decodes_by_token() {
            return self.decode_token(id, false, &mut bytes).is_ok().then_some(bytes);
        }
        // Spelled as SentencePiece does: spaces as U+2581, single bytes as <0x0A>.
        let text = self.id_to_token(id)?;
        let byte = text.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        match byte.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => Some(vec![byte]),
            None => Some(text.replace('\u{2581}', " ").into_bytes()),
        }
    }

    /// Whether a token steers the model rather than being text.
    pub fn is_special(&self, id: u32) -> bool {
        match &self.backend {
            Backend::HuggingFace(tokenizer) if !tokenizer.byte_level => {
                tokenizer.decode(&[id], true).is_ok_and(|text| text.is_empty())
                    && tokenizer.decode(&[id], false).is_ok_and(|text| !text.is_empty())
            }
            _ => {
                let (mut text, mut all) = (Vec::new(), Vec::new());
                self.decode_token(id, true, &mut text).is_ok()
                    && self.decode_token(id, false, &mut all).is_ok()
                    && text != all
            }
        }
    }

    /// The texts of special tokens.
    fn controls(&self) -> &Controls {
        self.controls.get_or_init(|| {
            let special = (0..self.vocab_size() as u32).filter(|id| self.is_special(*id));
            Controls::new(special.filter_map(|id| String::from_utf8(self.token_bytes(id)?).ok()))
        })
    }

    /// Appends the text of `id`, which may be part of a character. Only if tokens decode one by one.
    fn decode_token(&self, id: u32, skip_special: bool, output: &mut Vec<u8>) -> Result<()> {
        match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.decode_token(id, skip_special, output),
            Backend::Tiktoken(tokenizer) => tokenizer.decode_token(id, skip_special, output),
            Backend::Gguf(tokenizer) => tokenizer.decode_token(id, skip_special, output),
        }
        .ok_or_else(|| self.no_such_id(id))
    }

    /// Whether tokens can be decoded one by one.
    fn decodes_by_token(&self) -> bool {
        match &self.backend {
            Backend::HuggingFace(tokenizer) => tokenizer.byte_level,
            Backend::Tiktoken(_) | Backend::Gguf(_) => true,
        }
    }

    /// Whether a space at the very beginning of decoded text is the tokenizer's own.
    fn strips_first_space(&self) -> bool {
        match &self.backend {
            Backend::HuggingFace(_) | Backend::Tiktoken(_) => false,
            Backend::Gguf(tokenizer) => tokenizer.add_space_prefix,
        }
    }
}
