//! A persistent pool of threads for regions of a few microseconds.
//!
//! A region is a number of tasks and one function; threads claim tasks from one atomic counter, so a
//! descheduled thread holds up nothing but the task it has. The calling thread works too. Idle threads spin
//! for some tens of microseconds, as the next region of a decode step comes soon, and then sleep. A
//! region allocates nothing.
//!
//! A thread that goes to sleep announces it and then looks for work once more; the other side publishes and then looks
//! for sleepers. Both write by an exchange: that orders the write before the following read on every machine, also
//! where an emulator takes a sequentially consistent store for a mere release (qemu 7.2 does so for aarch64 on x86-64,
//! and a wake-up was lost).
//!
//! Tasks may also be walked in order: each thread has a span of neighbouring tasks, is told which it will run next, and
//! when its own are done takes those of others from the end.
//!
//! One region runs at a time: `run` called from within a task, or while another thread's region is running,
//! does its tasks on the calling thread alone.

use std::{
    any::Any,
    cell::UnsafeCell,
    hint,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    thread,
};

/// Turns of the spin loop before a thread sleeps; 20 to 60 µs, depending on the machine's pause instruction.
const SPINS: u32 = 2000;

/// Threads that run the tasks of one region after the other; see the module documentation.
#[derive(Debug)]
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
    /// Held while a region runs.
    region: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    /// Tasks of each span that nobody has taken: the first in the high half, the end in the low half.
    spans: Box<[Line<AtomicU64>]>,
    /// Number of the region in the high half, tasks that nobody has claimed in the low half.
    unclaimed: Line<AtomicU64>,
    /// Tasks that have not ended.
    unfinished: Line<AtomicU32>,
    /// The region's work. Written by the holder of `ThreadPool::region` while no task is unclaimed or
    /// unfinished, read by threads that have claimed a task and not ended it.
    job: UnsafeCell<Job>,
    /// Payload of the first task that panicked.
    panic: Mutex<Option<Box<dyn Any + Send>>>,

    spins: u32,
    stop: AtomicBool,
    /// Workers that sleep or are about to; changed under `lock`.
    sleeping: AtomicUsize,
    /// The caller of `run` sleeps or is about to.
    caller_sleeping: AtomicBool,
    lock: Mutex<()>,
    work: Condvar,
    finished: Condvar,
}

/// Keeps counters that different threads write from sharing a cache line (or a pair that is fetched together).
#[derive(Debug)]
#[repr(align(128))]
struct Line<T>(T);

#[derive(Debug, Clone, Copy)]
struct Job {
    /// Borrowed from the caller of `run`, which does not return before every task has ended.
    task: *const (dyn Fn(usize) + Sync),
    n_tasks: u32,
}

