//! The `moeflux` command: runs Mixture-of-Experts language models that are bigger than memory.

mod chat;
mod commands;
mod engine_args;
mod hub;
mod kv_events_args;
mod layers;
mod listen_args;
mod log;
mod model;
mod next;
mod served;
mod synthetic;
mod table;
mod top;
mod version;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Run Mixture-of-Experts language models bigger than memory
#[derive(Debug, Parser)]
#[command(name = "moeflux", max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Print the version; with --verbose, also build and machine details
    #[arg(short = 'V', long)]
    version: bool,
    /// Print build and machine details with the version
    #[arg(short, long, requires = "version")]
    verbose: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(commands::run::RunArgs),
    Chat(commands::chat::ChatArgs),
    Serve(Box<commands::serve::ServeArgs>),
    Top(commands::top::TopArgs),
    Logits(commands::logits::LogitsArgs),
    Synth(commands::synth::SynthArgs),
    Inspect(commands::inspect::InspectArgs),
    Plan(commands::plan::PlanArgs),
    Bench(commands::bench::BenchArgs),
    Devices(commands::devices::DevicesArgs),
    Families(commands::families::FamiliesArgs),
    Perplexity(commands::perplexity::PerplexityArgs),
    Pull(commands::pull::PullArgs),
    List(commands::list::ListArgs),
    Rm(commands::rm::RmArgs),
    Trace(commands::trace::TraceArgs),
    Replay(commands::replay::ReplayArgs),
    Pack(commands::pack::PackArgs),
    Completions(commands::completions::CompletionsArgs),
    Man(commands::man::ManArgs),
}

fn main() -> ExitCode {
    let cli = Cli::from_arg_matches(&layers::matches(Cli::command())).unwrap_or_else(|error| error.exit());
    let outcome = match &cli.command {
        _ if cli.version => print(&version::text(cli.verbose)),
        None => {
            eprint!("{}", Cli::command().render_help());
            return ExitCode::from(2);
        }
        Some(command) => obey(command),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", describe_end(&error));
            ExitCode::FAILURE
        }
    }
}

fn obey(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => commands::run::run(args),
        Command::Chat(args) => commands::chat::run(args),
        Command::Serve(args) => commands::serve::run(args),
        Command::Top(args) => commands::top::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Synth(args) => commands::synth::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Devices(args) => commands::devices::run(args),
        Command::Families(args) => commands::families::run(args),
        Command::Perplexity(args) => commands::perplexity::run(args),
        Command::Pull(args) => commands::pull::run(args),
        Command::List(args) => commands::list::run(args),
        Command::Rm(args) => commands::rm::run(args),
        Command::Trace(args) => commands::trace::run(args),
        Command::Replay(args) => commands::replay::run(args),
        Command::Pack(args) => commands::pack::run(args),
        Command::Completions(args) => commands::completions::run(args),
        Command::Man(args) => commands::man::run(args),
    }
}

/// Writes to standard output; a closed pipe is not an error.
fn print(text: &str) -> anyhow::Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(error).context("cannot write to standard output")
        }
        _ => Ok(()),
    }
}

/// An error with its causes, without those that a message already ends with.
fn describe(error: &anyhow::Error) -> String {
    join_causes(error, |cause| cause.to_string())
}

/// The same for the error that ends a command, where options are named as they are typed.
fn describe_end(error: &anyhow::Error) -> String {
    join_causes(error, |cause| match cause.downcast_ref() {
        Some(moeflux::Error::Option { option, expected, got }) if is_flag(option) => {
            format!("--{}: expected {expected}, got {got}", flag(option))
        }
        _ => cause.to_string(),
    })
}

fn join_causes(
    error: &anyhow::Error,
    describe_one: impl Fn(&(dyn std::error::Error + 'static)) -> String,
) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = describe_one(cause);
        if text.is_empty() {
            cause
        } else if text.ends_with(&cause) {
            text
        } else {
            format!("{text}: {cause}")
        }
    })
}

/// How an option of the library is written in a command.
fn flag(option: &str) -> String {
    option.replace('_', "-")
}

/// Whether a command has a flag for `option` of the library.
fn is_flag(option: &str) -> bool {
    let flag = flag(option);
    let cli = Cli::command();
    let mut flags = cli.get_subcommands().flat_map(clap::Command::get_arguments);
    flags.any(|argument| argument.get_long() == Some(&flag))
}
