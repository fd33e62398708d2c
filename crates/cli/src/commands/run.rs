//! `moeflux run`: one answer to a prompt, or a chat.

use std::io::{BufRead, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use clap::Args;
use moeflux::error::size;
use moeflux::experts::CacheStats;
use moeflux::sampler::{Sampler, SamplerOptions};
use moeflux::tokenizer::AddSpecial;
use moeflux::{DecodingOptions, Finish, Generated, Session, Stats, TextModel};
use serde_json::{Value, json};

use crate::engine_args::EngineArgs;
use crate::model::ModelArg;

/// Answer a prompt, or chat when there is none and this is a terminal.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A GGUF file, a safetensors folder, `demo`, or a model of the hub such as org/name:Q4_K_M
    model: ModelArg,
    /// What to answer; without it, standard input is the prompt, or a chat begins on a terminal
    prompt: Option<String>,
    /// System message
    #[arg(long, value_name = "TEXT")]
    system: Option<String>,
    /// Continue the prompt as it stands, without the chat template
    #[arg(long, conflicts_with = "system")]
    raw: bool,
    /// Continue the conversation in this file if it is there, and keep it there after every answer
    #[arg(long, value_name = "FILE")]
    session: Option<PathBuf>,
    /// Most tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 1024)]
    max_tokens: usize,
    /// Text that ends an answer and is left out of it; may be given several times
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

/// How tokens are chosen.
#[derive(Debug, Clone, Args)]
pub struct SamplingArgs {
    /// Divides the logits; 0 always takes the most likely token
    #[arg(
        long,
        value_name = "T",
        default_value_t = 0.7,
        allow_negative_numbers = true,
        help_heading = "Sampling"
    )]
    temperature: f32,
    /// Only this many of the most likely tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0, help_heading = "Sampling")]
    top_k: usize,
    /// Only the most likely tokens that together have this probability
    #[arg(long, value_name = "P", default_value_t = 0.95, help_heading = "Sampling")]
    top_p: f32,
    /// Only tokens at least this fraction as likely as the most likely one
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
    /// Added to a token's logit; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = parse_bias, help_heading = "Sampling")]
    logit_bias: Vec<(u32, f32)>,
    /// Same seed, same text
    #[arg(long, value_name = "N", help_heading = "Sampling")]
    seed: Option<u64>,
}

fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let parsed = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    parsed.ok_or_else(|| format!("expected ID=BIAS such as 42=-1.5, got {text:?}"))
}

impl SamplingArgs {
    fn options(&self) -> SamplerOptions {
        SamplerOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.iter().copied().collect(),
            seed: self.seed,
            ..SamplerOptions::default()
        }
    }
}

/// Set by Ctrl-C while an answer is generated; a second Ctrl-C, or one between answers, ends the program.
#[derive(Debug, Clone, Default)]
struct Interrupt {
    generating: Arc<AtomicBool>,
    stop: Arc<AtomicBool>,
}

impl Interrupt {
    fn install() -> Result<Self> {
        let interrupt = Self::default();
        let handler = interrupt.clone();
        ctrlc::set_handler(move || {
            let first =
                handler.generating.load(Ordering::SeqCst) && !handler.stop.swap(true, Ordering::SeqCst);
            if !first {
                std::process::exit(130);
            }
        })
        .context("cannot watch for Ctrl-C")?;
        Ok(interrupt)
    }
}

pub fn run(args: &RunArgs) -> Result<()> {
    let prompt = match &args.prompt {
        Some(prompt) => Some(prompt.clone()),
        None if std::io::stdin().is_terminal() => None,
        None => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .context("cannot read the prompt from standard input")?;
            Some(text)
        }
    };
    let mut model = args.engine.open_text(&args.model.path()?)?;
    describe(&model);
    // Checked before the first question rather than after it.
    Sampler::new(args.sampling.options(), model.tokenizer.vocab_size())?;
    let interrupt = Interrupt::install()?;
    let mut conversation = Conversation::open(&mut model, args)?;
    match prompt {
        Some(prompt) => {
            let generated = match args.raw {
                true => conversation.continue_text(&mut model, &prompt, args, &interrupt)?,
                false => conversation.ask(&mut model, &prompt, args, &interrupt)?,
            };
            println!();
            report(&generated);
            conversation.save(&model)
        }
        None => chat(&mut model, &mut conversation, args, &interrupt),
    }
}

/// Messages so far and the session that holds their tokens.
struct Conversation {
    messages: Vec<Value>,
    session: Session,
    file: Option<PathBuf>,
}

impl Conversation {
    fn open(model: &mut TextModel, args: &RunArgs) -> Result<Self> {
        let mut session = model.engine.session();
        let mut messages = vec![];
        let file = args.session.clone();
        if let Some(file) = file.as_ref().filter(|file| file.exists()) {
            let note = model.engine.load(&mut session, file)?;
            messages = serde_json::from_str(&note)
                .with_context(|| format!("{}: expected messages beside the session", file.display()))?;
            eprintln!("continuing after {} tokens of {}", session.position(), file.display());
        }
        Ok(Self { messages, session, file })
    }