// SAFETY: `job` is handed over as its documentation says: written before the store to `unclaimed` that
// publishes it, read after a claim that synchronises with that store; its function is `Sync`.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl ThreadPool {
    /// A pool of `n_threads` threads, the caller of [`ThreadPool::run`] being one of them. Zero counts as one.
    /// If the system refuses to start as many, the pool has fewer.
    pub fn new(n_threads: usize) -> Self {
        Self::that_spins(n_threads, SPINS)
    }

    /// As [`ThreadPool::new`], with so many turns of the spin loop before a thread sleeps, if there are enough cores.
    pub(crate) fn that_spins(n_threads: usize, spins: u32) -> Self {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            spans: (0..n_threads.max(1)).map(|_| Line(AtomicU64::new(0))).collect(),
            unclaimed: Line(AtomicU64::new(0)),
            unfinished: Line(AtomicU32::new(0)),
            job: UnsafeCell::new(Job { task: &|_| {}, n_tasks: 0 }),
            panic: Mutex::new(None),
            // Spinning keeps others from the core when there are more threads than cores.
            spins: if n_threads > cores { spins / 50 } else { spins },
            stop: AtomicBool::new(false),
            sleeping: AtomicUsize::new(0),
            caller_sleeping: AtomicBool::new(false),
            lock: Mutex::new(()),
            work: Condvar::new(),
            finished: Condvar::new(),
        });
        let spawn = |i: usize| {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name(format!("compute-{i}"))
                .spawn(move || shared.work_until_stopped())
                .ok()
        };
        let workers = (1..n_threads).map_while(spawn).collect();
        Self { shared, workers, region: Mutex::new(()) }
    }

    /// Threads that work on a region, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0)` … `task(n_tasks − 1)`, each once, in any order and on any of the threads, and
    /// returns when all have ended.
    ///
    /// # Panics
    /// With the payload of the first task that panicked, after all tasks have ended; the pool stays
    /// usable. If `n_tasks` exceeds `u32::MAX`.
    pub fn run(&self, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        match self.enter(n_tasks) {
            Some(region) => self.run_region(region, n_tasks, task),
            None => (0..n_tasks).for_each(task),
        }
    }

    /// As [`ThreadPool::run`], but each thread runs neighbouring tasks one after the other as far as others leave them to it.
    /// `task` is given the number of the task that the same thread will probably run next, if there is one.
    ///
    /// # Panics
    /// As [`ThreadPool::run`].
    pub(crate) fn run_in_order(&self, n_tasks: usize, task: &(dyn Fn(usize, Option<usize>) + Sync)) {
        let Some(region) = self.enter(n_tasks) else {
            (0..n_tasks).for_each(|i| task(i, Some(i + 1).filter(|next| *next < n_tasks)));
            return;
        };
        let spans = &self.shared.spans;
        for (i, span) in spans.iter().enumerate() {
            let at = |i: usize| (i * n_tasks / spans.len()) as u64;
            // The region's start publishes it.
            span.0.store(at(i) << 32 | at(i + 1), Ordering::Relaxed);
        }
        self.run_region(region, spans.len(), &|own| {
            while let Some((i, rest)) = take(&spans[own].0, true) {
                task(i, Some(rest.start).filter(|_| !rest.is_empty()));
            }
            for other in 1..spans.len() {
                while let Some((i, _)) = take(&spans[(own + other) % spans.len()].0, false) {
                    task(i, None);
                }
            }
        });
    }

    /// Begins a region of so many tasks; none if the caller has to do them alone.
    fn enter(&self, n_tasks: usize) -> Option<MutexGuard<'_, ()>> {
        assert!(u32::try_from(n_tasks).is_ok(), "tasks are counted in 32 bits");
        if n_tasks < 2 || self.workers.is_empty() {
            return None;
        }
        match self.region.try_lock() {
            Ok(region) => Some(region),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn run_region(&self, region: MutexGuard<'_, ()>, n_tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        let n_tasks = n_tasks as u32;
        // SAFETY: only the lifetime changes; nobody uses the reference after the region's last task has ended,
        // which this function awaits.
        let task: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(task) };
        let shared = &*self.shared;
        // SAFETY: this thread holds `region` and the previous region has ended: nobody reads the job.
        unsafe { *shared.job.get() = Job { task, n_tasks } };
        shared.unfinished.0.store(n_tasks, Ordering::Relaxed);
        let number = (shared.unclaimed.0.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        shared.unclaimed.0.swap(number << 32 | u64::from(n_tasks), Ordering::SeqCst);
        if shared.sleeping.load(Ordering::SeqCst) > 0 {
            drop(lock(&shared.lock));
            shared.work.notify_all();
        }

        while shared.run_one() {}
        shared.await_finish();
        let panic = lock(&shared.panic).take();
        drop(region);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.lock));
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // Workers catch the panics of tasks and have none of their own.
            worker.join().ok();
        }
    }
}

