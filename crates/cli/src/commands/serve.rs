//! `moeflux serve`: OpenAI and Anthropic APIs and a web page over one or several models.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use moeflux::error::size;
use moeflux::memory::parse_size;
use moeflux::scheduler::{BlockObserver, SessionLimits};
use moeflux::{AdapterSource, SchedulerOptions};
use moeflux_server::{KvEvents, Limits, Server, ServerOptions, Tls, serve};
use tokio::signal::unix::{SignalKind, signal};

use crate::engine_args::{EngineArgs, Pictures, Sharing, parse_pixels};
use crate::kv_events_args::KvEventsArgs;
use crate::listen_args::ListenArgs;
use crate::log::{Log, LogFormat, LogLevel};
use crate::model::ModelArg;
use crate::served::{self, Found};

/// Bytes for requests until their tokens are queued: part of `--memory`.
const REQUEST_MEMORY: usize = 12 << 20;
/// For events of the cache, a queue and what is replayed: part of `--memory`, if they are published.
const EVENTS_MEMORY: u64 = 8 << 20;
/// A request may have this part of `--memory`, within these bytes, unless said otherwise.
const BODY_PART: u64 = 128;
const BODY: std::ops::RangeInclusive<u64> = 1 << 20..=8 << 20;
/// Most time for clients to be told after a second signal, and for subscribers to learn that the cache is gone.
const FAREWELL: Duration = Duration::from_secs(1);
/// The exit status after a second signal: that of Ctrl-C.
const ABORTED: i32 = 130;

/// Serve models over HTTP: OpenAI and Anthropic APIs, and a web page.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// A GGUF file, a safetensors folder, `demo`, or a model on the Hub such as org/name:Q4_K_M. Several, or a folder of
    /// models, are loaded when requests name them, and share --memory
    #[arg(required = true)]
    model: Vec<ModelArg>,
    /// TOML file with options, such as port = 8081; the environment (MOEFLUX_PORT) and the command line come first
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    listen: ListenArgs,
    /// API key that clients must send; may be repeated, any one of them will do
    #[arg(long, value_name = "KEY", conflicts_with = "api_key_file")]
    api_key: Vec<String>,
    /// File that holds API keys, one a line, which other users do not see in the list of processes
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Allow other addresses without an API key
    #[arg(long)]
    no_key: bool,
    /// Origin whose pages may call this server, or *; may be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors: Vec<String>,
    /// Model name in the APIs, of a single model [default: the file's]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    name: Option<String>,
    /// Further model name that requests may use, or * for any; with several models ALIAS=MODEL; may be repeated
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    alias: Vec<String>,
    /// Of several models one that is loaded at once and stays; may be repeated
    #[arg(long, value_name = "MODEL")]
    pin: Vec<String>,
    /// A LoRA adapter, as PEFT saves it, that requests get by this model name; may be repeated
    #[arg(long, value_name = "NAME=FOLDER", value_parser = parse_lora)]
    lora: Vec<AdapterSource>,
    /// Maximum requests answered at once
    #[arg(long, value_name = "N", default_value_t = 8, help_heading = "Serving")]
    sequences: usize,
    /// Tokens that all requests together may hold in the key-value cache [default: four contexts, at least 512 each; fewer if memory is short]
    #[arg(long, value_name = "N", help_heading = "Serving")]
    kv_tokens: Option<usize>,
    /// Maximum requests waiting; more get status 429
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Serving")]
    queue: usize,
    /// Maximum prompt tokens in a step that also decodes; by default as many as take as long as its answers, unless that
    /// costs a prompt too much
    #[arg(long, value_name = "N", help_heading = "Serving")]
    prefill_beside_decode: Option<usize>,
    /// Sessions cached, so that requests with the same prefix skip its evaluation
    #[arg(long, value_name = "N", default_value_t = 16, help_heading = "Serving")]
    kept_sessions: usize,
    /// Save conversations that have a `prompt_cache_key` in this folder
    #[arg(long, value_name = "FOLDER", help_heading = "Serving")]
    sessions: Option<PathBuf>,
    /// Maximum conversations in that folder; those used longest ago are removed
    #[arg(long, value_name = "N", default_value_t = 1000, help_heading = "Serving")]
    max_sessions: usize,
    /// Maximum size of all of them, as in 16GiB
    #[arg(long, value_name = "SIZE", default_value = "16GiB", value_parser = parse_size, help_heading = "Serving")]
    max_session_bytes: u64,
    /// Maximum tokens in an answer if the request does not say
    #[arg(long, value_name = "N", default_value_t = 1024, help_heading = "Serving")]
    max_tokens: usize,
    /// Maximum size of a request in bytes [default: 8 MiB, down to 1 MiB with less --memory than 1 GiB]
    #[arg(long, value_name = "BYTES", help_heading = "Serving")]
    max_body: Option<usize>,
    /// Maximum seconds for a request to arrive
    #[arg(long, value_name = "SECONDS", default_value_t = 30, help_heading = "Serving")]
    body_timeout: u64,
    /// Log messages of this level and above: off, error, warn, info (a line a request), debug
    #[arg(long, value_name = "LEVEL", default_value = "info", help_heading = "Log")]
    log_level: LogLevel,
    /// Form of the log on standard error
    #[arg(long, value_name = "FORMAT", default_value = "text", help_heading = "Log")]
    log_format: LogFormat,
    /// Maximum simultaneous connections
    #[arg(long, value_name = "N", default_value_t = 1024, help_heading = "Serving")]
    connections: usize,
    /// Maximum seconds for answers to finish after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = 30, help_heading = "Serving")]
    drain: u64,
    /// Read pictures in messages, of up to so many pixels: larger ones are reduced; for models that read pictures, such as 1048576
    /// [default: pictures are refused]
    #[arg(long, value_name = "N", value_parser = parse_pixels, help_heading = "Serving")]
    image_pixels: Option<usize>,
    /// GGUF file of what reads pictures, for GGUF models [default: mmproj*.gguf beside the model]
    #[arg(long, value_name = "FILE", requires = "image_pixels", help_heading = "Serving")]
    mmproj: Option<PathBuf>,
    #[command(flatten)]
    kv_events: KvEventsArgs,
    #[command(flatten)]
    engine: EngineArgs,
}

