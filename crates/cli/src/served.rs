//! Models that `moeflux serve` loads when they are asked for.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use moeflux::checkpoint::Checkpoint;
use moeflux::error::size;
use moeflux::scheduler::BlockObserver;
use moeflux::{OpenOptions, Scheduler, SchedulerOptions, TextModel};
use moeflux_compute::backend::PAGE_TOKENS;
use moeflux_server::{ModelSource, ServedModel};

use crate::log::Log;
use crate::model::ModelArg;

/// Opens one of several models.
struct Opener {
    name: String,
    path: PathBuf,
    options: OpenOptions,
    scheduling: SchedulerOptions,
    log: Log,
}

impl ModelSource for Opener {
    fn least_memory(&self) -> moeflux::Result<u64> {
        self.options.least_memory(&self.path)
    }

    fn open(
        &self,
        memory: u64,
        later: u64,
        progress: &mut dyn FnMut(u64, u64),
    ) -> moeflux::Result<Scheduler> {
        let options = self.options.clone().memory(memory).memory_later(later);
        let model = options.open_with_progress(&self.path, progress)?;
        start(model, &self.name, self.scheduling.clone(), None, &self.log)
    }
}

/// Starts to serve a model, and says what it can do at once and what its memory is used for. `observer` is told what prompts can
/// begin with.
pub fn start(
    mut model: TextModel,
    name: &str,
    scheduling: SchedulerOptions,
    observer: Option<BlockObserver>,
    log: &Log,
) -> moeflux::Result<Scheduler> {
    model.warm_up()?;
    let (budget, chunk, context) = (model.engine.budget(), model.engine.chunk(), model.engine.context());
    // There may be more slots than memory, for what is granted later.
    let experts = model.engine.experts().plan().bytes().min(budget.experts);
    let scheduler = match observer {
        Some(observer) => Scheduler::start_observed(model, scheduling, observer)?,
        None => Scheduler::start(model, scheduling)?,
    };
    let what = scheduler.description();
    log.say(&format!(
        "{name}: {}; {} requests at once, of up to {context} tokens each, {} together; prompts in chunks of {chunk}",
        what.backend,
        what.sequences,
        what.pages * PAGE_TOKENS,
    ));
    let needs = budget.needs;
    let place = if needs.in_own_memory { " of the GPU's" } else { "" };
    log.say(&format!(
        "{name}: {} of {}: experts {} ({} of {}), trunk {}{place}, context {}{place}, scratch {}{place}, other {}",
        size(needs.held() + experts),
        size(budget.total),
        size(experts),
        scheduler.figures().memory.expert_slots.min(what.experts),
        what.experts,
        size(needs.trunk),
        size(needs.kv),
        size(needs.scratch),
        size(needs.overhead),
    ));
    Ok(scheduler)
}

/// Where a model is, and what it was called on the command line.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    pub argument: String,
    pub path: PathBuf,
    /// What clients call it.
    pub name: String,
}

/// The models that arguments mean, and what reads `pictures`. A folder that is no model itself means all models in it.
pub fn find(arguments: &[ModelArg], pictures: bool) -> Result<Vec<Found>> {
    let mut all = vec![];
    for argument in arguments {
        let (path, argument) = (argument.path_with(pictures)?, argument.to_string());
        match models_in(&path) {
            Some(paths) => all.extend(paths.into_iter().map(|path| {
                let argument = path.display().to_string();
                Found { name: name_of(&argument, &path), path, argument }
            })),
            None => all.push(Found { name: name_of(&argument, &path), path, argument }),
        }
    }
    Ok(all)
}

/// The models in a folder that is not one itself; none if there are none.
fn models_in(folder: &Path) -> Option<Vec<PathBuf>> {
    if !folder.is_dir() || Checkpoint::open(folder).is_ok() {
        return None;
    }
    let entries = std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    let is_model = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let first = name.split_once("-of-").is_none_or(|(before, _)| before.ends_with("-00001"));
        let candidate = path.is_dir() || (path.extension().is_some_and(|kind| kind == "gguf") && first);
        // Projectors are no models.
        candidate
            && !name.starts_with('.')
            && !name.to_lowercase().contains("mmproj")
            && Checkpoint::open(path).is_ok()
    };
    let mut models: Vec<PathBuf> = entries.filter(is_model).collect();
    models.sort();
    (!models.is_empty()).then_some(models)
}

/// `demo`, or the name of the file or folder without its extension, and without the number of a shard.
fn name_of(argument: &str, path: &Path) -> String {
    if argument == "demo" {
        return argument.into();
    }
    let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
    let Some(name) = name else { return argument.into() };
    let name = name.to_string_lossy();
    let of_shard =
        name.rsplit_once("-of-").filter(|(_, count)| count.bytes().all(|byte| byte.is_ascii_digit()));
    let whole = of_shard.and_then(|(before, _)| before.strip_suffix("-00001"));
    whole.unwrap_or(&name).to_owned()
}

/// Gives every model its names. `aliases` are `ALIAS=MODEL`, or an alias of the first model; `pinned` are names or arguments.
pub fn serve(
    found: Vec<Found>,
    aliases: &[String],
    pinned: &[String],
    options: &OpenOptions,
    scheduling: &SchedulerOptions,
    log: &Log,
) -> Result<Vec<ServedModel>> {
    let mut by_name: BTreeMap<&str, usize> = BTreeMap::new();
    for (index, model) in found.iter().enumerate() {
        if let Some(other) = by_name.insert(&model.name, index) {
            let other = &found[other].argument;
            bail!("{other} and {}: both are called {:?}", model.argument, model.name);
        }
    }
    let position = |name: &str| found.iter().position(|model| model.name == name || model.argument == name);
    let mut names: Vec<Vec<String>> = found.iter().map(|model| vec![model.argument.clone()]).collect();
    for alias in aliases {
        let (alias, model) = match alias.rsplit_once('=') {
            Some((alias, model)) => {
                let index = position(model);
                let Some(index) = index else {
                    bail!("--alias {alias}={model}: there is no model {model:?}")
                };
                (alias, index)
            }
            None => (&**alias, 0),
        };
        names[model].push(alias.to_owned());
    }
    let mut is_pinned = vec![false; found.len()];
    for name in pinned {
        let Some(index) = position(name) else { bail!("--pin {name}: there is no model {name:?}") };
        is_pinned[index] = true;
    }
    let models = found.into_iter().zip(names).zip(is_pinned);
    Ok(models
        .map(|((Found { path, name, .. }, aliases), pinned)| {
            // Conversations of different models may have the same key.
            let sessions = scheduling.sessions.as_ref().map(|folder| folder.join(&name));
            let scheduling = SchedulerOptions { sessions, ..scheduling.clone() };
            let (options, log) = (options.clone(), log.clone());
            let source = Box::new(Opener { name: name.clone(), path, options, scheduling, log });
            ServedModel { name, aliases, pinned, source }
        })
        .collect())
}
