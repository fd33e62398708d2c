//! [`Models`]: which of a server's models are loaded.
//!
//! A model is loaded when a request asks for it; such requests wait. Those that are loaded at the same time divide the memory
//! by how much they are used. Where the least that all of them need is more than there is, the one that was used longest ago
//! leaves, once its answers have ended. Loads take turns, in the order in which they were asked for, and whoever waited for
//! a model has it before it may leave again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use moeflux::error::size;
use moeflux::scheduler::{Figures, Memory};
use moeflux::{Error, Result, Scheduler};
use tokio::sync::Notify;

use crate::division::{Claim, divide};
use crate::error::ApiError;
use crate::{App, ServerOptions};

/// How often memory is divided anew.
const DIVIDE: Duration = Duration::from_secs(10);
/// Use this long ago counts half.
const HALF_LIFE: Duration = Duration::from_secs(300);
/// How often a model that is to leave is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// Where a model comes from.
pub trait ModelSource: Send + Sync + 'static {
    /// The least memory, in bytes, that the model can be opened with.
    ///
    /// # Errors
    /// If the checkpoint is not one that can be run.
    fn least_memory(&self) -> Result<u64>;

    /// Opens the model with `memory` bytes, to which [`Scheduler::grant`] may add up to `later` in all. `progress` gets (bytes
    /// loaded, bytes in all).
    ///
    /// # Errors
    /// If it cannot be opened, or `memory` does not suffice.
    fn open(&self, memory: u64, later: u64, progress: &mut dyn FnMut(u64, u64)) -> Result<Scheduler>;
}

/// A model that a server loads when it is asked for.
pub struct ServedModel {
    /// Name under which clients know it.
    pub name: String,
    /// Further names; `*` is any that no other model has.
    pub aliases: Vec<String>,
    /// Never unloaded.
    pub pinned: bool,
    /// Where it comes from.
    pub source: Box<dyn ModelSource>,
}

impl std::fmt::Debug for ServedModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ServedModel({:?}, aliases {:?}, pinned: {})", self.name, self.aliases, self.pinned)
    }
}

/// Where a model is.
pub(crate) enum Place {
    Absent,
    Loading {
        loaded: u64,
        total: u64,
    },
    Ready(Arc<App>),
    /// Its last answers are under way, or have ended: then there is none.
    Leaving(Option<Arc<App>>),
}

impl Place {
    /// The model if there are, or may be, answers of it.
    fn app(&self) -> Option<&Arc<App>> {
        match self {
            Self::Ready(app) | Self::Leaving(Some(app)) => Some(app),
            Self::Absent | Self::Loading { .. } | Self::Leaving(None) => None,
        }
    }
}

struct Entry {
    name: String,
    aliases: Vec<String>,
    pinned: bool,
    /// Whether it is an adapter of another model, whose scheduler it has.
    is_adapter: bool,
    /// None for a model that was there from the start, and stays.
    source: Option<Arc<dyn ModelSource>>,
}

struct State {
    place: Place,
    /// Requests that wait for it.
    waiting: usize,
    /// Whether a task is to load it.
    queued: bool,
    /// When it was asked for last.
    used: Instant,
    /// Loads that failed, and why the last one did.
    failures: u64,
    failure: Option<ApiError>,
    loads: u64,
    load_time: Duration,
    /// What it did whenever it was loaded before.
    done: Figures,
    /// Bytes of experts that it asked for, those of long ago less, and when and at which count that was.
    demand: f64,
    counted: (Instant, u64),
}

/// The models of a server.
pub(crate) struct Models {
    entries: Vec<Entry>,
    states: Mutex<Vec<State>>,
    /// Bytes for all of them.
    memory: u64,
    options: Arc<ServerOptions>,
    changed: Notify,
    turn: tokio::sync::Mutex<()>,
    dividing: AtomicBool,
    closed: AtomicBool,
}

/// A request that waits for a model.
struct Waiting<'a> {
    models: &'a Models,
    index: usize,
    failures: u64,
}

impl<'a> Waiting<'a> {
    fn new(models: &'a Models, index: usize) -> Self {
        let state = &mut models.lock()[index];
        state.waiting += 1;
        Self { models, index, failures: state.failures }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.models.lock()[self.index].waiting -= 1;
    }
}

