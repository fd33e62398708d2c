//! How answers are made: the options of `run` and `chat`, and what `/set` changes.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::Args;
use moeflux::sampler::{Sampler, SamplerOptions};
use moeflux::{AnswerOptions, DecodingOptions, TextModel};
use serde_json::{Map, Value, json};

use super::command::CommandError;
use crate::engine_args::{EngineArgs, Pictures};

/// Options of `run` and `chat` besides the model.
#[derive(Debug, Clone, Args)]
pub struct ConversationArgs {
    /// System message
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Resume the conversation in this file, and save it there after every answer
    #[arg(long, value_name = "FILE")]
    pub session: Option<PathBuf>,
    /// Folder of a LoRA adapter, as PEFT saves it, to answer with
    #[arg(long, value_name = "FOLDER")]
    pub lora: Option<PathBuf>,
    /// Maximum tokens in an answer
    #[arg(long, value_name = "N", default_value_t = 1024)]
    pub max_tokens: usize,
    /// Stop string: ends an answer and is not part of it; may be repeated
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub engine: EngineArgs,
}

impl ConversationArgs {
    /// Opens the model, with the adapter if there is one, and with the part that reads pictures, if they are.
    pub fn open_text(&self, model: &Path, pictures: Option<Pictures>) -> Result<TextModel> {
        self.engine.open_adapted(model, self.lora.as_deref(), pictures)
    }
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
pub struct SamplingArgs {
    /// Sampling temperature; 0 always takes the most likely token
    #[arg(
        long,
        value_name = "T",
        default_value_t = SamplerOptions::of_chats().temperature,
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    temperature: f32,
    /// Sample from the K most likely tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    top_k: usize,
    /// Sample from the most likely tokens whose probabilities add up to P
    #[arg(long, value_name = "P", default_value_t = SamplerOptions::of_chats().top_p, help_heading = "Sampling")]
    top_p: f32,
    /// Sample from tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.0, help_heading = "Sampling")]
    min_p: f32,
    /// Divides the logits of recent tokens; 1 for none
    #[arg(long, value_name = "R", default_value_t = 1.0, help_heading = "Sampling")]
    repetition_penalty: f32,
    /// Subtracted from the logits of recent tokens
    #[arg(
        long,
        value_name = "R",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    presence_penalty: f32,
    /// Subtracted from the logits of recent tokens for each occurrence
    #[arg(
        long,
        value_name = "R",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    frequency_penalty: f32,
    /// Add BIAS to a token's logit; may be repeated
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias, help_heading = "Sampling")]
    logit_bias: Vec<(u32, f32)>,
    /// Random seed; the same seed gives the same text
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    seed: Option<u64>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| format!("expected ID=BIAS such as 42=-1.5, got {text:?}"))
}

/// What `/set` knows.
pub const NAMES: [&str; 10] = [
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "max_tokens",
    "thinking",
];

/// How the next answer is made.
#[derive(Debug, Clone)]
pub struct Settings {
    sampler: SamplerOptions,
    max_tokens: usize,
    stop: Vec<String>,
    /// `enable_thinking` of the chat template; `None` is the template's own choice.
    thinking: Option<bool>,
}

impl Settings {
    /// As the command line says.
    ///
    /// # Errors
    /// [`moeflux::Error::Option`] for sampling options without meaning.
    pub fn new(args: &ConversationArgs, model: &TextModel) -> moeflux::Result<Self> {
        let given = &args.sampling;
        let sampler = SamplerOptions {
            temperature: given.temperature,
            top_k: given.top_k,
            top_p: given.top_p,
            min_p: given.min_p,
            repetition_penalty: given.repetition_penalty,
            presence_penalty: given.presence_penalty,
            frequency_penalty: given.frequency_penalty,
            logit_bias: given.logit_bias.iter().copied().collect(),
            seed: given.seed,
            ..SamplerOptions::default()
        };
        Sampler::new(sampler.clone(), model.tokenizer.vocab_size())?;
        Ok(Self { sampler, max_tokens: args.max_tokens, stop: args.stop.clone(), thinking: None })
    }

