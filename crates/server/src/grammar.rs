//! Constraining answers to a grammar, with llguidance.

use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use moeflux::tokenizer::Tokenizer;
use moeflux::{Constraint, Error, Result, Scheduler};
use serde_json::{Value, json};

use crate::error::ApiError;

/// Makes constraints for one tokenizer.
pub(crate) struct Grammars {
    scheduler: Arc<Scheduler>,
    /// Made when the first grammar is asked for: the trie of a large vocabulary takes some time.
    factory: OnceLock<Result<ParserFactory, String>>,
}

/// The tokenizer as llguidance sees it.
struct Env {
    scheduler: Arc<Scheduler>,
    trie: TokTrie,
}

impl TokenizerEnv for Env {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.tokenize_with_greedy_fallback(bytes, |text| {
            self.scheduler.tokenizer().encode_plain(text).unwrap_or_default()
        })
    }

    fn tokenize_is_canonical(&self) -> bool {
        // Tokens are chosen by the model one at a time; nothing is forced.
        false
    }
}

/// The vocabulary as a trie of bytes. Special tokens are none of the text's.
fn trie(tokenizer: &Tokenizer) -> Result<TokTrie, String> {
    let size = tokenizer.vocab_size();
    let eos = tokenizer.eos_ids();
    let first = eos.first().ok_or("the tokenizer has no end-of-text token")?;
    let word = |id| match tokenizer.token_bytes(id) {
        Some(bytes) if eos.contains(&id) || tokenizer.is_special(id) => {
            [&[TokTrie::SPECIAL_TOKEN_MARKER], &bytes[..]].concat()
        }
        other => other.unwrap_or_default(),
    };
    let words: Vec<Vec<u8>> = (0..size as u32).map(word).collect();
    Ok(TokTrie::from(&TokRxInfo::new(size as u32, *first), &words))
}

impl Grammars {
    pub(crate) fn new(scheduler: Arc<Scheduler>) -> Self {
        Self { scheduler, factory: OnceLock::new() }
    }

    fn factory(&self) -> Result<&ParserFactory, ApiError> {
        let make = || {
            let trie = trie(self.scheduler.tokenizer())?;
            let env: TokEnv = Arc::new(Env { scheduler: Arc::clone(&self.scheduler), trie });
            let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
            factory.quiet();
            Ok(factory)
        };
        let made = self.factory.get_or_init(make).as_ref();
        made.map_err(|reason| ApiError::invalid("response_format", reason))
    }

    /// A constraint by a grammar; `param` is the field that it came in. Takes a while: not for an asynchronous task.
    pub(crate) fn constraint(
        &self,
        grammar: TopLevelGrammar,
        param: &str,
    ) -> Result<Box<dyn Constraint>, ApiError> {
        let parser = self.factory()?.create_parser(grammar);
        let parser = parser.map_err(|error| ApiError::invalid(param, first_lines(&error.to_string())))?;
        let eos = self.scheduler.tokenizer().eos_ids().to_vec();
        Ok(Box::new(Guided { matcher: Matcher::new(Ok(parser)), eos }))
    }
}

/// Messages of the grammar compiler continue with the whole grammar.
fn first_lines(text: &str) -> String {
    text.lines().take(2).collect::<Vec<_>>().join(" ").chars().take(400).collect()
}

/// A grammar for the JSON values of `schema`.
pub(crate) fn json_schema(schema: &Value, param: &str) -> Result<TopLevelGrammar, ApiError> {
    Ok(TopLevelGrammar::from_json_schema(with_separators(schema, param)?))
}

/// `schema` with single spaces allowed where JSON allows any: white space must not repeat endlessly.
pub(crate) fn with_separators(schema: &Value, param: &str) -> Result<Value, ApiError> {
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        other => return Err(ApiError::invalid(param, format!("expected a JSON schema, got {other}"))),
    };
    let separators = json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?"});
    schema.insert("x-guidance".into(), separators);
    Ok(Value::Object(schema))
}

/// A grammar in progress.
struct Guided {
    matcher: Matcher,
    eos: Vec<TokenId>,
}

fn fault(error: impl std::fmt::Display) -> Error {
    Error::Constraint { reason: first_lines(&error.to_string()) }
}

impl Constraint for Guided {
    fn mask(&mut self, logits: &mut [f32]) -> Result<()> {
        let mask: SimpleVob = self.matcher.compute_mask_or_eos().map_err(fault)?;
        let may_end = self.eos.iter().any(|id| mask.is_allowed(*id));
        for (id, logit) in (0..).zip(logits) {
            // The grammar knows one token that ends texts; the model may have several.
            let allowed = mask.is_allowed(id) || (may_end && self.eos.contains(&id));
            if !allowed {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool> {
        self.matcher.consume_token(token).map_err(fault)?;
        Ok(self.matcher.is_stopped())
    }
}