impl Models {
    /// A model that is there and stays; its adapters are known by their names beside it.
    pub(crate) fn one(scheduler: Arc<Scheduler>, options: Arc<ServerOptions>) -> Self {
        let (name, aliases) = (options.model.clone(), options.aliases.clone());
        let app = Arc::new(App::new(scheduler, name.clone(), Arc::clone(&options)));
        let adapters = app.scheduler.description().adapters.clone();
        let entry =
            |name, aliases, is_adapter| Entry { name, aliases, pinned: true, is_adapter, source: None };
        let mut entries = vec![entry(name, aliases, false)];
        entries.extend(adapters.iter().map(|adapter| entry(adapter.clone(), vec![], true)));
        let models = Self::new(entries, 0, options);
        let mut states = models.lock();
        for (adapter, state) in adapters.iter().zip(&mut states[1..]) {
            state.place = Place::Ready(Arc::new(app.with_adapter(adapter)));
        }
        states[0].place = Place::Ready(app);
        drop(states);
        models
    }

    /// Models of which none is loaded, and `memory` bytes for all of them.
    pub(crate) fn of(models: Vec<ServedModel>, memory: u64, options: Arc<ServerOptions>) -> Self {
        let entry = |ServedModel { name, aliases, pinned, source }| Entry {
            name,
            aliases,
            pinned,
            is_adapter: false,
            source: Some(Arc::from(source)),
        };
        Self::new(models.into_iter().map(entry).collect(), memory, options)
    }

