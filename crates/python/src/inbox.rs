//! [`Inbox`]: what the engine's thread has to say to whoever waits for an answer, a thread or an event loop.
//!
//! The engine's thread must not wait, and so never takes the interpreter's lock. A thread that waits is woken by a condition
//! variable; an event loop by [`Wakers`], whose own thread calls Python.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use moeflux::scheduler::Event;
use pyo3::prelude::*;

/// What guards these locks is replaced or appended to in single steps.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is called in an event loop once something has come.
#[derive(Debug)]
pub struct Waiter {
    /// The event loop.
    pub event_loop: Py<PyAny>,
    /// Without arguments.
    pub callback: Py<PyAny>,
}

/// Calls waiters, on a thread that is started for the first.
#[derive(Debug, Clone, Default)]
pub struct Wakers(Arc<OnceLock<mpsc::Sender<Waiter>>>);

impl Wakers {
    fn wake(&self, waiters: Vec<Waiter>) {
        if waiters.is_empty() {
            return;
        }
        let sender = self.0.get_or_init(|| {
            let (sender, receiver) = mpsc::channel();
            // Without a thread nobody is woken: the receiver is dropped with the closure.
            let _ = std::thread::Builder::new().name("moeflux-asyncio".into()).spawn(move || run(&receiver));
            sender
        });
        for waiter in waiters {
            // The thread lives as long as there are senders.
            let _ = sender.send(waiter);
        }
    }
}

fn run(waiters: &mpsc::Receiver<Waiter>) {
    for waiter in waiters.iter() {
        let called = Python::try_attach(|py| {
            // The loop may be closed by now; then nobody waits any more.
            let _ = waiter.event_loop.call_method1(py, "call_soon_threadsafe", (&waiter.callback,));
        });
        if called.is_none() {
            return;
        }
    }
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<Event>,
    /// Nothing more comes.
    closed: bool,
    waiters: Vec<(u64, Waiter)>,
    next_waiter: u64,
}

/// Events of one request.
#[derive(Debug)]
pub struct Inbox {
    state: Mutex<State>,
    arrived: Condvar,
    wakers: Wakers,
}

impl Inbox {
    /// An empty one.
    pub fn new(wakers: Wakers) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), arrived: Condvar::new(), wakers })
    }

    /// What puts events into it, until it is dropped.
    pub fn sink(self: &Arc<Self>) -> impl FnMut(Event) + Send + 'static + use<> {
        let closing = Closing(Arc::clone(self));
        move |event| closing.0.change(|state| state.events.push_back(event))
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        let waiters = std::mem::take(&mut state.waiters);
        drop(state);
        self.arrived.notify_all();
        self.wakers.wake(waiters.into_iter().map(|(_, waiter)| waiter).collect());
    }

    /// Everything that has come, and whether nothing more will.
    pub fn take(&self) -> (VecDeque<Event>, bool) {
        let mut state = lock(&self.state);
        (std::mem::take(&mut state.events), state.closed)
    }

    /// Waits for something to come, or for `limit`; whether there is something.
    pub fn wait(&self, limit: Duration) -> bool {
        let nothing = |state: &mut State| state.events.is_empty() && !state.closed;
        let waited = self.arrived.wait_timeout_while(lock(&self.state), limit, nothing);
        !nothing(&mut waited.unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Has `waiter` called when something comes; its number, or `None` if there already is something.
    pub fn wait_with(&self, waiter: Waiter) -> Option<u64> {
        let mut state = lock(&self.state);
        if !state.events.is_empty() || state.closed {
            return None;
        }
        let number = state.next_waiter;
        state.next_waiter += 1;
        state.waiters.push((number, waiter));
        Some(number)
    }

    /// Does not call a waiter any more.
    pub fn forget(&self, number: u64) {
        let mut state = lock(&self.state);
        let forgotten: Vec<_> = state.waiters.extract_if(.., |(other, _)| *other == number).collect();
        // Dropping what belongs to Python may run any code.
        drop(state);
        drop(forgotten);
    }
}

/// Says that nothing more comes.
struct Closing(Arc<Inbox>);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.change(|state| state.closed = true);
    }
}
