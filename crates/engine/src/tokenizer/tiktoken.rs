//! Tokenizers of folders that have a `tiktoken.model` and no `tokenizer.json`, as Kimi and Moonlight are published.
//!
//! The file has a line a token: its bytes in base64, and its rank, which is its id. Text is cut into words by a pattern, and
//! of each word's parts, bytes at first, those two are joined whose bytes are the token of lowest rank, the leftmost of equal
//! ones, as long as there are such two. The reference for ids is tiktoken with the pattern and the special tokens that the
//! models' own `TikTokenTokenizer` (`tokenization_kimi.py`) gives it; unlike that, this neither cuts texts after 400,000
//! characters nor runs of 25,000 without white space.
//!
//! Special tokens follow the others: those that `added_tokens_decoder` of `tokenizer_config.json` names, and reserved ones.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer as _, SplitDelimiterBehavior,
};

use super::hugging_face::{ROLES, content, generation_eos, read, read_json};
use super::special::{SpecialTokens, Stretch};
use super::{Named, byte_level};
use crate::{Error, Result};

/// Name of the file.
pub(super) const FILE: &str = "tiktoken.model";

/// The class whose pattern is known.
const CLASS: &str = "TikTokenTokenizer";

/// What words are, the first that fits: `pat_str` of that class. Upper and lower case, Han and other letters part words.
const WORDS: [&str; 8] = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
];

/// Special tokens that there are after the others, named or not.
const RESERVED: usize = 256;

/// Tokens of a file, at most.
const MAX_TOKENS: usize = 1 << 22;

#[derive(Debug)]
enum Token {
    Bytes(Box<[u8]>),
    Special {
        text: String,
        /// Left out of text that is decoded without special tokens.
        hidden: bool,
    },
}

/// The tokenizer of a `tiktoken.model`.
#[derive(Debug)]
pub(super) struct Tiktoken {
    words: Split,
    /// By bytes, without special tokens.
    ranks: HashMap<Box<[u8]>, u32>,
    /// By id; some may be missing.
    tokens: Vec<Option<Token>>,
    special: SpecialTokens,
    special_ids: HashMap<String, u32>,
}

impl Tiktoken {
    pub(super) fn new(path: &Path) -> Result<(Self, Named)> {
        let fail = |reason: String| Error::Tokenizer { path: path.to_owned(), reason };
        let ranks = read_ranks(&read(path)?).map_err(fail)?;
        let config_path = path.with_file_name("tokenizer_config.json");
        let config = read_json(&config_path)?.unwrap_or_default();
        check_class(path, &config).map_err(fail)?;
        let model = read_json(&path.with_file_name("config.json"))?.unwrap_or_default();
        let text_model = model.get("text_config").and_then(Value::as_object).unwrap_or(&model);
        let vocab_size = text_model.get("vocab_size").and_then(Value::as_u64).map(|size| size as usize);
        let special = special_tokens(&config, ranks.len(), vocab_size)
            .map_err(|reason| Error::Tokenizer { path: config_path.clone(), reason })?;

        let bytes = ranks.iter().map(|(bytes, rank)| (*rank, Token::Bytes(bytes.clone())));
        let mut tokens: Vec<Option<Token>> = vec![];
        let mut special_ids = HashMap::new();
        let named = special.into_iter().map(|(id, (text, hidden))| {
            special_ids.insert(text.clone(), id);
            (id, Token::Special { text, hidden })
        });
        for (id, token) in bytes.chain(named) {
            if tokens.len() <= id as usize {
                tokens.resize_with(id as usize + 1, || None);
            }
            if tokens[id as usize].replace(token).is_some() {
                return Err(fail(format!("two tokens have the id {id}")));
            }
        }
        let special = SpecialTokens::new(special_ids.iter().map(|(text, id)| (text.clone(), *id, true)));
        let words = SplitPattern::Regex(WORDS.join("|"));
        let words = Split::new(words, SplitDelimiterBehavior::Isolated, false);
        let words = words.map_err(|error| fail(error.to_string()))?;

        let role = |role: &str| Some((role.to_owned(), content(config.get(role)?)?.to_owned()));
        let roles: BTreeMap<String, String> = ROLES.into_iter().filter_map(role).collect();
        let id_of = |role: &str| roles.get(role).and_then(|text| special_ids.get(text)).copied();
        let mut eos = generation_eos(path)?;
        eos.extend(id_of("eos_token").filter(|id| !eos.contains(id)));
        let named = Named { bos: id_of("bos_token"), eos, tokens: roles };
        Ok((Self { words, ranks, tokens, special, special_ids }, named))
    }

