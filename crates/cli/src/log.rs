//! The log of a server, on standard error.

use std::io::{IsTerminal, Write};
use std::sync::Arc;

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

/// Lines that wait for whoever reads standard error; more are dropped.
const WAITING_LINES: usize = 4096;

/// Least important messages that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// Nothing.
    Off,
    /// Requests that failed by no fault of theirs.
    Error,
    /// Also what is likely a mistake.
    Warn,
    /// Also a line for every request.
    Info,
    /// Also requests for the page, for metrics and for health.
    Debug,
}

/// How messages are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// An object a line.
    Json,
}

/// A log that has been started. A thread of its own writes the lines, so that a reader that stops, such as a full
/// pipe, does not stop requests. Dropping the last clone writes what waits.
#[derive(Debug, Clone)]
pub struct Log {
    format: LogFormat,
    writer: NonBlocking,
    _rest: Arc<WorkerGuard>,
}

impl Log {
    /// Starts the log of this process.
    pub fn start(level: LogLevel, format: LogFormat) -> Self {
        let level = match level {
            LogLevel::Off => LevelFilter::OFF,
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
        };
        let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        let (writer, rest) =
            NonBlockingBuilder::default().buffered_lines_limit(WAITING_LINES).finish(std::io::stderr());
        let builder = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(writer.clone())
            .with_target(false)
            .with_ansi(colours);
        // It fails where there is a log, which then is as good.
        let _ = match format {
            LogFormat::Text => builder.try_init(),
            LogFormat::Json => builder.json().flatten_event(true).try_init(),
        }
        .map_err(|error| error.to_string());
        Self { format, writer, _rest: Arc::new(rest) }
    }

    /// What whoever started the server wants to know, whatever the level.
    pub fn say(&self, text: &str) {
        match self.format {
            // Its lines are taken or dropped, and never fail.
            LogFormat::Text => drop(self.writer.clone().write_all(format!("{text}\n").as_bytes())),
            LogFormat::Json => tracing::info!("{text}"),
        }
    }
}
