//! [`Worker`]: the engine behind Dynamo's endpoint.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use dynamo_backend_common::engine::GenerateContext;
use dynamo_backend_common::{
    BackendError, ComponentSnapshot, DynamoError, EngineConfig, KvEventSource, LLMEngine, LLMEngineOutput,
    LLMEngineOutputExt, LlmRegistration, MetricsBindings, MetricsCtx, PreprocessedRequest, SnapshotPublisher,
    TopLogprob, WorkerConfig, chunk, usage,
};
use futures::stream::BoxStream;
use moeflux::decoding::{Piece, TokenLogprobs};
use moeflux::scheduler::{BLOCK_TOKENS, Event};
use moeflux::{Error, Finish, Request, Scheduler, SchedulerOptions};
use moeflux_server::Constraints;
use tokio::sync::mpsc;

use crate::arguments::Arguments;
use crate::events::Events;
use crate::{card, error, request};

/// As good as unlimited: the frontend decides how many wait.
const QUEUE: usize = 1 << 20;
/// How often the router is told how full the cache is.
const LOAD_INTERVAL: Duration = Duration::from_millis(500);

/// One model that takes requests from Dynamo's frontends.
pub struct Worker {
    arguments: Arguments,
    path: PathBuf,
    name: String,
    events: Events,
    served: Mutex<Option<Served>>,
}

#[derive(Clone)]
struct Served {
    scheduler: Arc<Scheduler>,
    constraints: Arc<Constraints>,
}

impl Worker {
    /// A worker that has not started, and how it registers.
    ///
    /// # Errors
    /// If the checkpoint's headers cannot be read, or it has no tokenizer that a frontend can use.
    pub fn new(arguments: Arguments) -> Result<(Self, WorkerConfig), DynamoError> {
        let path = if arguments.model.as_os_str() == "demo" {
            moeflux::demo::unpack().map_err(|error| error::of(&error))?
        } else {
            arguments.model.clone()
        };
        let card = match &arguments.card {
            Some(folder) => folder.clone(),
            None => card::of(&path).map_err(|error| error::of(&error))?,
        };
        let stem = arguments.model.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let name = arguments.served_model_name.clone().or(stem).unwrap_or_else(|| "model".to_owned());
        let common = &arguments.common;
        let config = WorkerConfig {
            namespace: common.namespace.clone(),
            component: common.component.clone(),
            endpoint: common.endpoint.clone(),
            endpoint_types: common.endpoint_types.clone(),
            custom_jinja_template: common.custom_jinja_template.clone(),
            tool_call_parser: common.dyn_tool_call_parser.clone(),
            reasoning_parser: common.dyn_reasoning_parser.clone(),
            exclude_tools_when_tool_choice_none: common.exclude_tools_when_tool_choice_none,
            disaggregation_mode: common.disaggregation_mode,
            runtime: common.runtime.clone(),
            model_name: card.to_string_lossy().into_owned(),
            served_model_name: Some(name.clone()),
            metrics_labels: vec![("model".to_owned(), name.clone())],
            ..WorkerConfig::default()
        };
        let worker = Self { arguments, path, name, events: Events::default(), served: Mutex::new(None) };
        Ok((worker, config))
    }

    fn slot(&self) -> MutexGuard<'_, Option<Served>> {
        // It is replaced in single steps.
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn served(&self) -> Result<Served, DynamoError> {
        self.slot().clone().ok_or_else(error::gone)
    }
}

#[async_trait]
impl LLMEngine for Worker {
    async fn start(&self, _worker_id: u64) -> Result<EngineConfig, DynamoError> {
        let (options, path, events) = (self.arguments.open_options(), self.path.clone(), self.events.clone());
        let kept_sessions = self.arguments.kept_sessions;
        tracing::info!(model = %path.display(), "opening");
        let open = move || -> moeflux::Result<Scheduler> {
            let served = SchedulerOptions { queue: QUEUE, kept_sessions, ..SchedulerOptions::default() };
            Scheduler::start_observed(options.open(path)?, served, move |changed| events.observe(changed))
        };
        let opened = tokio::task::spawn_blocking(open).await;
        let opened = opened.map_err(|failed| error::make(BackendError::Unknown, failed.to_string()))?;
        let scheduler = Arc::new(opened.map_err(|error| error::of(&error))?);
        let description = scheduler.description().clone();
        tracing::info!(backend = description.backend, context = description.context, "open");
        let constraints = Arc::new(Constraints::new(Arc::clone(&scheduler)));
        *self.slot() = Some(Served { scheduler, constraints });
        Ok(EngineConfig {
            model: self.name.clone(),
            served_model_name: Some(self.name.clone()),
            llm: Some(LlmRegistration {
                context_length: u32::try_from(description.context).ok(),
                kv_cache_block_size: u32::try_from(BLOCK_TOKENS).ok(),
                total_kv_blocks: u64::try_from(description.pages).ok(),
                max_num_seqs: u64::try_from(description.sequences).ok(),
                ..LlmRegistration::default()
            }),
            ..EngineConfig::default()
        })
    }