pub fn run(args: &ServeArgs) -> Result<()> {
    let log = Log::start(args.log_level, args.log_format);
    let api_keys = args.api_keys()?;
    let host = args.listen.host;
    if !host.is_loopback() && api_keys.is_empty() && !args.no_key {
        bail!("--host {host}: anyone could use this server; add --api-key, or --no-key to allow it");
    }
    for (option, is_zero) in [
        ("--sequences", args.sequences == 0),
        ("--queue", args.queue == 0),
        ("--max-sessions", args.max_sessions == 0),
        ("--max-tokens", args.max_tokens == 0),
        ("--max-body", args.max_body == Some(0)),
        ("--body-timeout", args.body_timeout == 0),
        ("--connections", args.connections == 0),
    ] {
        if is_zero {
            bail!("{option}: expected a positive number, got 0");
        }
    }
    let tls = args.listen.tls()?;
    let mut found = served::find(&args.model, args.image_pixels.is_some())?;
    let options = args.options(api_keys);
    let serving = match &mut found[..] {
        [one] => {
            let one = std::mem::take(one);
            args.serve_one(&log, one, options)?
        }
        _ => args.serve_several(&log, found, options)?,
    };
    let limits =
        Limits { connections: args.connections, drain: Duration::from_secs(args.drain), ..Limits::default() };
    // One thread is enough to pass tokens on; the others are the engine's.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.context("cannot start the server's threads")?;
    let outcome = runtime.block_on(listen(args, tls, log, serving, limits));
    runtime.shutdown_timeout(Duration::from_secs(1));
    match outcome? {
        End::InOrder => Ok(()),
        End::Aborted => std::process::exit(ABORTED),
    }
}

