//! Tokenizers from the vocabulary that a GGUF file carries.
//!
//! The reference for ids is llama.cpp: special tokens are cut out of the text first (longer ones win), each stretch of
//! ordinary text is tokenized on its own, and what a token is follows from its type and, where converters are known to
//! mark it wrongly, from its text.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{Model as _, SplitDelimiterBehavior};

use super::pre_tokenizers::Digits;
use super::special::{SpecialTokens, Stretch};
use super::spm::{ESCAPED_SPACE, Spm, Unencodable};
use super::{AddSpecial, Named, byte_level, pre_tokenizers};
use crate::checkpoint::gguf::{Array, Metadata, Value};
use crate::{Error, Result};

/// Values of `tokenizer.ggml.token_type`.
mod token_type {
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
    pub(super) const BYTE: i32 = 6;
}

/// Tokens that end a turn, whatever type the file gives them.
const END_OF_GENERATION: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Tokens of fill-in-the-middle prompts; those in the first list end a generation.
const FILL_IN_THE_MIDDLE_ENDS: &[&str] = &[
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<PAD>",
    "[PAD]",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<REPO>",
    "<reponame>",
    "<|file_sep|>",
];
const FILL_IN_THE_MIDDLE: &[&str] = &[
    "<|fim_prefix|>",
    "<fim-prefix>",
    "<fim_prefix>",
    "<｜fim▁begin｜>",
    "<PRE>",
    "▁<PRE>",
    "<|code_prefix|>",
    "<|prefix|>",
    "<|fim_suffix|>",
    "<fim-suffix>",
    "<fim_suffix>",
    "<｜fim▁hole｜>",
    "<SUF>",
    "▁<SUF>",
    "<|code_suffix|>",
    "<|suffix|>",
    "<|fim_middle|>",
    "<fim-middle>",
    "<fim_middle>",
    "<｜fim▁end｜>",
    "<MID>",
    "▁<MID>",
    "<|code_middle|>",
    "<|middle|>",
];

/// Tokens of the harmony format that are part of the visible text.
const ALWAYS_SHOWN: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// The splitting rule whose vocabularies are BPE with `▁` for spaces, whatever their model.
const SPACED_RULE: &str = "sarvam-moe";