    pub fn answer_options(&self) -> AnswerOptions {
        AnswerOptions { decoding: self.decoding_options(), variables: self.template_variables() }
    }

    pub fn decoding_options(&self) -> DecodingOptions {
        DecodingOptions {
            sampler: self.sampler.clone(),
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            ..DecodingOptions::default()
        }
    }

    /// Variables for the chat template.
    fn template_variables(&self) -> Map<String, Value> {
        self.thinking.map(|on| ("enable_thinking".to_owned(), json!(on))).into_iter().collect()
    }

    /// The value of the setting `name`.
    pub fn value(&self, name: &str) -> Option<String> {
        let mut s = self.sampler.clone();
        if let Some(number) = s.number_mut(name) {
            return Some(number.to_string());
        }
        Some(match name {
            "top_k" => s.top_k.to_string(),
            "seed" => s.seed.map_or("random".into(), |seed| seed.to_string()),
            "max_tokens" => self.max_tokens.to_string(),
            "thinking" => self.thinking.map_or("auto", |on| if on { "on" } else { "off" }).into(),
            _ => return None,
        })
    }

    /// Changes one setting; after an error all are as they were.
    ///
    /// # Errors
    /// [`CommandError`] for a name or value that does not exist, [`moeflux::Error::Option`] for one without meaning.
    pub fn set(&mut self, name: &str, value: &str, model: &TextModel) -> anyhow::Result<()> {
        let changed = self.with(name, value)?;
        Sampler::new(changed.sampler.clone(), model.tokenizer.vocab_size())?;
        if name == "thinking" && changed.thinking.is_some() {
            check_thinking(model)?;
        }
        *self = changed;
        Ok(())
    }

    fn with(&self, name: &str, value: &str) -> Result<Self, CommandError> {
        let wrong = |expected: &str| CommandError::Value {
            setting: name.into(),
            expected: expected.into(),
            got: value.into(),
        };
        let count = || value.parse::<usize>().map_err(|_| wrong("a non-negative integer"));
        let mut changed = self.clone();
        let sampler = &mut changed.sampler;
        if let Some(number) = sampler.number_mut(name) {
            *number = value.parse().map_err(|_| wrong("a number"))?;
            return Ok(changed);
        }
        match name {
            "top_k" => sampler.top_k = count()?,
            "seed" if value == "random" => sampler.seed = None,
            "seed" => sampler.seed = Some(value.parse().map_err(|_| wrong("an integer or random"))?),
            "max_tokens" => match count()? {
                0 => return Err(wrong("a positive number")),
                count => changed.max_tokens = count,
            },
            "thinking" => {
                changed.thinking = match value {
                    "on" => Some(true),
                    "off" => Some(false),
                    "auto" => None,
                    _ => return Err(wrong("on, off or auto")),
                }
            }
            _ => {
                return Err(CommandError::UnknownSetting { got: name.into(), known: NAMES.join(", ") });
            }
        }
        Ok(changed)
    }
}

impl fmt::Display for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines = NAMES.iter().map(|name| format!("{name:<20}{}", self.value(name).unwrap_or_default()));
        f.write_str(&lines.collect::<Vec<_>>().join("\n"))
    }
}

/// Refuses to switch thinking where that would change nothing.
fn check_thinking(model: &TextModel) -> Result<(), CommandError> {
    let messages = json!([{"role": "user", "content": "."}]);
    let render = |on: bool| {
        let variables = Map::from_iter([("enable_thinking".to_owned(), json!(on))]);
        model.template.as_ref().and_then(|t| t.render(&messages, None, true, &variables).ok())
    };
    if render(true) == render(false) {
        Err(CommandError::Value {
            setting: "thinking".into(),
            expected: "a model whose chat template supports switching it".into(),
            got: "one that cannot".into(),
        })
    } else {
        Ok(())
    }
}
