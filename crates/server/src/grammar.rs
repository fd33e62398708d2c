//! Constraining answers to a grammar, with llguidance.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, OnceLock};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory, TokenParser};
use moeflux::tokenizer::Tokenizer;
use moeflux::{Constraint, Error, Result, Scheduler, TokenSet};

use crate::error::ApiError;
use crate::keys::{KeyWatch, Outlook, Position};

/// Most items of the parser after a token, and while the tokens that may follow are determined: an object with a thousand
/// optional properties needs about four thousand.
const MAX_ROW: usize = 40_000;
const MAX_STEP: usize = 400_000;
/// Beginnings of names that are looked at to tell whether there is a new name: as many as letters of names that are there.
const MAX_BEGINNINGS: usize = 400;

/// Makes constraints for one tokenizer.
pub(crate) struct Grammars {
    scheduler: Arc<Scheduler>,
    /// Made when the first grammar is asked for: the trie of a large vocabulary takes some time.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// Tokens with a quotation mark.
    quotes: OnceLock<Words>,
}

/// Tokens with their bytes.
type Words = Arc<Vec<(TokenId, Vec<u8>)>>;

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
        Self { scheduler, factory: OnceLock::new(), quotes: OnceLock::new() }
    }

    fn factory(&self) -> Result<&ParserFactory, ApiError> {
        let make = || {
            let trie = trie(self.scheduler.tokenizer())?;
            let env: TokEnv = Arc::new(Env { scheduler: Arc::clone(&self.scheduler), trie });
            let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
            factory.quiet();
            let limits = factory.limits_mut();
            (limits.max_items_in_row, limits.step_max_items) = (MAX_ROW, MAX_STEP);
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
        // All other names can be continued to one that is new.
        let finite_names =
            serde_json::to_string(&grammar).is_ok_and(|text| text.contains("patternProperties"));
        let parser = self.parser(grammar)?.map_err(|reason| {
            tracing::debug!("{param}: {reason}");
            ApiError::invalid(param, "the grammar cannot be compiled")
        })?;
        let eos = self.scheduler.tokenizer().eos_ids().to_vec();
        let quotes = self.quotes.get_or_init(|| {
            let tokenizer = self.scheduler.tokenizer();
            let all = (0..tokenizer.vocab_size() as u32).filter(|id| !tokenizer.is_special(*id));
            let with_bytes = all.filter_map(|id| Some((id, tokenizer.token_bytes(id)?)));
            Arc::new(with_bytes.filter(|(_, bytes)| bytes.contains(&b'"')).collect())
        });
        Ok(Box::new(Guided {
            matcher: Matcher::new(Ok(parser)),
            eos,
            scheduler: Arc::clone(&self.scheduler),
            quotes: Arc::clone(quotes),
            watch: KeyWatch::default(),
            finite_names,
        }))
    }

    /// Whether a grammar works.
    pub(crate) fn try_out(&self, grammar: TopLevelGrammar) -> Trial {
        let Ok(made) = self.parser(grammar) else { return Trial::TooComplex };
        let first = made.and_then(|parser| {
            let mask = Matcher::new(Ok(parser)).compute_mask();
            mask.map(drop).map_err(|error| error.to_string())
        });
        match first {
            Ok(()) => Trial::Works,
            Err(reason) if reason.contains("Unsatisfiable schema") => Trial::Empty,
            Err(_) => Trial::TooComplex,
        }
    }

    /// Compiles `grammar`; the inner error is the compiler's.
    fn parser(&self, grammar: TopLevelGrammar) -> Result<Result<TokenParser, String>, ApiError> {
        let factory = self.factory()?;
        // A compiler that panics must not take the server along.
        let made = catch_unwind(AssertUnwindSafe(|| factory.create_parser(grammar)));
        Ok(match made {
            Ok(made) => made.map_err(|error| format!("{error:#}")),
            Err(_) => Err("the compiler panicked".into()),
        })
    }
}

/// What became of a grammar that was tried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trial {
    Works,
    /// No text has it.
    Empty,
    /// It has more than the compiler can do.
    TooComplex,
}

