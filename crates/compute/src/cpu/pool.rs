//! [`ThreadPool`]: the threads that compute, started once.
//!
//! A parallel region hands numbered tasks to all threads, the caller among them, through one counter. Workers spin
//! for a short while between regions, because the next one usually follows within microseconds, then sleep.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker looks for the next region before it sleeps.
const SPIN: Duration = Duration::from_micros(100);

type Work<'a> = dyn Fn(usize) + Sync + 'a;

/// One parallel region, on the caller's stack.
struct Region {
    work: *const Work<'static>,
    tasks: usize,
    /// The next task to hand out.
    next: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Region {
    fn help(&self) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= self.tasks {
                return;
            }
            // SAFETY: `ThreadPool::run` keeps the closure alive until every worker has left the region.
            let work = unsafe { &*self.work };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(task))) {
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            }
        }
    }
}

struct Shared {
    /// Number of the current region; changes when a new one begins.
    epoch: AtomicU64,
    /// The current region. Valid from the change of `epoch` until `inside` is back at 0.
    region: AtomicUsize,
    /// Workers that have not left the current region yet.
    inside: AtomicUsize,
    stop: AtomicBool,
    sleeping: Mutex<usize>,
    wake: Condvar,
}

/// Threads that wait for parallel regions.
pub struct ThreadPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One region at a time.
    entry: Mutex<()>,
}

impl std::fmt::Debug for ThreadPool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ThreadPool({} threads)", self.threads())
    }
}

impl ThreadPool {
    /// A pool of `threads` threads, the caller of [`ThreadPool::run`] being one of them.
    ///
    /// # Errors
    /// If the system refuses threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            epoch: AtomicU64::new(0),
            region: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleeping: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut pool = Self { shared, workers: vec![], entry: Mutex::new(()) };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("compute-{i}"));
            pool.workers.push(builder.spawn(move || serve(&shared))?);
        }
        Ok(pool)
    }

    /// Threads that compute, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `work` with each of `0..tasks` once, on any thread, and returns when all have returned. A panic in
    /// `work` is passed on to the caller after that. `work` must not call `run` of the same pool.
    pub fn run(&self, tasks: usize, work: &Work<'_>) {
        if self.workers.is_empty() || tasks <= 1 {
            return (0..tasks).for_each(work);
        }
        let _entry = self.entry.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime changes; the pointer is not used after this function returns.
        let work: *const Work<'static> =
            unsafe { std::mem::transmute::<&Work<'_>, &'static Work<'static>>(work) };
        let region = Region { work, tasks, next: AtomicUsize::new(0), panic: Mutex::new(None) };
        let shared = &*self.shared;
        shared.region.store(&raw const region as usize, Ordering::Relaxed);
        shared.inside.store(self.workers.len(), Ordering::Relaxed);
        // Sequentially consistent with the sleepers' last look: either they see the new epoch or they are counted.
        shared.epoch.fetch_add(1, Ordering::SeqCst);
        if *shared.sleeping.lock().unwrap_or_else(PoisonError::into_inner) > 0 {
            shared.wake.notify_all();
        }
        region.help();
        let start = Instant::now();
        while shared.inside.load(Ordering::Acquire) > 0 {
            std::hint::spin_loop();
            // The machine may have fewer free cores than threads.
            if start.elapsed() > SPIN {
                std::thread::yield_now();
            }
        }
        if let Some(panic) = region.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            resume_unwind(panic);
        }
    }
}

fn serve(shared: &Shared) {
    let mut seen = 0;
    loop {
        let start = Instant::now();
        while shared.epoch.load(Ordering::Acquire) == seen {
            for _ in 0..64 {
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN {
                let mut sleeping = shared.sleeping.lock().unwrap_or_else(PoisonError::into_inner);
                *sleeping += 1;
                while shared.epoch.load(Ordering::SeqCst) == seen {
                    sleeping = shared.wake.wait(sleeping).unwrap_or_else(PoisonError::into_inner);
                }
                *sleeping -= 1;
            }
        }
        // Each region waits for every worker, so none is ever missed.
        seen += 1;
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: the region lives on the stack of `run`, which does not return before `inside` is 0.
        let region = unsafe { &*(shared.region.load(Ordering::Relaxed) as *const Region) };
        region.help();
        shared.inside.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        // Taken so that no worker is between its last look at the epoch and its sleep.
        drop(self.shared.sleeping.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // Workers catch the panics of tasks and have none of their own.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once() {
        for threads in [1, 2, 5] {
            let pool = ThreadPool::new(threads).unwrap();
            for tasks in [0, 1, 2, 7, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(
                    counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                    "{threads} threads, {tasks} tasks"
                );
            }
        }
    }

    #[test]
    fn regions_follow_each_other_after_sleep() {
        let pool = ThreadPool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        for round in 0..300 {
            if round % 100 == 0 {
                std::thread::sleep(SPIN * 20);
            }
            pool.run(8, &|task| {
                total.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(total.load(Ordering::Relaxed), 300 * 28);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(3).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(20, &|task| assert!(task != 7, "task seven"));
        }));
        assert!(outcome.is_err());
        let done = AtomicUsize::new(0);
        pool.run(20, &|_| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.load(Ordering::Relaxed), 20);
    }
}
