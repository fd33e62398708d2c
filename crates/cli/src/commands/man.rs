//! `moeflux man`: manual pages, one for every command.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};

/// Write manual pages to a folder.
#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder to write to; created if missing
    #[arg(value_name = "DIR")]
    folder: PathBuf,
}

pub fn run(args: &ManArgs) -> Result<()> {
    let ManArgs { folder } = args;
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(crate::Cli::command(), folder));
    written.with_context(|| format!("cannot write manual pages to {}", folder.display()))
}
