//! Options of `serve` that say where events of the key-value cache are published.

use clap::Args;
use moeflux_server::{KvEventsFormat, KvEventsOptions};

#[derive(Debug, Args)]
#[command(next_help_heading = "Key-value cache events")]
pub struct KvEventsArgs {
    /// Publish which prefixes are cached over ZeroMQ, as vLLM does, on this address, such as tcp://*:5557. Whoever can connect
    /// reads the tokens of all prompts
    #[arg(long, value_name = "ENDPOINT")]
    kv_events: Option<String>,
    /// Address where subscribers ask for events that they missed
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events")]
    kv_events_replay: Option<String>,
    /// Topic of the events
    #[arg(long, value_name = "TOPIC", default_value = "", requires = "kv_events")]
    kv_events_topic: String,
    /// How events are written: map (vLLM since 0.24) or array (vLLM before, SGLang)
    #[arg(long, value_name = "FORMAT", default_value = "map", value_parser = str::parse::<KvEventsFormat>, requires = "kv_events")]
    kv_events_format: KvEventsFormat,
}

impl KvEventsArgs {
    /// Where events are published, if they are.
    pub fn options(&self) -> Option<KvEventsOptions> {
        let endpoint = self.kv_events.clone()?;
        Some(KvEventsOptions {
            endpoint,
            replay: self.kv_events_replay.clone(),
            topic: self.kv_events_topic.clone(),
            format: self.kv_events_format,
        })
    }
}
