//! [`Stock`]: empty slots, some of which have been given memory ahead of time.
//!
//! The system finds and clears memory when it is first written. Unprepared, that happens while a read is handed to the
//! kernel, on the computing thread. A thread of the lowest priority does it ahead for the slots that will be used next,
//! while the processor would be idle. The price: up to [`AHEAD`] bytes of the budget are taken before they are needed.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::io::buffer::HostBuffer;

/// Bytes of prepared slots that nobody has taken yet, at most.
const AHEAD: usize = 1 << 30;
/// Fewer bytes in all are not worth a thread.
const LEAST_BYTES: usize = 256 << 20;

/// Slots of each size class that hold nothing.
pub(super) struct Stock {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    classes: Vec<Class>,
    /// Bytes of prepared slots.
    prepared: usize,
    closed: bool,
}

#[derive(Default)]
struct Class {
    /// Slots that nobody has written to, the first ones last.
    fresh: Vec<HostBuffer>,
    /// Slots that have memory.
    ready: Vec<HostBuffer>,
    /// Slots that the thread is preparing.
    in_hand: usize,
    /// Slots that are withdrawn and have no memory.
    withdrawn: Vec<HostBuffer>,
}

impl Stock {
    /// A stock of `classes`, slots that have never been written to.
    pub(super) fn new(classes: Vec<Vec<HostBuffer>>) -> Self {
        let bytes: usize = classes.iter().flatten().map(|slot| slot.as_ref().len()).sum();
        let class = |mut fresh: Vec<HostBuffer>| {
            fresh.reverse();
            Class { fresh, ..Class::default() }
        };
        let state = State { classes: classes.into_iter().map(class).collect(), ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let worker = (bytes >= LEAST_BYTES).then(|| prepare_ahead(Arc::clone(&shared))).flatten();
        Self { shared, worker }
    }

    /// Takes an empty slot of `class`; `None` if there is none.
    pub(super) fn take(&self, class: usize) -> Option<HostBuffer> {
        let mut state = self.shared.lock();
        loop {
            let State { classes, prepared, .. } = &mut *state;
            let of = &mut classes[class];
            if let Some(slot) = of.ready.pop() {
                *prepared = prepared.saturating_sub(slot.as_ref().len());
                self.shared.changed.notify_all();
                return Some(slot);
            }
            if let Some(slot) = of.fresh.pop() {
                return Some(slot);
            }
            if of.in_hand == 0 {
                return None;
            }
            state = self.shared.wait(state);
        }
    }

    /// Whether there is an empty slot of `class`.
    pub(super) fn has_any(&self, class: usize) -> bool {
        let of = &self.shared.lock().classes[class];
        of.in_hand > 0 || !of.fresh.is_empty() || !of.ready.is_empty()
    }

    /// Takes back a slot of `class`.
    pub(super) fn put(&self, class: usize, slot: HostBuffer) {
        let mut state = self.shared.lock();
        state.prepared += slot.as_ref().len();
        state.classes[class].ready.push(slot);
    }

    /// Takes a slot of `class` out of use and gives its memory back.
    pub(super) fn withdraw(&self, class: usize, mut slot: HostBuffer) {
        slot.release();
        self.shared.lock().classes[class].withdrawn.push(slot);
    }

    /// Puts a slot that was withdrawn into use again; false if there is none.
    pub(super) fn restore(&self, class: usize) -> bool {
        let of = &mut self.shared.lock().classes[class];
        let slot = of.withdrawn.pop();
        let restored = slot.is_some();
        of.fresh.extend(slot);
        restored
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        if let Some(worker) = self.worker.take() {
            // A panic of that thread has been reported by then.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Prepares slots until there are no more.
    fn prepare(&self) {
        let mut state = self.lock();
        loop {
            let Some(class) = state.classes.iter().position(|class| !class.fresh.is_empty()) else { return };
            if state.closed {
                return;
            }
            if state.prepared >= AHEAD {
                state = self.wait(state);
                continue;
            }
            let Some(mut slot) = state.classes[class].fresh.pop() else { continue };
            state.classes[class].in_hand += 1;
            drop(state);
            slot.populate();
            state = self.lock();
            state.prepared += slot.as_ref().len();
            state.classes[class].in_hand -= 1;
            state.classes[class].ready.push(slot);
            self.changed.notify_all();
        }
    }
}

/// Starts the thread, which ends at once where it cannot have a priority of its own: it would be in the way. Slots get
/// memory when they are used then.
fn prepare_ahead(shared: Arc<Shared>) -> Option<JoinHandle<()>> {
    let prepare = move || {
        if yield_to_all() {
            shared.prepare();
        }
    };
    std::thread::Builder::new().name("moeflux-slots".into()).spawn(prepare).ok()
}

/// Gives the calling thread, and no other, the lowest priority; false if that cannot be.
fn yield_to_all() -> bool {
    #[cfg(target_os = "linux")]
    return rustix::process::nice(19).is_ok();
    #[cfg(not(target_os = "linux"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::buffer::PAGE_BYTES;

    fn slots(count: usize, bytes: usize) -> Vec<HostBuffer> {
        HostBuffer::zeroed(count * bytes).unwrap().split(count, bytes)
    }

    #[test]
    fn every_slot_can_be_taken_once_and_comes_back() {
        let stock = Stock::new(vec![slots(3, PAGE_BYTES), slots(1, 2 * PAGE_BYTES)]);
        assert!(stock.worker.is_none(), "few bytes need no thread");
        let taken: Vec<_> = std::iter::from_fn(|| stock.take(0)).collect();
        assert_eq!(taken.len(), 3);
        assert_eq!(stock.take(1).unwrap().as_ref().len(), 2 * PAGE_BYTES);
        assert!(stock.take(1).is_none() && !stock.has_any(1));
        taken.into_iter().for_each(|slot| stock.put(0, slot));
        assert_eq!(std::iter::from_fn(|| stock.take(0)).count(), 3);
    }

    /// With the thread at work, whoever takes faster than it prepares gets every slot all the same.
    #[test]
    fn a_thread_loses_no_slot() {
        for taken_before in [0, 5, 40] {
            let state = State {
                classes: vec![Class { fresh: slots(40, PAGE_BYTES), ..Class::default() }],
                ..State::default()
            };
            let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
            let stock = Stock { shared: Arc::clone(&shared), worker: None };
            let first: Vec<_> = (0..taken_before).filter_map(|_| stock.take(0)).collect();
            let worker = std::thread::spawn(move || shared.prepare());
            let rest: Vec<_> = std::iter::from_fn(|| stock.take(0)).collect();
            assert_eq!(first.len() + rest.len(), 40);
            worker.join().unwrap();
            drop(stock);
        }
    }
}
