//! The `moeflux` command: runs Mixture-of-Experts language models that are bigger than memory.

mod atomic_file;
mod commands;
mod engine_args;
mod hub;
mod model;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run Mixture-of-Experts language models bigger than memory
#[derive(Debug, Parser)]
#[command(name = "moeflux", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Run(commands::run::RunArgs),
    Serve(commands::serve::ServeArgs),
    Logits(commands::logits::LogitsArgs),
    Synth(commands::synth::SynthArgs),
    Inspect(commands::inspect::InspectArgs),
    Plan(commands::plan::PlanArgs),
    Bench(commands::bench::BenchArgs),
    Devices(commands::devices::DevicesArgs),
    Perplexity(commands::perplexity::PerplexityArgs),
    Pull(commands::pull::PullArgs),
    Trace(commands::trace::TraceArgs),
    Replay(commands::replay::ReplayArgs),
    Pack(commands::pack::PackArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match &cli.command {
        Command::Run(args) => commands::run::run(args),
        Command::Serve(args) => commands::serve::run(args),
        Command::Logits(args) => commands::logits::run(args),
        Command::Synth(args) => commands::synth::run(args),
        Command::Inspect(args) => commands::inspect::run(args),
        Command::Plan(args) => commands::plan::run(args),
        Command::Bench(args) => commands::bench::run(args),
        Command::Devices(args) => commands::devices::run(args),
        Command::Perplexity(args) => commands::perplexity::run(args),
        Command::Pull(args) => commands::pull::run(args),
        Command::Trace(args) => commands::trace::run(args),
        Command::Replay(args) => commands::replay::run(args),
        Command::Pack(args) => commands::pack::run(args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", describe(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, without those that a message already ends with.
fn describe(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.is_empty() {
            true => cause,
            false if text.ends_with(&cause) => text,
            false => format!("{text}: {cause}"),
        }
    })
}
