//! `moeflux completions`: scripts that complete commands and options in a shell.

use anyhow::Result;
use clap::{Args, CommandFactory};
use clap_complete::Shell;

/// Print the completions for a shell.
///
/// For example: moeflux completions bash > ~/.local/share/bash-completion/completions/moeflux
#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

pub fn run(args: &CompletionsArgs) -> Result<()> {
    let mut script = vec![];
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "moeflux", &mut script);
    crate::print(&String::from_utf8_lossy(&script))
}