/// What a GGUF file says about its tokenizer, under `tokenizer.ggml.*`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab {
    /// `model`: `gpt2` for byte-level BPE, `llama` for SentencePiece, `gemma4` for BPE with `▁` for spaces.
    pub model: String,
    /// `pre`: name of the splitting rule of a `gpt2` vocabulary; `sarvam-moe` makes it one like Gemma's.
    pub pre: String,
    /// `tokens`: text of every token, in order of id.
    pub tokens: Vec<String>,
    /// `scores`: of every token, or empty.
    pub scores: Vec<f32>,
    /// `token_type`: of every token, or empty if all are normal.
    pub token_types: Vec<i32>,
    /// `merges`: pairs of tokens with a space between, in order of rank.
    pub merges: Vec<String>,
    /// `bos_token_id`.
    pub bos_id: Option<u32>,
    /// `eos_token_id`.
    pub eos_id: Option<u32>,
    /// `eot_token_id`.
    pub eot_id: Option<u32>,
    /// `eom_token_id`.
    pub eom_id: Option<u32>,
    /// `unknown_token_id`.
    pub unk_id: Option<u32>,
    /// `padding_token_id`.
    pub pad_id: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`.
    pub add_space_prefix: Option<bool>,
}

impl GgufVocab {
    /// The vocabulary in a GGUF file's key-values.
    ///
    /// # Errors
    /// [`Error::Config`] if a key has a value of the wrong kind, or `model` or `tokens` is missing.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self> {
        let missing = |key: &str, expected: &str| Error::Config {
            path: metadata.path().to_owned(),
            key: key.to_owned(),
            expected: expected.to_owned(),
            got: "no such key".to_owned(),
        };
        let id = |name: &str| -> Result<Option<u32>> {
            let key = format!("tokenizer.ggml.{name}_token_id");
            // -1 means none.
            if matches!(metadata.get(&key), Some(Value::I32(-1) | Value::I64(-1) | Value::U32(u32::MAX))) {
                return Ok(None);
            }
            let id = metadata.u64(&key)?;
            Ok(id.map(|id| u32::try_from(id).unwrap_or(u32::MAX)))
        };
        let strings =
            |key: &str| -> Result<Option<Vec<String>>> { Ok(metadata.strings(key)?.map(<[String]>::to_vec)) };
        let model = metadata.str("tokenizer.ggml.model")?;
        let tokens = strings("tokenizer.ggml.tokens")?;
        let token_types = match metadata.get("tokenizer.ggml.token_type") {
            Some(Value::Array(Array::I32(types))) => types.clone(),
            _ => {
                let types = metadata.u64s("tokenizer.ggml.token_type")?.unwrap_or_default();
                types.into_iter().map(|kind| i32::try_from(kind).unwrap_or(0)).collect()
            }
        };
        let scores = metadata.f64s("tokenizer.ggml.scores")?.unwrap_or_default();
        Ok(Self {
            model: model.ok_or_else(|| missing("tokenizer.ggml.model", "gpt2, llama or gemma4"))?.to_owned(),
            pre: metadata.str("tokenizer.ggml.pre")?.unwrap_or_default().to_owned(),
            tokens: tokens.ok_or_else(|| missing("tokenizer.ggml.tokens", "an array of strings"))?,
            // Scores are f32 in the file.
            scores: scores.into_iter().map(|score| score as f32).collect(),
            token_types,
            merges: strings("tokenizer.ggml.merges")?.unwrap_or_default(),
            bos_id: id("bos")?,
            eos_id: id("eos")?,
            eot_id: id("eot")?,
            eom_id: id("eom")?,
            unk_id: id("unknown")?,
            pad_id: id("padding")?,
            add_bos: metadata.bool("tokenizer.ggml.add_bos_token")?,
            add_eos: metadata.bool("tokenizer.ggml.add_eos_token")?,
            add_space_prefix: metadata.bool("tokenizer.ggml.add_space_prefix")?,
        })
    }
}

/// How a token shows in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TokenType {
    Normal,
    /// Cut out of the text and shown only on request.
    Control,
    Unknown,
    /// Cut out of the text and always shown.
    UserDefined,
    Byte,
    Unused,
}

/// The tokenizer of a GGUF file.
#[derive(Debug)]
pub(super) struct Gguf {
    model: Algorithm,
    tokens: Vec<String>,
    kinds: Vec<TokenType>,
    special: SpecialTokens,
    bos: Option<u32>,
    eos: Option<u32>,
    add_bos: bool,
    add_eos: bool,
    /// Only SentencePiece models: a stretch of text at the beginning or after a special token begins with a space.
    pub(super) add_space_prefix: bool,
}

#[derive(Debug)]
enum Algorithm {
    Bpe {
        tokenizer: Box<tokenizers::Tokenizer>,
        digits: Digits,
        /// Bytes of UTF-8 text for which the vocabulary has no token.
        missing_bytes: Vec<u8>,
    },
    /// BPE over text whose spaces are `▁`, with tokens for bytes that have none (Gemma 4, Sarvam).
    Spaced(Box<tokenizers::Tokenizer>),
    Spm(Spm),
}

/// The parts of a `tokenizer.json`.
pub(super) struct Exported<'a> {
    /// Splits text into words and merges them.
    pub(super) pipeline: &'a tokenizers::Tokenizer,
    /// Texts of special tokens, and whether they have no text in answers.
    pub(super) special: Vec<(&'a str, bool)>,
    /// What a text begins with.
    pub(super) before: Option<(&'a str, u32)>,
    /// What a text ends with.
    pub(super) after: Option<(&'a str, u32)>,
}

impl Gguf {
    pub(super) fn new(path: &Path, vocab: GgufVocab) -> Result<(Self, Named)> {
        let fail = |reason: String| Error::Tokenizer { path: path.to_owned(), reason };
        let count = vocab.tokens.len();
        if count == 0 {
            return Err(fail("tokenizer.ggml.tokens: expected at least one token, got none".to_owned()));
        }
        for (key, got) in [("scores", vocab.scores.len()), ("token_type", vocab.token_types.len())] {
            if got != 0 && got != count {
                return Err(fail(format!(
                    "tokenizer.ggml.{key}: expected {count} values, one per token, got {got}"
                )));
            }
        }
        let spm = match vocab.model.as_str() {
            "llama" => true,
            "gpt2" | "gemma4" => false,
            other => {
                return Err(fail(format!(
                    "tokenizer.ggml.model: expected gpt2, llama or gemma4, got {other:?}"
                )));
            }
        };
        let tokens: Vec<String> = vocab
            .tokens
            .into_iter()
            .enumerate()
            .map(|(id, text)| if text.is_empty() { format!("[EMPTY_{id}]") } else { text })
            .collect();
        let mut ids = HashMap::with_capacity(count);
        for (id, text) in (0_u32..).zip(&tokens) {
            if let Some(earlier) = ids.insert(text.clone(), id) {
                return Err(fail(format!("token {text:?} has two ids, {earlier} and {id}")));
            }
        }

        let in_range = |key: &str, id: Option<u32>| match id {
            Some(id) if id as usize >= count => {
                Err(fail(format!("tokenizer.ggml.{key}: expected an id below {count}, got {id}")))
            }
            id => Ok(id),
        };
        let or_default = |id: u32| if spm && (id as usize) < count { Some(id) } else { None };
        let unk = in_range("unknown_token_id", vocab.unk_id)?.or(or_default(0));
        let bos = in_range("bos_token_id", vocab.bos_id)?.or(or_default(1));
        let eos = in_range("eos_token_id", vocab.eos_id)?.or(or_default(2));
        let eot = in_range("eot_token_id", vocab.eot_id)?;
        let eom = in_range("eom_token_id", vocab.eom_id)?;
        let pad = in_range("padding_token_id", vocab.pad_id)?;

        let (mut kinds, mut end_of_generation) = classify(&tokens, &vocab.token_types, &ids);
        let spaced = vocab.model == "gemma4" || !spm && vocab.pre == SPACED_RULE;
        if spaced {
            // Converters may call tokens of bytes normal.
            let bytes = kinds.iter_mut().zip(&tokens).filter(|(_, text)| byte_token(text).is_some());
            bytes.for_each(|(kind, _)| *kind = TokenType::Byte);
        }
        for id in [eom, eot, eos].into_iter().flatten() {
            end_of_generation.retain(|other| *other != id);
            end_of_generation.insert(0, id);
        }

        let (model, add_bos_default) = if spm {
            if vocab.scores.is_empty() {
                return Err(fail(
                    "tokenizer.ggml.scores is missing; a llama vocabulary merges by score".to_owned(),
                ));
            }
            if let Some(id) = vocab.scores.iter().position(|score| score.is_nan()) {
                return Err(fail(format!("tokenizer.ggml.scores: score of token {id} is NaN")));
            }
            (Algorithm::Spm(Spm::new(ids, vocab.scores, unk)), true)
        } else if spaced {
            let unknown = unk.and_then(|id| tokens.get(id as usize)).cloned();
            (spaced_bpe(ids, &vocab.merges, unknown).map_err(fail)?, vocab.model == "gemma4")
        } else {
            let rule = pre_tokenizers::by_name(&vocab.pre).ok_or_else(|| {
                let known = pre_tokenizers::known_names();
                fail(format!("tokenizer.ggml.pre: {:?} is unknown; known: {known}", vocab.pre))
            })?;
            (byte_level_bpe(ids, &vocab.merges, rule).map_err(fail)?, rule.add_bos)
        };

        let add_bos = vocab.add_bos.unwrap_or(add_bos_default);
        let add_eos = vocab.add_eos.unwrap_or(false);
        for (add, id, name) in [(add_bos, bos, "bos"), (add_eos, eos, "eos")] {
            if add && id.is_none() {
                return Err(fail(format!("text needs a {name} token, but {name}_token_id is missing")));
            }
        }
        let special = SpecialTokens::new((0_u32..).zip(&tokens).zip(&kinds).filter_map(
            |((id, text), kind)| match kind {
                TokenType::Control | TokenType::Unknown => Some((text.clone(), id, true)),
                TokenType::UserDefined => Some((text.clone(), id, false)),
                TokenType::Normal | TokenType::Byte | TokenType::Unused => None,
            },
        ));
        let name = |id: Option<u32>| id.and_then(|id| tokens.get(id as usize)).cloned();
        let named_tokens = [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)]
            .into_iter()
            .filter_map(|(key, id)| Some((key.to_owned(), name(id)?)))
            .collect();
        let named = Named { bos, eos: end_of_generation, tokens: named_tokens };
        let add_space_prefix = spm && vocab.add_space_prefix.unwrap_or(true);
        Ok((Self { model, tokens, kinds, special, bos, eos, add_bos, add_eos, add_space_prefix }, named))
    }

    /// Errors are reasons, for the caller to name the file.
    pub(super) fn encode(
        &self,
        text: &str,
        add: AddSpecial,
        parse_special: bool,
    ) -> Result<Vec<u32>, String> {
        let mut ids = Vec::new();
        if add == AddSpecial::Yes && self.add_bos {
            ids.extend(self.bos);
        }
        let mut after_special = true;
        for part in self.special.split(text, parse_special) {
            match part {
                Stretch::Token(id) => ids.push(id),
                Stretch::Text(text) => self.encode_ordinary(text, after_special, &mut ids)?,
            }
            after_special = matches!(part, Stretch::Token(_));
        }
        if add == AddSpecial::Yes && self.add_eos {
            ids.extend(self.eos);
        }
        Ok(ids)
    }

    fn encode_ordinary(&self, text: &str, after_special: bool, ids: &mut Vec<u32>) -> Result<(), String> {
        let unencodable = |byte: u8| format!("the vocabulary has no token for byte {byte:#04x}");
        match &self.model {
            Algorithm::Spm(spm) => {
                let mut escaped = text.replace(' ', ESCAPED_SPACE);
                if self.add_space_prefix && after_special {
                    escaped.insert_str(0, ESCAPED_SPACE);
                }
                spm.encode(&escaped, ids).map_err(|Unencodable(byte)| unencodable(byte))
            }
            Algorithm::Spaced(tokenizer) => {
                let escaped = text.replace(' ', ESCAPED_SPACE);
                let encoding = tokenizer.encode_fast(escaped, false).map_err(|error| error.to_string())?;
                ids.extend_from_slice(encoding.get_ids());
                Ok(())
            }
            Algorithm::Bpe { tokenizer, digits, missing_bytes } => {
                if let Some(byte) = missing_bytes.iter().find(|byte| text.as_bytes().contains(byte)) {
                    return Err(unencodable(*byte));
                }
                for piece in digits.split(text) {
                    let encoding = tokenizer.encode_fast(piece, false).map_err(|error| error.to_string())?;
                    ids.extend_from_slice(encoding.get_ids());
                }
                Ok(())
            }
        }
    }

    /// Appends the text of `id`, which may be part of a character; `None` if there is no such token.
    pub(super) fn decode_token(&self, id: u32, skip_special: bool, output: &mut Vec<u8>) -> Option<()> {
        let text = self.tokens.get(id as usize)?;
        match self.kinds.get(id as usize)? {
            TokenType::Control | TokenType::Unknown if skip_special => {}
            TokenType::Control | TokenType::Unknown | TokenType::UserDefined => {
                output.extend_from_slice(text.as_bytes())
            }
            TokenType::Unused => {}
            TokenType::Byte => match byte_token(text) {
                Some(byte) => output.push(byte),
                None => output.extend_from_slice(text.as_bytes()),
            },
            TokenType::Normal => match &self.model {
                Algorithm::Bpe { .. } => byte_level::decode_token(text, output),
                Algorithm::Spaced(_) | Algorithm::Spm(_) => {
                    output.extend_from_slice(text.replace(ESCAPED_SPACE, " ").as_bytes());
                }
            },
        }
        Some(())
    }

    /// What a `tokenizer.json` needs; a reason if none can do the same.
    pub(super) fn export(&self) -> Result<Exported<'_>, &'static str> {
        let Algorithm::Bpe { tokenizer, digits: Digits::Pattern, .. } = &self.model else {
            return Err(match &self.model {
                Algorithm::Spaced(_) => "its spaces would be lost",
                Algorithm::Spm(_) => "no tokenizer.json can merge by score",
                Algorithm::Bpe { .. } => "no tokenizer.json can cut numbers as this vocabulary wants it",
            });
        };
        let special = self.tokens.iter().zip(&self.kinds).filter_map(|(text, kind)| match kind {
            TokenType::Control | TokenType::Unknown => Some((text.as_str(), true)),
            TokenType::UserDefined => Some((text.as_str(), false)),
            TokenType::Normal | TokenType::Byte | TokenType::Unused => None,
        });
        let named = |wanted: bool, id: Option<u32>| {
            let id = id.filter(|_| wanted)?;
            Some((self.tokens.get(id as usize)?.as_str(), id))
        };
        Ok(Exported {
            pipeline: tokenizer,
            special: special.collect(),
            before: named(self.add_bos, self.bos),
            after: named(self.add_eos, self.eos),
        })
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        match &self.model {
            Algorithm::Bpe { tokenizer, .. } | Algorithm::Spaced(tokenizer) => {
                tokenizer.get_model().token_to_id(token)
            }
            Algorithm::Spm(spm) => spm.token_to_id(token),
        }
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }
}

/// The byte that a token like `<0x0A>` stands for.
fn byte_token(text: &str) -> Option<u8> {
    u8::from_str_radix(text.strip_prefix("<0x")?.strip_suffix('>')?, 16).ok()
}

/// The kind of every token and the tokens that end a generation, by type and well-known text.
fn classify(tokens: &[String], types: &[i32], ids: &HashMap<String, u32>) -> (Vec<TokenType>, Vec<u32>) {
    let mut kinds: Vec<TokenType> = if types.is_empty() {
        vec![TokenType::Normal; tokens.len()]
    } else {
        types
            .iter()
            .map(|kind| match *kind {
                token_type::UNKNOWN => TokenType::Unknown,
                token_type::CONTROL => TokenType::Control,
                token_type::USER_DEFINED => TokenType::UserDefined,
                token_type::UNUSED => TokenType::Unused,
                token_type::BYTE => TokenType::Byte,
                _ => TokenType::Normal,
            })
            .collect()
    };
    let present =
        |texts: &'static [&'static str]| texts.iter().filter_map(|text| Some((*text, *ids.get(*text)?)));
    let mut ends: Vec<u32> = Vec::new();
    for (_, id) in present(END_OF_GENERATION).chain(present(FILL_IN_THE_MIDDLE_ENDS)) {
        kinds[id as usize] = TokenType::Control;
        ends.push(id);
    }
    for (_, id) in present(FILL_IN_THE_MIDDLE) {
        kinds[id as usize] = TokenType::Control;
    }
    for (_, id) in present(ALWAYS_SHOWN) {
        kinds[id as usize] = TokenType::UserDefined;
    }
    let has = |text: &str| ids.contains_key(text);
    let harmony = has("<|return|>") && has("<|call|>");
    let solar = has("<|flush|>") && (has("<|call|>") || has("<|calls|>"));
    if let Some(&end) = ids.get("<|end|>").filter(|_| harmony || solar) {
        // There it ends a message, not the turn.
        kinds[end as usize] = TokenType::UserDefined;
        ends.retain(|id| *id != end);
    }
    if let Some(&end) = ids.get("</s>").filter(|_| has("<|tool_response>")) {
        kinds[end as usize] = TokenType::Normal;
        ends.retain(|id| *id != end);
    }
    ends.sort_unstable();
    (kinds, ends)
}

/// The pairs that are merged, the first ones first. Errors are reasons.
fn ranked(ids: &HashMap<String, u32>, merges: &[String]) -> Result<Merges, String> {
    if merges.is_empty() {
        return Err("tokenizer.ggml.merges is missing; the vocabulary merges by rank".to_owned());
    }
    let mut seen = HashSet::with_capacity(merges.len());
    let mut pairs: Merges = Vec::with_capacity(merges.len());
    for (rank, merge) in merges.iter().enumerate() {
        // The first character may itself be a space.
        let second_char = merge.chars().next().map_or(0, char::len_utf8);
        let (left, right) = merge[second_char..]
            .find(' ')
            .map(|at| (&merge[..second_char + at], &merge[second_char + at + 1..]))
            .ok_or_else(|| {
                format!("merge {rank}: expected two tokens with a space between, got {merge:?}")
            })?;
        for token in [left, right, &format!("{left}{right}")] {
            if !ids.contains_key(token) {
                return Err(format!("merge {rank} ({merge:?}): token {token:?} is not in the vocabulary"));
            }
        }
        // The first of two equal merges has the rank.
        if seen.insert((ids[left], ids[right])) {
            pairs.push((left.to_owned(), right.to_owned()));
        }
    }
    Ok(pairs)
}

/// A BPE model over text whose spaces are `▁`, in which a run of line breaks is a word of its own. Errors are reasons.
fn spaced_bpe(
    ids: HashMap<String, u32>,
    merges: &[String],
    unknown: Option<String>,
) -> Result<Algorithm, String> {
    let pairs = ranked(&ids, merges)?;
    let vocab: Vocab = ids.into_iter().collect();
    let reason = |error: tokenizers::Error| error.to_string();
    let mut bpe = BPE::builder().vocab_and_merges(vocab, pairs).byte_fallback(true).cache_capacity(0);
    if let Some(unknown) = unknown {
        bpe = bpe.unk_token(unknown);
    }
    let lines = SplitPattern::Regex("[^\\n]+|\\n+".to_owned());
    let lines = Split::new(lines, SplitDelimiterBehavior::Isolated, false).map_err(reason)?;
    let mut tokenizer = tokenizers::Tokenizer::new(bpe.build().map_err(reason)?);
    tokenizer.with_pre_tokenizer(Some(lines));
    Ok(Algorithm::Spaced(Box::new(tokenizer)))
}

/// A byte-level BPE model behind the splitting `rule`. Errors are reasons.
fn byte_level_bpe(
    ids: HashMap<String, u32>,
    merges: &[String],
    rule: &pre_tokenizers::PreTokenizer,
) -> Result<Algorithm, String> {
    let pairs = ranked(&ids, merges)?;
    let missing_bytes = byte_level::alphabet()
        .filter(|(byte, c)| is_utf8_byte(*byte) && !ids.contains_key(c.encode_utf8(&mut [0; 4]) as &str))
        .map(|(byte, _)| byte)
        .collect();

    let vocab: Vocab = ids.into_iter().collect();
    let reason = |error: tokenizers::Error| error.to_string();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, pairs)
        .ignore_merges(rule.ignore_merges)
        // It would be one of every thread, which keeps words of models that are gone.
        .cache_capacity(0)
        .build()
        .map_err(reason)?;
    let mut splits: Vec<PreTokenizerWrapper> = Vec::with_capacity(rule.patterns.len() + 1);
    for pattern in rule.patterns {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        splits.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(reason)?.into());
    }
    splits.push(ByteLevel::new(false, false, false).into());
    let mut tokenizer = tokenizers::Tokenizer::new(bpe);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(splits)));
    Ok(Algorithm::Bpe { tokenizer: Box::new(tokenizer), digits: rule.digits, missing_bytes })
}

/// Whether `byte` can occur in UTF-8 text.
fn is_utf8_byte(byte: u8) -> bool {
    !matches!(byte, 0xC0 | 0xC1 | 0xF5..=0xFF)
}
