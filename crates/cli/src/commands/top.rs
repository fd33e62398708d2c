//! `moeflux top`: a live view of a running server.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::top::{Feed, Update, View, once, watch};

/// Where a key may stand that is not to be seen in the list of processes.
const KEY_VARIABLE: &str = "MOEFLUX_API_KEY";

/// Watch a running server: speed, queue, memory, and which experts it uses.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// URL of the server
    #[arg(default_value = "http://127.0.0.1:8080")]
    url: String,
    /// API key of the server [default: the environment variable MOEFLUX_API_KEY]
    #[arg(long, value_name = "KEY", conflicts_with = "api_key_file")]
    api_key: Option<String>,
    /// File that holds the API key
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Model whose experts and speed are shown, where the server has several [default: the one that was asked last]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Print one view as plain text and exit
    #[arg(long)]
    once: bool,
}

pub fn run(args: &TopArgs) -> Result<()> {
    let key = match &args.api_key_file {
        Some(path) => {
            let text = std::fs::read_to_string(path);
            Some(text.with_context(|| format!("cannot read {}", path.display()))?.trim().to_owned())
        }
        None => args.api_key.clone().or_else(|| std::env::var(KEY_VARIABLE).ok()),
    };
    let url = if args.url.contains("://") {
        args.url.trim_end_matches('/').to_owned()
    } else {
        format!("http://{}", args.url.trim_end_matches('/'))
    };
    let feed = Feed::start(url.clone(), key.filter(|key| !key.is_empty()), args.model.clone())?;
    let mut view = View::new(url);
    if args.once {
        return crate::print(&once(&feed, &mut view)?);
    }
    if !std::io::IsTerminal::is_terminal(&std::io::stdout()) {
        bail!("standard output is not a terminal: use --once to print one view as text");
    }
    // What cannot be helped by waiting is said before the terminal is taken.
    if let Ok(Update::Refused(reason)) = feed.next(Duration::from_millis(300)).map(|update| view.take(update))
    {
        bail!("{reason}");
    }
    watch(&feed, &mut view)
}