    fn save(&self, model: &TextModel) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        Ok(model.engine.save(&self.session, file, &Value::from(self.messages.clone()).to_string())?)
    }

    /// Answers `text` as the next message of the conversation.
    fn ask(
        &mut self,
        model: &mut TextModel,
        text: &str,
        args: &RunArgs,
        interrupt: &Interrupt,
    ) -> Result<Generated> {
        let before = self.messages.len();
        match before {
            0 => self.messages = opening(args, text),
            _ => self.messages.push(json!({"role": "user", "content": text})),
        }
        let outcome = self.answer_messages(model, args, interrupt);
        if outcome.is_err() {
            self.messages.truncate(before);
        }
        let (generated, text) = outcome?;
        self.messages.push(json!({"role": "assistant", "content": text}));
        Ok(generated)
    }

    fn answer_messages(
        &mut self,
        model: &mut TextModel,
        args: &RunArgs,
        interrupt: &Interrupt,
    ) -> Result<(Generated, String)> {
        let all = model.encode_chat(&self.messages)?;
        // What the session already holds of the conversation need not be evaluated again.
        let common = all.iter().zip(self.session.tokens()).take_while(|(a, b)| a == b).count();
        let common = common.min(all.len().saturating_sub(1));
        model.engine.truncate(&mut self.session, common)?;
        answer(model, &mut self.session, &all[common..], args, interrupt)
    }

    /// Continues what the session holds and then `text`, without a template.
    fn continue_text(
        &mut self,
        model: &mut TextModel,
        text: &str,
        args: &RunArgs,
        interrupt: &Interrupt,
    ) -> Result<Generated> {
        let special = if self.session.position() == 0 { AddSpecial::Yes } else { AddSpecial::No };
        let tokens = model.tokenizer.encode(text, special)?;
        Ok(answer(model, &mut self.session, &tokens, args, interrupt)?.0)
    }
}

fn opening(args: &RunArgs, prompt: &str) -> Vec<Value> {
    let system = args.system.iter().map(|text| json!({"role": "system", "content": text}));
    system.chain([json!({"role": "user", "content": prompt})]).collect()
}

/// Generates an answer to what `tokens` adds to the session, and writes it as it comes.
fn answer(
    model: &mut TextModel,
    session: &mut Session,
    tokens: &[u32],
    args: &RunArgs,
    interrupt: &Interrupt,
) -> Result<(Generated, String)> {
    if tokens.is_empty() {
        bail!("the prompt is empty");
    }
    let options = DecodingOptions {
        sampler: args.sampling.options(),
        max_tokens: args.max_tokens,
        stop: args.stop.clone(),
        ..DecodingOptions::default()
    };
    let mut text = String::new();
    let mut written = Ok(());
    interrupt.stop.store(false, Ordering::SeqCst);
    interrupt.generating.store(true, Ordering::SeqCst);
    let generated = model.generate(session, tokens, options, |piece| {
        text.push_str(piece);
        let mut out = std::io::stdout().lock();
        written = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
        written.is_ok() && !interrupt.stop.load(Ordering::SeqCst)
    });
    interrupt.generating.store(false, Ordering::SeqCst);
    written.context("cannot write the answer")?;
    Ok((generated?, text))
}

fn chat(
    model: &mut TextModel,
    conversation: &mut Conversation,
    args: &RunArgs,
    interrupt: &Interrupt,
) -> Result<()> {
    if model.template.is_none() {
        bail!("this model has no chat template; give a prompt to continue, with --raw");
    }
    loop {
        eprint!("> ");
        std::io::stderr().flush()?;
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line).context("cannot read from the terminal")? == 0 {
            eprintln!();
            return Ok(());
        }
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        match conversation.ask(model, line, args, interrupt) {
            Ok(generated) => {
                println!();
                report(&generated);
                conversation.save(model)?;
            }
            Err(error) => eprintln!("error: {error:#}"),
        }
    }
}

/// What was opened and how memory is divided, on standard error.
fn describe(model: &TextModel) {
    let engine = &model.engine;
    let (budget, cache) = (engine.budget(), engine.experts());
    let all = cache.store().total_bytes();
    eprintln!(
        "{}; trunk {}, context {} tokens {}, experts {} of {} in {} slots",
        engine.backend(),
        size(budget.needs.trunk),
        engine.context(),
        size(budget.needs.kv),
        size(cache.plan().bytes().min(all)),
        size(all),
        cache.plan().slots(),
    );
    eprintln!("{}", engine.reads());
}

fn speed(stats: &Stats) -> f64 {
    stats.tokens as f64 / stats.time.as_secs_f64().max(1e-9)
}

/// The statistics line at the end of an answer, on standard error.
fn report(generated: &Generated) {
    let (prefill, decode) = (&generated.prefill, &generated.decode);
    let mut cache = CacheStats::default();
    cache += prefill.cache;
    cache += decode.cache;
    let per_token = decode.cache.bytes_read / decode.tokens.max(1);
    let finish = match generated.finish {
        Finish::EndOfText => "",
        Finish::MaxTokens => " (stopped at --max-tokens)",
        Finish::ContextFull => " (stopped: the context is full)",
        Finish::Stopped => " (stopped)",
    };
    let bandwidth = cache.bandwidth().map(|b| format!(" at {:.2} GB/s", b / 1e9)).unwrap_or_default();
    let read_ahead = match cache.prefetches {
        0 => String::new(),
        n => {
            format!(", {n} read ahead, {} of them for nothing", n - (cache.prefetch_hits + cache.late).min(n))
        }
    };
    eprintln!(
        "prompt {} tokens, {:.1} tokens/s; answer {} tokens, {:.1} tokens/s{finish}; experts: {:.1} % hits, {} read{bandwidth} ({} a token){read_ahead}, stalled {:.2} s",
        prefill.tokens,
        speed(prefill),
        generated.tokens.len(),
        speed(decode),
        100.0 * cache.hit_rate(),
        size(cache.bytes_read),
        size(per_token),
        cache.stall.as_secs_f64(),
    );
}
