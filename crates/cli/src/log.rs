//! The log of a server, on standard error.

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;

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

/// A log that has been started.
#[derive(Debug, Clone, Copy)]
pub struct Log {
    format: LogFormat,
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
        let colours =
            std::io::IsTerminal::is_terminal(&std::io::stderr()) && std::env::var_os("NO_COLOR").is_none();
        let builder = tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .with_target(false)
            .with_ansi(colours);
        // It fails where there is a log, which then is as good.
        let _ = match format {
            LogFormat::Text => builder.try_init(),
            LogFormat::Json => builder.json().flatten_event(true).try_init(),
        }
        .map_err(|error| error.to_string());
        Self { format }
    }

    /// What whoever started the server wants to know, whatever the level.
    pub fn say(self, text: &str) {
        match self.format {
            LogFormat::Text => eprintln!("{text}"),
            LogFormat::Json => tracing::info!("{text}"),
        }
    }
}