/// How a server ended.
enum End {
    InOrder,
    /// By a second signal.
    Aborted,
}

/// `NAME=FOLDER`.
fn parse_lora(text: &str) -> Result<AdapterSource, String> {
    match text.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
            Ok(AdapterSource { name: name.to_owned(), folder: folder.into() })
        }
        _ => Err("expected NAME=FOLDER".into()),
    }
}

impl ServeArgs {
    /// A model that is loaded before the server listens.
    fn serve_one(&self, log: &Log, found: Found, options: ServerOptions) -> Result<Serving> {
        let events = if self.kv_events.options().is_some() { EVENTS_MEMORY } else { 0 };
        let sharing = self.sharing(REQUEST_MEMORY as u64 + events);
        let name = self.name.clone().unwrap_or(found.name);
        if let Some(lora) = self.lora.iter().find(|lora| lora.name == name || self.alias.contains(&lora.name))
        {
            bail!("--lora {}: the model itself has this name", lora.name);
        }
        let model = self.engine.open_text_shared(&found.path, sharing, &self.lora)?;
        let (events, observer) = match self.kv_events.options() {
            Some(_) => {
                let (events, observer) = KvEvents::observed();
                (Some(events), Some(Box::new(observer) as BlockObserver))
            }
            None => (None, None),
        };
        let scheduler = Arc::new(served::start(model, &name, self.scheduling(), observer, log)?);
        let aliases = [&[found.argument], &self.alias[..]].concat();
        let server = Server::new(scheduler, ServerOptions { model: name, aliases, ..options });
        Ok(Serving { server, first: vec![], events })
    }

    /// Models that are loaded on demand, and which of them are before the server listens: those that are pinned, or the first.
    fn serve_several(&self, log: &Log, found: Vec<Found>, options: ServerOptions) -> Result<Serving> {
        for (option, is_given) in [
            ("--name", self.name.is_some()),
            ("--mirror", !self.engine.mirror.is_empty()),
            ("--lora", !self.lora.is_empty()),
            ("--mmproj", self.mmproj.is_some()),
            ("--kv-events", self.kv_events.options().is_some()),
        ] {
            if is_given {
                bail!("{option}: expected a single model, got {}", found.len());
            }
        }
        let memory = self.engine.memory.or_else(moeflux::memory::default_budget).unwrap_or(u64::MAX);
        let memory = memory.saturating_sub(REQUEST_MEMORY as u64);
        // Before there are other threads.
        moeflux::memory::share_heap();
        let opening = self.engine.serving_options(self.sharing(0));
        for model in &found {
            let least = opening.least_memory(&model.path)?;
            log.say(&format!("{}: {}; needs at least {}", model.name, model.path.display(), size(least)));
            if least > memory {
                bail!(
                    "{}: needs at least {}, but --memory leaves {} for models",
                    model.path.display(),
                    size(least),
                    size(memory)
                );
            }
        }
        log.say(&format!("{} models share {}", found.len(), size(memory)));
        let models = served::serve(found, &self.alias, &self.pin, &opening, &self.scheduling(), log)?;
        let pinned = models.iter().filter(|model| model.pinned).map(|model| model.name.clone());
        let mut first: Vec<String> = pinned.collect();
        if first.is_empty() {
            first.extend(models.first().map(|model| model.name.clone()));
        }
        Ok(Serving { server: Server::of_models(models, memory, options), first, events: None })
    }

    fn sharing(&self, reserved: u64) -> Sharing {
        let (sequences, kv_tokens) = (self.sequences, self.kv_tokens);
        let pictures = self.image_pixels.map(|pixels| Pictures { pixels, mmproj: self.mmproj.clone() });
        Sharing { sequences, kv_tokens, reserved, pictures }
    }

    fn scheduling(&self) -> SchedulerOptions {
        SchedulerOptions {
            queue: self.queue,
            prefill_beside_decode: self.prefill_beside_decode,
            kept_sessions: self.kept_sessions,
            sessions: self.sessions.clone(),
            session_limits: SessionLimits { files: self.max_sessions, bytes: self.max_session_bytes },
        }
    }

