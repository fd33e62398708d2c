//! Options of `serve` from three places: the command line, the environment (`MOEFLUX_PORT` is `--port`), and a TOML file
//! (`--config`). What comes first here wins, also over another option that excludes it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::builder::Resettable;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::{Table, Value};

/// The command whose options have layers.
const LAYERED: &str = "serve";
/// The option that names the file.
const FILE: &str = "config";

/// What the command line, the environment and the file say together. Ends the process, as clap does, if that is wrong.
pub fn matches(command: Command) -> ArgMatches {
    let mut command = command.mut_subcommand(LAYERED, |serve| serve.mut_args(with_environment));
    let given: Vec<OsString> = std::env::args_os().collect();
    for id in overruled(&command, &given) {
        let unset = |argument: Arg| argument.env(Resettable::Reset);
        command = command.mut_subcommand(LAYERED, |serve| serve.mut_arg(id, unset));
    }
    let added = from_file(&command, &given);
    let added =
        added.unwrap_or_else(|error| command.error(ErrorKind::InvalidValue, format!("{error:#}")).exit());
    command.get_matches_from(given.into_iter().chain(added))
}

/// Lets an argument come from the environment too.
fn with_environment(argument: Arg) -> Arg {
    let name = argument.get_id().as_str();
    if ["help", "version"].contains(&name) {
        return argument;
    }
    // clap keeps names for ever; there are some fifty, once.
    let name: &'static str = format!("MOEFLUX_{}", name.to_uppercase()).leak();
    argument.env(name).hide_env_values(true)
}

/// Options in the environment that exclude one on the command line.
fn overruled(command: &Command, given: &[OsString]) -> Vec<String> {
    let matches = command.clone().ignore_errors(true).try_get_matches_from(given);
    let Some((serve, matches)) = command.find_subcommand(LAYERED).zip(matches.ok()) else { return vec![] };
    let Some(matches) = matches.subcommand_matches(LAYERED) else { return vec![] };
    let from = |source: ValueSource| {
        let is = move |argument: &&Arg| matches.value_source(argument.get_id().as_str()) == Some(source);
        serve.get_arguments().filter(is)
    };
    from(ValueSource::EnvVariable)
        .filter(|argument| from(ValueSource::CommandLine).any(|other| exclude(serve, argument, other)))
        .map(|argument| argument.get_id().to_string())
        .collect()
}

/// Whether one of them cannot be beside the other.
fn exclude(command: &Command, one: &Arg, other: &Arg) -> bool {
    let excludes = |one: &Arg, other: &Arg| {
        command.get_arg_conflicts_with(one).iter().any(|excluded| excluded.get_id() == other.get_id())
    };
    excludes(one, other) || excludes(other, one)
}

/// Arguments that the file adds to those that are `given`.
fn from_file(command: &Command, given: &[OsString]) -> Result<Vec<OsString>> {
    // What is missing may be in the file.
    let matches = command.clone().ignore_errors(true).try_get_matches_from(given);
    let Ok(matches) = matches else { return Ok(vec![]) };
    let Some(matches) = matches.subcommand_matches(LAYERED) else { return Ok(vec![]) };
    let Some(path) = matches.try_get_one::<PathBuf>(FILE).ok().flatten() else { return Ok(vec![]) };
    let serve = command.find_subcommand(LAYERED).context("serve is a command")?;
    let told = |id: &str| {
        let source = matches.value_source(id);
        matches!(source, Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    };
    let table = read(path)?;
    let mut added = vec![];
    for (key, value) in &table {
        let id = key.replace('-', "_");
        let argument = serve.get_arguments().find(|argument| argument.get_id().as_str() == id && id != FILE);
        let Some(argument) = argument.filter(|argument| argument.get_id() != "help") else {
            bail!("{}: {key:?} is not an option of {LAYERED}", path.display());
        };
        let is_excluded = |other: &Arg| told(other.get_id().as_str()) && exclude(serve, argument, other);
        if !told(&id) && !serve.get_arguments().any(is_excluded) {
            let wrong = || format!("{}: {key}", path.display());
            added.extend(arguments_of(argument, value).with_context(wrong)?);
        }
    }
    Ok(added)
}

fn read(path: &Path) -> Result<Table> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    text.parse().with_context(|| format!("{} is not TOML", path.display()))
}

/// An option as it is written on a command line.
fn arguments_of(argument: &Arg, value: &Value) -> Result<Vec<OsString>> {
    let written = |text: String| match argument.get_long() {
        Some(long) => format!("--{long}={text}").into(),
        None => OsString::from(text),
    };
    if let ArgAction::SetTrue = argument.get_action() {
        let Value::Boolean(on) = value else { bail!("expected true or false, got {}", value.type_str()) };
        let flag = argument.get_long().map(|long| OsString::from(format!("--{long}")));
        return Ok(flag.filter(|_| *on).into_iter().collect());
    }
    match value {
        Value::Array(all) if matches!(argument.get_action(), ArgAction::Append) => {
            all.iter().map(|value| Ok(written(plain(value)?))).collect()
        }
        value => Ok(vec![written(plain(value)?)]),
    }
}

fn plain(value: &Value) -> Result<String> {
    Ok(match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        value => bail!("expected a text or a number, got {}", value.type_str()),
    })
}