impl Shared {
    fn work_until_stopped(&self) {
        loop {
            let mut turn = 0;
            while turn < self.spins {
                if self.run_one() {
                    turn = 0;
                } else if self.stop.load(Ordering::Relaxed) {
                    return;
                } else {
                    hint::spin_loop();
                    turn += 1;
                }
            }
            let mut guard = lock(&self.lock);
            // Announced before looking again; `run` publishes before it looks here: one of the two sees the
            // other.
            self.sleeping.fetch_add(1, Ordering::SeqCst);
            while self.unclaimed.0.load(Ordering::SeqCst) as u32 == 0 && !self.stop.load(Ordering::SeqCst) {
                guard = self.work.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Claims and runs one task; false if none is left.
    fn run_one(&self) -> bool {
        let mut state = self.unclaimed.0.load(Ordering::Relaxed);
        loop {
            if state as u32 == 0 {
                return false;
            }
            let claim = self.unclaimed.0.compare_exchange_weak(
                state,
                state - 1,
                Ordering::Acquire,
                Ordering::Relaxed,
            );
            match claim {
                Ok(_) => break,
                Err(changed) => state = changed,
            }
        }
        // SAFETY: this thread has claimed a task of the current region and not ended it.
        let job = unsafe { *self.job.get() };
        let index = job.n_tasks - state as u32;
        // SAFETY: as above; the function outlives the region.
        let task = unsafe { &*job.task };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| task(index as usize))) {
            lock(&self.panic).get_or_insert(payload);
        }
        if self.unfinished.0.fetch_sub(1, Ordering::SeqCst) == 1
            && self.caller_sleeping.load(Ordering::SeqCst)
        {
            drop(lock(&self.lock));
            self.finished.notify_one();
        }
        true
    }

    fn await_finish(&self) {
        for _ in 0..self.spins {
            if self.unfinished.0.load(Ordering::Acquire) == 0 {
                return;
            }
            hint::spin_loop();
        }
        let mut guard = lock(&self.lock);
        // Announced before looking again; a thread that ends the last task looks here after ending it.
        self.caller_sleeping.swap(true, Ordering::SeqCst);
        while self.unfinished.0.load(Ordering::SeqCst) != 0 {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeping.store(false, Ordering::SeqCst);
    }
}

/// Takes the first or the last task of a span, and says what is left of it then.
fn take(span: &AtomicU64, first: bool) -> Option<(usize, Range<usize>)> {
    let mut state = span.load(Ordering::Relaxed);
    loop {
        let (start, end) = ((state >> 32) as usize, state as u32 as usize);
        if start >= end {
            return None;
        }
        let rest = if first { start + 1..end } else { start..end - 1 };
        let left = (rest.start as u64) << 32 | rest.end as u64;
        // What tasks wrote is handed over by the region's end.
        match span.compare_exchange_weak(state, left, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Some((if first { start } else { end - 1 }, rest)),
            Err(changed) => state = changed,
        }
    }
}

/// Locks; no data here can be left inconsistent by a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use super::*;

    /// Every task of a region of `n_tasks` runs exactly once.
    fn check(pool: &ThreadPool, n_tasks: usize) {
        let counts: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
        pool.run(n_tasks, &|task| {
            counts[task].fetch_add(1, Ordering::Relaxed);
        });
        for (task, count) in counts.iter().enumerate() {
            assert_eq!(count.load(Ordering::Relaxed), 1, "task {task} of {n_tasks}");
        }
    }

    #[test]
    fn every_task_runs_once() {
        for threads in [0, 1, 2, 3, 9] {
            let pool = ThreadPool::new(threads);
            assert_eq!(pool.threads(), threads.max(1));
            for n_tasks in [0, 1, 2, 3, 7, 100, 1000] {
                check(&pool, n_tasks);
            }
        }
    }

    #[test]
    fn every_task_in_order_runs_once() {
        for threads in [1, 2, 3, 9] {
            let pool = ThreadPool::new(threads);
            for n_tasks in [0, 1, 2, 3, 7, 100, 1000] {
                let counts: Vec<AtomicUsize> = (0..n_tasks).map(|_| AtomicUsize::new(0)).collect();
                let announced = AtomicUsize::new(0);
                pool.run_in_order(n_tasks, &|task, next| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                    if let Some(next) = next {
                        assert_eq!(next, task + 1, "neighbours follow each other");
                        announced.fetch_add(1, Ordering::Relaxed);
                    }
                    if task == 0 && n_tasks == 100 {
                        // Others take what is left of the first span.
                        thread::sleep(Duration::from_millis(5));
                    }
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1), "{n_tasks} tasks");
                assert!(announced.load(Ordering::Relaxed) < n_tasks.max(1));
            }
        }
    }

    #[test]
    fn workers_that_sleep_are_woken() {
        let pool = ThreadPool::new(3);
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(2));
            check(&pool, 8);
        }
    }

    #[test]
    fn caller_sleeps_through_a_long_task() {
        let pool = ThreadPool::new(2);
        let slow = AtomicUsize::new(0);
        pool.run(2, &|_| {
            thread::sleep(Duration::from_millis(20));
            slow.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(slow.load(Ordering::Relaxed), 2);
    }

    #[test]
    fn many_short_regions() {
        let pool = ThreadPool::new(4);
        let total = AtomicUsize::new(0);
        for _ in 0..20_000 {
            pool.run(4, &|task| {
                total.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(total.load(Ordering::Relaxed), 20_000 * 6);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = ThreadPool::new(3);
        for bad in 0..4 {
            let ended = AtomicUsize::new(0);
            let run = || {
                pool.run(4, &|task| {
                    assert_ne!(task, bad, "the bad task");
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            };
            let payload = catch_unwind(AssertUnwindSafe(run)).expect_err("the panic is passed on");
            let message = payload.downcast_ref::<String>().expect("a formatted message");
            assert!(message.contains("the bad task"), "{message}");
            assert_eq!(ended.load(Ordering::Relaxed), 3);
            check(&pool, 50);
        }
    }

    #[test]
    fn nested_and_concurrent_regions_complete() {
        let pool = ThreadPool::new(2);
        let total = AtomicUsize::new(0);
        pool.run(3, &|_| {
            pool.run(5, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(total.load(Ordering::Relaxed), 15);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| (0..200).for_each(|_| check(&pool, 6)));
            }
        });
    }
}