    /// The ids of `text`; special tokens written out in it are spelled unless `parse_special`. Errors are reasons.
    pub(super) fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, String> {
        let mut ids = vec![];
        for part in self.special.split(text, parse_special) {
            match part {
                Stretch::Token(id) => ids.push(id),
                Stretch::Text(text) => {
                    let mut words = PreTokenizedString::from(text);
                    self.words.pre_tokenize(&mut words).map_err(|error| error.to_string())?;
                    for (word, _, _) in words.get_splits(OffsetReferential::Original, OffsetType::None) {
                        merge(&self.ranks, word.as_bytes(), &mut ids)?;
                    }
                }
            }
        }
        Ok(ids)
    }

    /// Appends the text of `id`, which may be part of a character; `None` if there is no such token.
    pub(super) fn decode_token(&self, id: u32, skip_special: bool, output: &mut Vec<u8>) -> Option<()> {
        match self.token(id)? {
            Token::Special { hidden: true, .. } if skip_special => {}
            Token::Special { text, .. } => output.extend_from_slice(text.as_bytes()),
            Token::Bytes(bytes) => output.extend_from_slice(bytes),
        }
        Some(())
    }

    pub(super) fn vocab_size(&self) -> usize {
        self.tokens.len()
    }

    /// Tokens that are not special are written in GPT-2's alphabet for bytes, as other vocabularies have them.
    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        let bytes = || token.chars().map(byte_level::byte_of).collect::<Option<Vec<u8>>>();
        self.special_ids.get(token).copied().or_else(|| self.ranks.get(bytes()?.as_slice()).copied())
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<String> {
        Some(match self.token(id)? {
            Token::Special { text, .. } => text.clone(),
            Token::Bytes(bytes) => byte_level::written(bytes),
        })
    }

    fn token(&self, id: u32) -> Option<&Token> {
        self.tokens.get(id as usize)?.as_ref()
    }
}

/// The tokens of a file by their bytes. Errors are reasons.
fn read_ranks(file: &[u8]) -> Result<HashMap<Box<[u8]>, u32>, String> {
    let mut ranks = HashMap::new();
    let lines = file.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii).zip(1..);
    for (line, number) in lines.filter(|(line, _)| !line.is_empty()) {
        let parse = || {
            let (token, rank) = std::str::from_utf8(line).ok()?.split_once(' ')?;
            let rank: u32 = rank.parse().ok().filter(|rank| (*rank as usize) < MAX_TOKENS)?;
            Some((base64(token)?, rank))
        };
        let (bytes, rank) = parse().ok_or_else(|| {
            format!("line {number}: expected a token in base64, a space and a rank below {MAX_TOKENS}")
        })?;
        if bytes.is_empty() || ranks.insert(bytes.into_boxed_slice(), rank).is_some() {
            return Err(format!("line {number}: expected bytes that no other token has"));
        }
    }
    if ranks.is_empty() {
        return Err("expected at least one token, got none".to_owned());
    }
    Ok(ranks)
}

/// The bytes that `text` means in base64 (RFC 4648, section 4).
fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=');
    if !text.len().is_multiple_of(4) || text.len() - digits.len() > 2 {
        return None;
    }
    let mut bytes = vec![];
    let (mut bits, mut count) = (0u32, 0);
    for digit in digits.bytes() {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(value);
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    Some(bytes)
}

/// Refuses a class that may cut words otherwise: one of another name, or whose source beside the file has another pattern.
/// Errors are reasons.
fn check_class(path: &Path, config: &Map<String, Value>) -> Result<(), String> {
    let class = config.get("tokenizer_class").and_then(Value::as_str).unwrap_or("nothing");
    if class != CLASS {
        return Err(format!("tokenizer_config.json: tokenizer_class: expected {CLASS}, got {class}"));
    }
    let auto = config.get("auto_map").and_then(|map| map.get("AutoTokenizer"));
    let auto = auto.and_then(|auto| auto.as_str().or_else(|| auto.get(0)?.as_str()));
    let Some((module, _)) = auto.and_then(|auto| auto.split_once('.')) else { return Ok(()) };
    let plain = module.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let source = path.with_file_name(format!("{module}.py"));
    if !plain || !source.exists() {
        return Ok(());
    }
    let source = read(&source).map_err(|error| error.to_string())?;
    let source = String::from_utf8_lossy(&source);
    match WORDS.iter().find(|words| !source.contains(*words)) {
        Some(words) => {
            Err(format!("{module}.py: expected a pattern for words that has {words}, got another"))
        }
        None => Ok(()),
    }
}

