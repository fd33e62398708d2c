//! Tokenizers from a Hugging Face `tokenizer.json` and the configuration files beside it.
//!
//! The reference for ids is transformers 5, which takes splitting, merging and the tokens around a text from
//! `tokenizer.json` alone: `add_bos_token` and `add_eos_token` of `tokenizer_config.json` have no effect there, nor
//! have truncation and padding. The configuration adds special tokens that `tokenizer.json` lacks and names their
//! roles; the ids that end a generation come from `generation_config.json`, or `config.json` without it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    AddedToken, AddedVocabulary, DecoderWrapper, Model as _, ModelWrapper, OffsetType, PreTokenizer as _,
};

use super::{AddSpecial, Named, byte_level};
use crate::{Error, Result};

/// Roles that a special token of `tokenizer_config.json` can have.
pub(super) const ROLES: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The tokenizer of a `tokenizer.json`.
#[derive(Debug)]
pub(super) struct HuggingFace {
    tokenizer: tokenizers::Tokenizer,
    /// The same added tokens, but special ones are not looked for in the text.
    without_special: AddedVocabulary,
    vocab_size: usize,
    /// Every token is a string of GPT-2's byte alphabet, so tokens decode one by one.
    pub(super) byte_level: bool,
}

impl HuggingFace {
    /// The library's tokenizer, with the special tokens that the configuration adds.
    pub(super) fn pipeline(&self) -> &tokenizers::Tokenizer {
        &self.tokenizer
    }

    pub(super) fn new(path: &Path) -> Result<(Self, Named)> {
        let fail = |reason: String| Error::Tokenizer { path: path.to_owned(), reason };
        let json = read(path)?;
        check_model(&json).map_err(fail)?;
        let mut tokenizer =
            tokenizers::Tokenizer::from_bytes(&json).map_err(|error| fail(error.to_string()))?;
        drop(json);
        tokenizer.with_truncation(None).map_err(|error| fail(error.to_string()))?;
        tokenizer.with_padding(None);
        forget_words(&mut tokenizer);

        let config_path = path.with_file_name("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or_default();
        let roles = add_special_tokens(&mut tokenizer, &config)
            .map_err(|reason| Error::Tokenizer { path: config_path.clone(), reason })?;

        let mut without_special = tokenizer.get_added_vocabulary().clone();
        without_special.set_encode_special_tokens(true);
        let highest = tokenizer.get_vocab(true).into_values().max();
        let vocab_size = highest.map_or(0, |id| id as usize + 1);
        let byte_level = matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));

        let bos = roles.get("bos_token").and_then(|token| tokenizer.token_to_id(token));
        let mut eos = generation_eos(path)?;
        let named_eos = roles.get("eos_token").and_then(|token| tokenizer.token_to_id(token));
        eos.extend(named_eos.filter(|id| !eos.contains(id)));
        let named = Named { bos, eos, tokens: roles };
        Ok((Self { tokenizer, without_special, vocab_size, byte_level }, named))
    }

    /// Errors are reasons, for the caller to name the file.
    pub(super) fn encode(&self, text: &str, add: AddSpecial) -> Result<Vec<u32>, String> {
        let encoding =
            self.tokenizer.encode_fast(text, add == AddSpecial::Yes).map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    /// As [`encode`](Self::encode), without looking for special tokens and without adding any.
    pub(super) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, String> {
        let encode = || -> tokenizers::Result<Vec<u32>> {
            let mut pieces =
                self.without_special.extract_and_normalize(self.tokenizer.get_normalizer(), text);
            if let Some(pre_tokenizer) = self.tokenizer.get_pre_tokenizer() {
                pre_tokenizer.pre_tokenize(&mut pieces)?;
            }
            pieces.tokenize(|piece| self.tokenizer.get_model().tokenize(piece.get()))?;
            Ok(pieces.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
        };
        encode().map_err(|error| error.to_string())
    }

    /// Appends the text of `id`, which may be part of a character; `None` if there is no such token. Only for
    /// byte-level tokenizers.
    pub(super) fn decode_token(&self, id: u32, skip_special: bool, output: &mut Vec<u8>) -> Option<()> {
        let token = self.tokenizer.id_to_token(id)?;
        if !(skip_special && self.tokenizer.get_added_vocabulary().is_special_token(&token)) {
            byte_level::decode_token(&token, output);
        }
        Some(())
    }

    /// The text of tokens that all exist. Errors are reasons.
    pub(super) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, String> {
        self.tokenizer.decode(ids, skip_special).map_err(|error| error.to_string())
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }
}

/// The content of a file.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| Error::Io { action: "read", path: path.to_owned(), source })
}

/// The object in a configuration file, `None` if there is no such file.
pub(crate) fn read_json(path: &Path) -> Result<Option<serde_json::Map<String, Value>>> {
    if !path.exists() {
        return Ok(None);
    }
    serde_json::from_slice(&read(path)?).map(Some).map_err(|error| Error::Malformed {
        path: path.to_owned(),
        what: "file".to_owned(),
        expected: "a JSON object".to_owned(),
        got: error.to_string(),
    })
}