    fn new(entries: Vec<Entry>, memory: u64, options: Arc<ServerOptions>) -> Self {
        let now = Instant::now();
        let state = |_: &Entry| State {
            place: Place::Absent,
            waiting: 0,
            queued: false,
            used: now,
            failures: 0,
            failure: None,
            loads: 0,
            load_time: Duration::ZERO,
            done: Figures::default(),
            demand: 0.0,
            counted: (now, 0),
        };
        Self {
            states: Mutex::new(entries.iter().map(state).collect()),
            entries,
            memory,
            options,
            changed: Notify::new(),
            turn: tokio::sync::Mutex::new(()),
            dividing: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<State>> {
        // What it guards is replaced in single steps.
        self.states.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Names of all models.
    pub(crate) fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.entries.iter().map(|entry| &*entry.name)
    }

    pub(crate) fn name(&self, index: usize) -> &str {
        &self.entries[index].name
    }

    /// The model that a request means; none at all means the first.
    pub(crate) fn find(&self, model: Option<&str>) -> Result<usize, ApiError> {
        let Some(model) = model else { return Ok(0) };
        // Ollama's clients add a tag to names without one.
        let bare = model.strip_suffix(":latest").unwrap_or(model);
        let by = |is: &dyn Fn(&Entry) -> bool| self.entries.iter().position(is);
        let found = by(&|entry| entry.name == model || entry.name == bare)
            .or_else(|| by(&|entry| entry.aliases.iter().any(|alias| alias == model || alias == bare)))
            .or_else(|| by(&|entry| entry.aliases.iter().any(|alias| alias == "*")));
        found.ok_or_else(|| {
            let names: Vec<String> = self.names().map(|name| format!("{name:?}")).collect();
            let message = format!("unknown model {bare:?}; this server has {}", names.join(", "));
            ApiError {
                param: Some("model".into()),
                code: Some("model_not_found"),
                ..ApiError::new(StatusCode::NOT_FOUND, message)
            }
        })
    }

    /// The model if it is loaded.
    pub(crate) fn loaded(&self, index: usize) -> Option<Arc<App>> {
        match &self.lock()[index].place {
            Place::Ready(app) => Some(Arc::clone(app)),
            _ => None,
        }
    }

    /// Whether it is an adapter of another model.
    pub(crate) fn is_adapter(&self, index: usize) -> bool {
        self.entries[index].is_adapter
    }

    /// Every loaded model.
    pub(crate) fn all_loaded(&self) -> Vec<Arc<App>> {
        let own = (0..self.entries.len()).filter(|index| !self.is_adapter(*index));
        own.filter_map(|index| self.loaded(index)).collect()
    }

    /// The loaded model that was asked for last.
    pub(crate) fn latest(&self) -> Option<usize> {
        let states = self.lock();
        let ready = states.iter().enumerate().filter(|(_, state)| matches!(state.place, Place::Ready(_)));
        ready.max_by_key(|(_, state)| state.used).map(|(index, _)| index)
    }

    /// What `look` makes of the place of a model, how often it was loaded, and the time that took.
    pub(crate) fn look<T>(&self, index: usize, look: impl FnOnce(&Place, u64, Duration) -> T) -> T {
        let state = &self.lock()[index];
        look(&state.place, state.loads, state.load_time)
    }

    /// What a model did whenever it was loaded before, and the model if it is there. The two are of one moment, so that their
    /// sum never falls.
    pub(crate) fn account(&self, index: usize) -> (Figures, Option<Arc<App>>) {
        let state = &self.lock()[index];
        (state.done.clone(), state.place.app().cloned())
    }

    /// Every model that may have answers under way.
    fn all_there(&self) -> Vec<Arc<App>> {
        self.lock().iter().filter_map(|state| state.place.app().cloned()).collect()
    }

    /// Whether requests are taken.
    pub(crate) fn is_open(&self) -> bool {
        !self.closed.load(Ordering::Relaxed) && self.all_loaded().iter().all(|app| app.scheduler.is_open())
    }

    /// Takes no more requests; those that have been taken are answered.
    pub(crate) fn drain(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.changed.notify_waiters();
        self.all_there().iter().for_each(|app| app.scheduler.drain());
    }

    /// Gives up every request.
    pub(crate) fn abandon(&self) {
        self.drain();
        self.all_there().iter().for_each(|app| app.scheduler.abandon());
    }

    /// The model, loaded if need be. It stays as long as what is returned is held.
    pub(crate) async fn get(self: &Arc<Self>, index: usize) -> Result<Arc<App>, ApiError> {
        let waiting = Waiting::new(self, index);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            {
                let state = &mut self.lock()[index];
                if self.closed.load(Ordering::Relaxed) {
                    return Err(Error::ShuttingDown.into());
                }
                if let Place::Ready(app) = &state.place {
                    // One whose thread ended by a fault is loaded anew.
                    if app.scheduler.is_alive() || self.entries[index].source.is_none() {
                        state.used = Instant::now();
                        return Ok(Arc::clone(app));
                    }
                    state.done.add_counts(&app.scheduler.figures());
                    state.place = Place::Absent;
                }
                if let Some(failure) = state.failure.as_ref().filter(|_| state.failures > waiting.failures) {
                    return Err(failure.clone());
                }
                if !std::mem::replace(&mut state.queued, true) {
                    tokio::spawn(Arc::clone(self).bring(index));
                }
            }
            changed.await;
        }
    }

    /// Loads a model that somebody waits for.
    async fn bring(self: Arc<Self>, index: usize) {
        let turn = self.turn.lock().await;
        {
            let state = &mut self.lock()[index];
            if state.waiting == 0 || matches!(state.place, Place::Ready(_)) {
                state.queued = false;
                return;
            }
        }
        let outcome = self.load(index).await;
        let name = &self.entries[index].name;
        {
            let mut states = self.lock();
            let most = states.iter().map(|state| state.demand).fold(0.0, f64::max);
            let state = &mut states[index];
            state.queued = false;
            match outcome {
                Ok((app, took)) => {
                    tracing::info!(model = name, seconds = took.as_secs_f64(), "loaded");
                    (state.place, state.used) = (Place::Ready(app), Instant::now());
                    (state.loads, state.load_time) = (state.loads + 1, state.load_time + took);
                    // It is what is wanted now.
                    (state.demand, state.counted) = (most, (Instant::now(), 0));
                }
                Err(error) => {
                    tracing::error!(model = name, reason = error.message, "not loaded");
                    state.place = Place::Absent;
                    (state.failures, state.failure) = (state.failures + 1, Some(error));
                }
            }
        }
        if self.closed.load(Ordering::Relaxed) {
            self.abandon();
        }
        self.changed.notify_waiters();
        self.divide_again().await;
        // It may not leave again before those that waited have it.
        while self.lock()[index].waiting > 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        drop(turn);
        if self.all_loaded().len() > 1 && !self.dividing.swap(true, Ordering::Relaxed) {
            tokio::spawn(self.keep_dividing());
        }
    }

    /// Opens a model once there is room for it; returns how long opening took.
    async fn load(self: &Arc<Self>, index: usize) -> Result<(Arc<App>, Duration), ApiError> {
        let entry = &self.entries[index];
        let Some(source) = entry.source.clone() else { return Err(Error::ShuttingDown.into()) };
        let asked = Arc::clone(&source);
        let least = blocking(move || asked.least_memory()).await??;
        // Context and scratch are chosen by the memory that a model is opened with, and one that stays leaves room for others.
        let spare = if entry.pinned { self.most_wanted_by_others().await? } else { 0 };
        loop {
            self.make_room(index, least).await?;
            let share = self.shrink_for(least).await?;
            let share = share.min(self.memory.saturating_sub(spare)).max(least);
            self.lock()[index].place = Place::Loading { loaded: 0, total: 0 };
            let begun = Instant::now();
            let (source, models, later) = (Arc::clone(&source), Arc::clone(self), self.memory);
            let opened = blocking(move || {
                source.open(share, later, &mut |loaded, total| {
                    models.lock()[index].place = Place::Loading { loaded, total };
                })
            });
            match opened.await? {
                Ok(scheduler) => {
                    let (name, options) = (entry.name.clone(), Arc::clone(&self.options));
                    let app = App::new(Arc::new(scheduler), name, options);
                    return Ok((Arc::new(app), begun.elapsed()));
                }
                // Of a device's memory, or with options of its own, it may need more than was thought.
                Err(error) if error.is_out_of_memory() => match self.oldest(index) {
                    Some(victim) => self.unload(victim).await?,
                    None => return Err(error.into()),
                },
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// The least memory of the model that may be unloaded and needs most; one that cannot be read needs none.
    async fn most_wanted_by_others(&self) -> Result<u64, ApiError> {
        let others = self.entries.iter().filter(|entry| !entry.pinned);
        let sources: Vec<_> = others.filter_map(|entry| entry.source.clone()).collect();
        let least = move || sources.iter().filter_map(|source| source.least_memory().ok()).max();
        Ok(blocking(least).await?.unwrap_or(0))
    }

    /// Unloads models until the rest can do with what `least` leaves.
    async fn make_room(self: &Arc<Self>, index: usize, least: u64) -> Result<(), ApiError> {
        loop {
            let held: u64 = self.claims().iter().map(|(_, claim)| claim.least).sum();
            if held.saturating_add(least) <= self.memory {
                return Ok(());
            }
            let Some(victim) = self.oldest(index) else {
                let parts = format!("this model {}, those that are pinned {}", size(least), size(held));
                return Err(Error::Budget {
                    budget: self.memory,
                    minimum: least + held,
                    parts,
                    device: None,
                }
                .into());
            };
            self.unload(victim).await?;
        }
    }

    /// Makes the loaded models smaller for one that needs `least`, and returns what it may have.
    async fn shrink_for(self: &Arc<Self>, least: u64) -> Result<u64, ApiError> {
        let others = self.claims();
        let weight = others.iter().map(|(_, claim)| claim.weight).fold(0.0, f64::max);
        let its_own = Claim { least, most: self.memory, weight };
        let claims: Vec<Claim> = others.iter().map(|(_, claim)| *claim).chain([its_own]).collect();
        let shares = divide(self.memory, &claims).unwrap_or_else(|| vec![least; claims.len()]);
        let wanted = others.into_iter().zip(&shares).map(|((app, _), share)| (app, *share)).collect();
        blocking(move || grant(wanted)).await?;
        Ok(shares[shares.len() - 1])
    }

    /// What the loaded models can do with memory.
    fn claims(&self) -> Vec<(Arc<App>, Claim)> {
        let mut states = self.lock();
        let ready = states.iter_mut().filter_map(|state| {
            let Place::Ready(app) = &state.place else { return None };
            let app = Arc::clone(app);
            let weight = state.count(&app);
            let (least, most) = app.scheduler.figures().memory.grants;
            Some((app, Claim { least, most, weight }))
        });
        ready.collect()
    }

    /// Of the loaded models but `index` the one that was used longest ago and may leave.
    fn oldest(&self, index: usize) -> Option<usize> {
        let states = self.lock();
        let may_leave = |i: usize| i != index && !self.entries[i].pinned;
        let ready = states.iter().enumerate().filter(|(_, state)| matches!(state.place, Place::Ready(_)));
        ready.filter(|(i, _)| may_leave(*i)).min_by_key(|(_, state)| state.used).map(|(i, _)| i)
    }

    /// Lets the answers of a model end, and drops it.
    async fn unload(self: &Arc<Self>, index: usize) -> Result<(), ApiError> {
        {
            let state = &mut self.lock()[index];
            let Place::Ready(app) = &state.place else { return Ok(()) };
            state.place = Place::Leaving(Some(Arc::clone(app)));
        }
        let app = loop {
            if let Some(app) = self.lock()[index].left() {
                break app;
            }
            tokio::time::sleep(LOOK).await;
        };
        let leave = move || {
            drop(app);
            moeflux::memory::trim();
        };
        let outcome = blocking(leave).await;
        tracing::info!(model = self.entries[index].name, "unloaded");
        self.lock()[index].place = Place::Absent;
        outcome
    }

    /// Divides memory by what has been used until now, unless that would change little.
    async fn divide_again(self: &Arc<Self>) {
        let claims = self.claims();
        let wanted: Vec<Claim> = claims.iter().map(|(_, claim)| *claim).collect();
        let Some(shares) = divide(self.memory, &wanted) else { return };
        let wanted: Vec<(Arc<App>, u64)> =
            claims.into_iter().zip(shares).map(|((app, _), share)| (app, share)).collect();
        let differs = |(app, share): &(Arc<App>, u64)| {
            let Memory { budget, .. } = app.scheduler.figures().memory;
            budget.abs_diff(*share) > budget / 8
        };
        if wanted.iter().any(differs) {
            // A thread that cannot be had leaves things as they are.
            let _ = blocking(move || grant(wanted)).await;
        }
    }

    /// Divides memory anew from time to time while several models are loaded.
    async fn keep_dividing(self: Arc<Self>) {
        while self.all_loaded().len() > 1 && !self.closed.load(Ordering::Relaxed) {
            tokio::time::sleep(DIVIDE).await;
            let _turn = self.turn.lock().await;
            self.divide_again().await;
        }
        self.dividing.store(false, Ordering::Relaxed);
    }
}

impl State {
    /// The model if it leaves and nobody else has it; what it did is counted then.
    fn left(&mut self) -> Option<Arc<App>> {
        let Place::Leaving(there) = &mut self.place else { return None };
        // New holders come by the lock alone. Answers that were given up are counted a step later.
        let over = |app: &mut Arc<App>| {
            Arc::strong_count(app) == 1 && (app.scheduler.is_idle() || !app.scheduler.is_alive())
        };
        let app = there.take_if(over)?;
        self.done.add_counts(&app.scheduler.figures());
        Some(app)
    }

    /// Counts what the model has asked for until now; returns how much it is used.
    fn count(&mut self, app: &App) -> f64 {
        let figures = app.scheduler.figures();
        let asked = figures.experts.hits + figures.experts.misses;
        let expert_bytes = figures.memory.grants.1 / app.scheduler.description().experts.max(1) as u64;
        let (then, before) = std::mem::replace(&mut self.counted, (Instant::now(), asked));
        let aged = 0.5f64.powf(then.elapsed().as_secs_f64() / HALF_LIFE.as_secs_f64());
        self.demand = self.demand * aged + asked.saturating_sub(before) as f64 * expert_bytes as f64;
        self.demand
    }
}

/// Gives models memory, those first that are to have less.
fn grant(mut wanted: Vec<(Arc<App>, u64)>) {
    wanted.sort_by_key(|(app, share)| *share > app.scheduler.figures().memory.budget);
    wanted.iter().for_each(|(app, share)| app.scheduler.grant(*share));
}

/// Runs what may take a while.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "the model could not be loaded"))
}
