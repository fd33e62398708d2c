//! What the scheduler says of its prefix cache is what prompts find there.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use moeflux::scheduler::{BLOCK_TOKENS, BlockEvent};
use moeflux::{DecodingOptions, Options, Request, Scheduler, SchedulerOptions};

use crate::scheduler::{demo, model, options};

/// Blocks by hash: their parents and tokens.
#[derive(Default)]
struct Index {
    blocks: HashMap<u64, (Option<u64>, Vec<u32>)>,
    cleared: usize,
}

impl Index {
    fn add(&mut self, event: BlockEvent) {
        match event {
            BlockEvent::Stored { parent, hashes, tokens } => {
                assert_eq!(tokens.len(), BLOCK_TOKENS * hashes.len());
                assert!(parent.is_none_or(|parent| self.blocks.contains_key(&parent)));
                let mut parent = parent;
                for (hash, tokens) in hashes.into_iter().zip(tokens.chunks(BLOCK_TOKENS)) {
                    let old = self.blocks.insert(hash, (parent, tokens.to_vec()));
                    assert_eq!(old, None, "stored twice");
                    parent = Some(hash);
                }
            }
            BlockEvent::Removed { hashes } => {
                for hash in hashes {
                    self.blocks.remove(&hash).expect("what was stored");
                    assert!(self.blocks.values().all(|(parent, _)| *parent != Some(hash)));
                }
            }
            BlockEvent::Cleared => {
                self.blocks.clear();
                self.cleared += 1;
            }
        }
    }

    /// Tokens of `prompt` that whole blocks have.
    fn has(&self, prompt: &[u32]) -> usize {
        let mut parent = None;
        let blocks = prompt.chunks_exact(BLOCK_TOKENS).take_while(|block| {
            let found = self.blocks.iter().find(|(_, (before, tokens))| *before == parent && tokens == block);
            parent = found.map(|(hash, _)| *hash);
            parent.is_some()
        });
        blocks.count() * BLOCK_TOKENS
    }
}

struct Watched {
    scheduler: Scheduler,
    index: Arc<Mutex<Index>>,
}

fn watched(options: &Options, kept_sessions: usize) -> Watched {
    let index = Arc::new(Mutex::new(Index::default()));
    let theirs = Arc::clone(&index);
    let observer = move |events: Vec<BlockEvent>| {
        assert!(!events.is_empty());
        events.into_iter().for_each(|event| theirs.lock().unwrap().add(event));
    };
    let scheduling = SchedulerOptions { kept_sessions, ..SchedulerOptions::default() };
    let scheduler = Scheduler::start_observed(model(&demo(), options), scheduling, observer).unwrap();
    Watched { scheduler, index }
}

impl Watched {
    /// Answers a prompt; how many of its tokens were cached, and how many blocks said so before.
    fn ask(&self, prompt: &[u32]) -> (usize, usize) {
        let said = self.index.lock().unwrap().has(prompt);
        let options = DecodingOptions { max_tokens: 3, ..DecodingOptions::default() };
        let request = Request { prompt: prompt.to_vec(), options, ..Request::default() };
        let (_, done) = self.scheduler.submit(request).unwrap().text().unwrap();
        // The step that ends an answer says what it changed when it is over.
        self.scheduler.visit(|_| ()).unwrap().recv().unwrap();
        (done.usage.cached_tokens, said)
    }
}

fn prompt(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| 5 + (i * 7 + seed * 31) % 200).collect()
}

#[test]
fn events_say_what_prompts_find() {
    let watched = watched(&options(), 2);
    let (a, b, c) = (prompt(1, 150), prompt(2, 140), prompt(3, 70));
    assert_eq!(watched.ask(&a), (0, 0));
    assert_eq!(watched.ask(&a), (149, 128));
    let branch = [&a[..130], &b[..20]].concat();
    assert_eq!(watched.ask(&branch), (130, 128));
    // Two sessions are kept.
    assert_eq!(watched.ask(&b), (0, 0));
    assert_eq!(watched.ask(&c), (0, 0));
    assert_eq!(watched.ask(&b), (139, 128));
    let index = Arc::clone(&watched.index);
    let told = index.lock().unwrap();
    assert_eq!((told.has(&a), told.has(&b), told.has(&c)), (0, 128, 64));
    assert_eq!((told.blocks.len(), told.cleared), (3, 1));
    drop(told);
    drop(watched);
    let told = index.lock().unwrap();
    assert_eq!((told.blocks.len(), told.cleared), (0, 2));
}

#[test]
fn pressure_takes_blocks_away() {
    let few = Options { kv_tokens: Some(512), sequences: 2, ..options() };
    let watched = watched(&few, 16);
    for seed in 0..8 {
        let all = prompt(seed, 200);
        assert_eq!(watched.ask(&all), (0, 0), "{seed}");
        assert_eq!(watched.index.lock().unwrap().has(&all), 192);
        let pages = watched.scheduler.description().pages;
        assert!(watched.index.lock().unwrap().blocks.len() <= pages);
    }
    assert_eq!(watched.index.lock().unwrap().has(&prompt(0, 200)), 0);
}