/// A grammar in progress.
struct Guided {
    matcher: Matcher,
    eos: Vec<TokenId>,
    scheduler: Arc<Scheduler>,
    quotes: Words,
    watch: KeyWatch,
    /// Whether there may be no further name for an object.
    finite_names: bool,
}

impl Guided {
    /// Takes tokens that would repeat a name out of `mask`, or lead to where each name does, as long as others are left.
    fn forbid_repeated(&self, mask: &mut SimpleVob) {
        if !self.watch.may_repeat() {
            return;
        }
        let repeated: Vec<TokenId> = if self.finite_names {
            let Ok(env) = self.matcher.tok_env() else { return };
            let trie = env.tok_trie();
            let is_dead = |id: &TokenId| match self.watch.outlook(trie.token(*id)) {
                Outlook::New => false,
                Outlook::Repeats => true,
                Outlook::Open(watch) => !self.reaches_new_name(*id, watch, trie),
            };
            mask.iter().filter(is_dead).collect()
        } else if self.watch.is_watching() {
            let allowed = self.quotes.iter().filter(|(id, _)| mask.is_allowed(*id));
            allowed.filter(|(_, bytes)| self.watch.repeats(bytes)).map(|(id, _)| *id).collect()
        } else {
            return;
        };
        if repeated.len() < mask.num_set() {
            repeated.into_iter().for_each(|id| mask.disallow_token(id));
        }
    }

    /// Whether a name that the object does not have yet can follow `token`, after which the text is as `watch` has read it.
    fn reaches_new_name(&self, token: TokenId, watch: KeyWatch, trie: &TokTrie) -> bool {
        let mut seen: BTreeSet<Position> = BTreeSet::new();
        let mut open = vec![(Rc::new(self.matcher.deep_clone()), token, watch)];
        while let Some((before, token, watch)) = open.pop() {
            if !seen.insert(watch.position()) {
                continue;
            }
            let mut matcher = before.deep_clone();
            let next = matcher.consume_token(token).and_then(|()| matcher.compute_mask());
            let Ok(next) = next else { return true };
            let matcher = Rc::new(matcher);
            for id in next.iter() {
                match watch.outlook(trie.token(id)) {
                    Outlook::New => return true,
                    Outlook::Repeats => {}
                    Outlook::Open(watch) => open.push((Rc::clone(&matcher), id, watch)),
                }
            }
            if seen.len() >= MAX_BEGINNINGS {
                return true;
            }
        }
        false
    }
}

fn fault(error: impl std::fmt::Display) -> Error {
    tracing::error!("grammar: {}", error.to_string().lines().next().unwrap_or_default());
    Error::Constraint { reason: "the form of the answer is too complex".into() }
}

impl Constraint for Guided {
    fn allow(&mut self, tokens: &mut TokenSet) -> Result<()> {
        let mut mask: SimpleVob = self.matcher.compute_mask_or_eos().map_err(fault)?;
        self.forbid_repeated(&mut mask);
        tokens.words_mut().iter_mut().zip(mask.as_slice()).for_each(|(all, own)| *all = *own);
        // The grammar knows one token that ends texts; the model may have several.
        if self.eos.iter().any(|id| mask.is_allowed(*id)) {
            self.eos.iter().for_each(|id| tokens.insert(*id));
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool> {
        self.matcher.consume_token(token).map_err(fault)?;
        let tokenizer = self.scheduler.tokenizer();
        match tokenizer.token_bytes(token) {
            Some(bytes) if !tokenizer.is_special(token) => drop(self.watch.read(&bytes)),
            _ => self.watch.reset(),
        }
        Ok(self.matcher.is_stopped())
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self {
            matcher: self.matcher.deep_clone(),
            eos: self.eos.clone(),
            scheduler: Arc::clone(&self.scheduler),
            quotes: Arc::clone(&self.quotes),
            watch: self.watch.clone(),
            finite_names: self.finite_names,
        })
    }
}