/// Special tokens by id, with whether they are hidden: those of `added_tokens_decoder` and the reserved ones after `base`
/// others, as far as the model has them. Errors are reasons.
fn special_tokens(
    config: &Map<String, Value>,
    base: usize,
    vocab_size: Option<usize>,
) -> Result<BTreeMap<u32, (String, bool)>, String> {
    let end = vocab_size.unwrap_or(MAX_TOKENS).min(MAX_TOKENS);
    let mut special: BTreeMap<u32, (String, bool)> = (base..(base + RESERVED).min(end))
        .map(|id| (id as u32, (format!("<|reserved_token_{id}|>"), true)))
        .collect();
    let Some(described) = config.get("added_tokens_decoder") else { return Ok(special) };
    for (id, entry) in described.as_object().ok_or("added_tokens_decoder: expected an object")? {
        let id: u32 =
            id.parse().map_err(|_| format!("added_tokens_decoder: expected a token id, got {id:?}"))?;
        let text = content(entry).filter(|text| !text.is_empty());
        let text = text.ok_or_else(|| format!("added_tokens_decoder[{id}]: no content"))?;
        let hidden = entry.get("special").and_then(Value::as_bool).unwrap_or(true);
        if (id as usize) < end {
            special.insert(id, (text.to_owned(), hidden));
        }
    }
    Ok(special)
}

/// Appends the ids of a word's parts once no two of them are a token together. Errors are reasons.
fn merge(ranks: &HashMap<Box<[u8]>, u32>, word: &[u8], ids: &mut Vec<u32>) -> Result<(), String> {
    if let Some(id) = ranks.get(word) {
        ids.push(*id);
        return Ok(());
    }
    // Where the part that begins at a byte ends, and where the one before it begins; 0 for what is no beginning.
    let mut ends: Vec<usize> = (1..=word.len()).collect();
    let mut before: Vec<usize> = (0..word.len()).map(|start| start.saturating_sub(1)).collect();
    // Two parts that are a token together, by its rank and their place.
    let mut pairs = BinaryHeap::new();
    let pair = |start: usize, middle: usize, end: usize| {
        Some(Reverse((*ranks.get(&word[start..end])?, start, middle, end)))
    };
    pairs.extend((2..=word.len()).filter_map(|end| pair(end - 2, end - 1, end)));
    while let Some(Reverse((_, start, middle, end))) = pairs.pop() {
        // Either part may have been joined with another since.
        if ends[start] != middle || ends[middle] != end {
            continue;
        }
        (ends[start], ends[middle]) = (end, 0);
        if let Some(next) = ends.get(end) {
            before[end] = start;
            pairs.extend(pair(start, end, *next));
        }
        if start > 0 {
            pairs.extend(pair(before[start], start, end));
        }
    }
    let mut start = 0;
    while start < word.len() {
        let part = &word[start..ends[start]];
        let id = ranks.get(part);
        ids.push(*id.ok_or_else(|| format!("the vocabulary has no token for byte {:#04x}", part[0]))?);
        start = ends[start];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_strict() {
        let check = |text: &str, bytes: Option<&[u8]>| assert_eq!(base64(text).as_deref(), bytes, "{text}");
        check("", Some(b""));
        check("IQ==", Some(b"!"));
        check("IHQ=", Some(b" t"));
        check("/+9h", Some(&[0xff, 0xef, b'a']));
        for text in ["IQ", "IQ=", "I===", "I Q=", "IQ=A", "SQ-_"] {
            check(text, None);
        }
    }

    /// What joining the lowest rank first means, one pair after another.
    fn merge_slowly(ranks: &HashMap<Box<[u8]>, u32>, word: &[u8]) -> Vec<u32> {
        let mut parts: Vec<Vec<u8>> = word.iter().map(|byte| vec![*byte]).collect();
        let rank = |parts: &[Vec<u8>], i: usize| ranks.get(parts[i..i + 2].concat().as_slice()).copied();
        while let Some((_, i)) =
            (0..parts.len().saturating_sub(1)).filter_map(|i| Some((rank(&parts, i)?, i))).min()
        {
            let joined = parts[i..i + 2].concat();
            parts.splice(i..i + 2, [joined]);
        }
        parts.iter().map(|part| ranks[part.as_slice()]).collect()
    }

    #[test]
    fn the_lowest_rank_is_joined_first() {
        let tokens = ["a", "b", "c", "ab", "bc", "aa", "abc", "aab", "cab", "bcaa", "abab"];
        let ranks: HashMap<Box<[u8]>, u32> = tokens.iter().map(|t| t.as_bytes().into()).zip(0..).collect();
        for number in 0..3usize.pow(9) {
            let word: Vec<u8> = (0..9).map(|place| b"abc"[number / 3usize.pow(place) % 3]).collect();
            let mut ids = vec![];
            merge(&ranks, &word, &mut ids).unwrap();
            assert_eq!(ids, merge_slowly(&ranks, &word), "{word:?}");
        }
        assert!(merge(&ranks, b"ax", &mut vec![]).unwrap_err().contains("0x78"));
    }
}