    async fn generate(
        &self,
        request: PreprocessedRequest,
        ctx: GenerateContext,
    ) -> Result<BoxStream<'static, Result<LLMEngineOutput, DynamoError>>, DynamoError> {
        let Served { scheduler, constraints } = self.served()?;
        let options = request::decoding(&request, scheduler.tokenizer(), scheduler.description().context)?;
        let constraint = match request::form(&request)? {
            Some(form) => {
                let made = tokio::task::spawn_blocking(move || constraints.make(&form, None)).await;
                let made = made.map_err(|failed| error::make(BackendError::Unknown, failed.to_string()))?;
                Some(made.map_err(|error| error::of(&error))?.constraint)
            }
            None => None,
        };
        let prompt = request.token_ids.to_vec();
        let prompt_tokens = prompt.len();
        let (sender, mut events) = mpsc::unbounded_channel();
        // Nobody reads what comes after the end of the stream.
        let sink = move |event| drop(sender.send(event));
        let asked = Request { prompt, options, constraint, ..Request::default() };
        let ticket = scheduler.submit_to(asked, sink).map_err(|error| error::of(&error))?;
        let context = ctx.inner_arc();
        Ok(Box::pin(async_stream::stream! {
            // However this stream ends, the request does.
            let _ticket = ticket;
            let mut answered = 0;
            loop {
                let event = tokio::select! {
                    biased;
                    () = context.stopped() => {
                        yield Ok(LLMEngineOutput::cancelled().with_usage(tokens(prompt_tokens, answered)));
                        return;
                    }
                    event = events.recv() => event,
                };
                match event {
                    Some(Event::Progress(_)) => {}
                    Some(Event::Piece(piece)) => {
                        if let Some(output) = output(piece) {
                            answered += 1;
                            yield Ok(output);
                        }
                    }
                    Some(Event::Done(done)) => {
                        let end = match done.finish {
                            Finish::EndOfText | Finish::Stopped => LLMEngineOutput::stop(),
                            Finish::MaxTokens | Finish::ContextFull => LLMEngineOutput::length(),
                        };
                        let mut used = tokens(prompt_tokens, answered);
                        used.prompt_tokens_details = Some(cached(done.usage.cached_tokens));
                        yield Ok(end.with_usage(used));
                        return;
                    }
                    Some(Event::Failed(failure)) => {
                        yield Err(error::of(&failure));
                        return;
                    }
                    None => {
                        yield Err(error::of(&Error::ShuttingDown));
                        return;
                    }
                }
            }
        }))
    }

    async fn cleanup(&self) -> Result<(), DynamoError> {
        let Some(served) = self.slot().take() else { return Ok(()) };
        let close = move || {
            served.scheduler.abandon();
            drop(served);
        };
        tokio::task::spawn_blocking(close)
            .await
            .map_err(|failed| error::make(BackendError::Unknown, failed.to_string()))
    }

    async fn kv_event_sources(&self) -> Result<Vec<KvEventSource>, DynamoError> {
        let events = self.events.clone();
        let on_ready = Box::new(move |publisher| {
            events.publish_to(publisher);
            Ok(())
        });
        Ok(vec![KvEventSource::Push { on_ready, dp_rank: 0 }])
    }

    async fn setup_metrics(&self, _ctx: MetricsCtx<'_>) -> Result<MetricsBindings, DynamoError> {
        let scheduler = Arc::downgrade(&self.served()?.scheduler);
        let on_ready = Box::new(move |publisher| {
            tokio::spawn(tell_load(scheduler, publisher));
            Ok(())
        });
        Ok(MetricsBindings { dp_ranks: vec![0], on_publisher_ready: Some(on_ready) })
    }
}

/// Tells the router how much of the cache running answers hold, until the engine ends.
async fn tell_load(scheduler: Weak<Scheduler>, publisher: Arc<SnapshotPublisher>) {
    while let Some(scheduler) = scheduler.upgrade() {
        let (figures, pages) = (scheduler.figures(), scheduler.description().pages);
        // Not across the sleep: who drops it last waits for the engine's thread.
        drop(scheduler);
        let prompts = figures.prompt_tokens + figures.cached_tokens;
        publisher.publish(
            0,
            ComponentSnapshot {
                kv_used_blocks: figures.pages_running as u64,
                kv_total_blocks: pages as u64,
                gpu_cache_usage: figures.pages_running as f32 / pages.max(1) as f32,
                kv_cache_hit_rate: (prompts > 0).then(|| figures.cached_tokens as f32 / prompts as f32),
                ..ComponentSnapshot::default()
            },
        );
        tokio::time::sleep(LOAD_INTERVAL).await;
    }
}

/// A token of the answer; the one that ends texts is none.
fn output(piece: Piece) -> Option<LLMEngineOutput> {
    let mut output = chunk::token(piece.token?);
    if let Some(TokenLogprobs { chosen, top }) = piece.logprobs {
        output.log_probs = Some(vec![f64::from(chosen.logprob)]);
        let top = (1..).zip(top).map(|(rank, one)| TopLogprob {
            rank,
            token_id: one.token,
            // The frontend has the tokenizer.
            token: None,
            logprob: f64::from(one.logprob),
            bytes: None,
        });
        output.top_logprobs = Some(vec![top.collect()]);
    }
    Some(output)
}

fn tokens(prompt: usize, answered: u32) -> dynamo_backend_common::CompletionUsage {
    usage(u32::try_from(prompt).unwrap_or(u32::MAX), answered)
}

fn cached(tokens: usize) -> dynamo_backend_common::PromptTokensDetails {
    dynamo_backend_common::PromptTokensDetails {
        cached_tokens: u32::try_from(tokens).ok(),
        ..dynamo_backend_common::PromptTokensDetails::default()
    }
}