    fn options(&self, api_keys: Vec<String>) -> ServerOptions {
        ServerOptions {
            local_only: self.listen.only_localhost() && api_keys.is_empty(),
            api_keys,
            cors: self.cors.clone(),
            max_body: self.max_body.unwrap_or_else(|| {
                let part = self.engine.memory.map_or(u64::MAX, |memory| memory / BODY_PART);
                part.clamp(*BODY.start(), *BODY.end()) as usize
            }),
            request_memory: REQUEST_MEMORY,
            body_timeout: Duration::from_secs(self.body_timeout),
            max_tokens: self.max_tokens,
            ..ServerOptions::default()
        }
    }

    /// The keys of which clients must send one; none if nobody needs any.
    fn api_keys(&self) -> Result<Vec<String>> {
        let keys = match &self.api_key_file {
            Some(path) => {
                let text = std::fs::read_to_string(path);
                let text = text.with_context(|| format!("cannot read {}", path.display()))?;
                let keys = text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty());
                let keys: Vec<String> = keys.collect();
                if keys.is_empty() {
                    bail!("{}: there is no API key", path.display());
                }
                keys
            }
            None => self.api_key.clone(),
        };
        if keys.iter().any(String::is_empty) {
            bail!("the API key is empty");
        }
        Ok(keys)
    }
}

/// What is served.
struct Serving {
    server: Server,
    /// Models that are loaded before the server listens.
    first: Vec<String>,
    /// What the cache says of itself, if somebody is told.
    events: Option<KvEvents>,
}

async fn listen(
    args: &ServeArgs,
    tls: Option<Tls>,
    log: Log,
    serving: Serving,
    limits: Limits,
) -> Result<End> {
    let Serving { server, first, events } = serving;
    let listener = args.listen.listener(tls).await?;
    let url = listener.url().context("cannot determine the port")?;
    let publishing = match args.kv_events.options().zip(events) {
        Some((options, events)) => {
            let publisher = events.publish(&options).await.context("--kv-events")?;
            log.say(&format!("key-value cache events on tcp://{}", publisher.address()));
            if let Some(address) = publisher.replay_address() {
                log.say(&format!("missed key-value cache events on tcp://{address}"));
            }
            Some(tokio::spawn(publisher.run()))
        }
        None => None,
    };
    let mut terminate = signal(SignalKind::terminate()).context("cannot watch for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot watch for Ctrl-C")?;
    let mut signalled = async move || {
        std::future::poll_fn(|context| match terminate.poll_recv(context) {
            std::task::Poll::Ready(_) => std::task::Poll::Ready(()),
            std::task::Poll::Pending => interrupt.poll_recv(context).map(drop),
        })
        .await;
    };
    for name in first {
        if let Err(reason) = server.load(&name).await {
            bail!("{name}: {reason}");
        }
    }
    log.say(&format!("{} on {url}", server.names().join(", ")));
    let aborted = Arc::new(AtomicBool::new(false));
    let (draining, said, aborts) = (server.clone(), log.clone(), Arc::clone(&aborted));
    let shutdown = async move {
        signalled().await;
        said.say("finishing running answers; press again to abort them");
        draining.drain();
        tokio::spawn(async move {
            signalled().await;
            aborts.store(true, Ordering::Relaxed);
            draining.abandon();
            // Streams end with an error that says so, if their clients read.
            tokio::time::sleep(FAREWELL).await;
            std::process::exit(ABORTED);
        });
    };
    if !serve(listener, server.router(), limits, shutdown, || server.abandon()).await {
        log.say(&format!("aborted answers that took longer than {} seconds", limits.drain.as_secs()));
    }
    server.abandon();
    // Ends the scheduler, which says that its cache is gone.
    drop(server);
    if let Some(publishing) = publishing {
        let _ = tokio::time::timeout(FAREWELL, publishing).await;
    }
    Ok(if aborted.load(Ordering::Relaxed) { End::Aborted } else { End::InOrder })
}