/// Refuses a BPE model whose merges do not join tokens of its vocabulary; the `tokenizers` crate trusts them.
fn check_model(json: &[u8]) -> Result<(), String> {
    #[derive(Deserialize)]
    struct File {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        #[serde(default)]
        vocab: Vocab,
        #[serde(default)]
        merges: Vec<Merge>,
        continuing_subword_prefix: Option<String>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Vocab {
        Ids(HashMap<String, u32>),
        /// Of another kind of model, which has no merges.
        Other(serde::de::IgnoredAny),
    }
    impl Default for Vocab {
        fn default() -> Self {
            Vocab::Other(serde::de::IgnoredAny)
        }
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Merge {
        Line(String),
        Pair(String, String),
    }

    let file: File = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let Vocab::Ids(vocab) = file.model.vocab else { return Ok(()) };
    let prefix = file.model.continuing_subword_prefix.unwrap_or_default();
    for (rank, merge) in file.model.merges.iter().enumerate() {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Line(line) if line.starts_with("#version") => continue,
            Merge::Line(line) => line.split_once(' ').ok_or_else(|| {
                format!("merge {rank}: expected two tokens with a space between, got {line:?}")
            })?,
        };
        let rest = right.strip_prefix(&prefix).ok_or_else(|| {
            format!("merge {rank}: expected {right:?} to begin with the continuing_subword_prefix {prefix:?}")
        })?;
        for token in [left, right, &format!("{left}{rest}")] {
            if !vocab.contains_key(token) {
                return Err(format!(
                    "merge {rank} ({left:?}, {right:?}): token {token:?} is not in the vocabulary"
                ));
            }
        }
    }
    Ok(())
}

/// The text of a token that a configuration names as a string or an object.
pub(super) fn content(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}

/// Adds the special tokens of `tokenizer_config.json` and returns those that have a role. Errors are reasons.
fn add_special_tokens(
    tokenizer: &mut tokenizers::Tokenizer,
    config: &serde_json::Map<String, Value>,
) -> Result<BTreeMap<String, String>, String> {
    let mut described: BTreeMap<u32, AddedToken> = BTreeMap::new();
    if let Some(entries) = config.get("added_tokens_decoder") {
        let entries = entries.as_object().ok_or("added_tokens_decoder: expected an object")?;
        for (id, entry) in entries {
            let id =
                id.parse().map_err(|_| format!("added_tokens_decoder: expected a token id, got {id:?}"))?;
            described.insert(
                id,
                added_token(entry).ok_or_else(|| format!("added_tokens_decoder[{id}]: no content"))?,
            );
        }
    }
    let mut roles = BTreeMap::new();
    let mut listed: Vec<&Value> = Vec::new();
    for role in ROLES {
        if let Some(token) = config.get(role) {
            roles.extend(content(token).map(|token| (role.to_owned(), token.to_owned())));
            listed.push(token);
        }
    }
    // Roles that only some models have, as in image_token.
    let named = config.get("extra_special_tokens").and_then(Value::as_object).into_iter().flatten();
    let own = config.iter().filter(|(key, _)| key.ends_with("_token") && !ROLES.contains(&key.as_str()));
    for (role, token) in own.chain(named) {
        if let Some(text) = token.as_str() {
            roles.insert(role.clone(), text.to_owned());
            listed.push(token);
        }
    }
    for key in ["additional_special_tokens", "extra_special_tokens"] {
        listed.extend(config.get(key).and_then(Value::as_array).into_iter().flatten());
    }

    let has_role = |token: &AddedToken| roles.values().any(|text| *text == token.content);
    let known: HashMap<String, AddedToken> = tokenizer
        .get_added_tokens_decoder()
        .into_values()
        .map(|token| (token.content.clone(), token))
        .collect();
    let mut added: Vec<AddedToken> =
        described.into_values().filter(|token| known.get(&token.content) != Some(token)).collect();
    for token in listed.into_iter().filter_map(added_token) {
        // Tokens that are there keep the flags that they have.
        if !known.contains_key(&token.content) && added.iter().all(|other| other.content != token.content) {
            added.push(token.special(true));
        }
    }
    for token in &mut added {
        token.special |= has_role(token);
    }
    tokenizer.add_tokens(added).map_err(|error| error.to_string())?;
    Ok(roles)
}

/// A token that a configuration names, special if that is all it says.
fn added_token(entry: &Value) -> Option<AddedToken> {
    let flag = |key: &str| entry.get(key).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(entry.is_string());
    Some(
        AddedToken::from(content(entry)?, special)
            .single_word(flag("single_word").unwrap_or(false))
            .lstrip(flag("lstrip").unwrap_or(false))
            .rstrip(flag("rstrip").unwrap_or(false))
            .normalized(flag("normalized").unwrap_or(!special)),
    )
}

/// `eos_token_id`, one or several, of `generation_config.json`, or of `config.json` where that says nothing.
pub(super) fn generation_eos(tokenizer: &Path) -> Result<Vec<u32>> {
    for name in ["generation_config.json", "config.json"] {
        let path: PathBuf = tokenizer.with_file_name(name);
        let Some(config) = read_json(&path)? else { continue };
        let ids = match config.get("eos_token_id") {
            None | Some(Value::Null) => continue,
            Some(Value::Array(ids)) => ids.iter().map(token_id).collect(),
            Some(id) => token_id(id).map(|id| vec![id]),
        };
        return ids.ok_or_else(|| Error::Config {
            path,
            key: "eos_token_id".to_owned(),
            expected: "a token id or a list of them".to_owned(),
            got: config["eos_token_id"].to_string(),
        });
    }
    Ok(Vec::new())
}

fn token_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

/// Leaves out the library's cache of words: it is one of every thread, which keeps words of models that are gone.
fn forget_words(tokenizer: &mut tokenizers::Tokenizer) {
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model() {
        let mut bpe = bpe.clone();
        bpe.resize_cache(0);
        tokenizer.with_model(bpe);
    }
}
