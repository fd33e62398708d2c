//! Replays recorded requests: what a policy, or knowledge of the future, would have kept in memory.

use std::collections::BTreeSet;

use super::policy::{Demand, PolicyKind};
use super::residency::{Key, Place, Residency};
use super::slots::{SetShape, SlotPlan};
use super::trace::Request;

/// What would have happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Experts asked for.
    pub asked: u64,
    /// Those that were in memory.
    pub hits: u64,
    /// Bytes of the others.
    pub bytes_read: u64,
}

impl Replayed {
    fn add(&mut self, shape: &SetShape, asked: usize, hits: usize) {
        self.asked += asked as u64;
        self.hits += hits as u64;
        let read = shape.expert_bytes.saturating_mul((asked - hits) as u64);
        self.bytes_read = self.bytes_read.saturating_add(read);
    }

    /// Share of requests that were hits, 0..=1.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.asked.max(1) as f64
    }
}

/// Replays `requests` with the slots of `plan` under `policy`; the first `skip` requests fill the cache and do not count.
pub fn replay(
    sets: &[SetShape],
    requests: &[Request],
    plan: &SlotPlan,
    policy: PolicyKind,
    skip: usize,
) -> Replayed {
    let mut residency = Residency::new(sets, plan, policy);
    let mut replayed = Replayed::default();
    for (index, request) in requests.iter().enumerate() {
        let keys = || request.experts.iter().map(|id| (request.set, *id));
        let present = |key: &Key| residency.place(*key) == Place::Present;
        let (hits, missing): (Vec<Key>, Vec<Key>) = keys().partition(present);
        hits.iter().for_each(|key| residency.hold(*key));
        let demand = Demand { experts: &request.experts, tokens: &request.tokens, rows: request.rows };
        residency.asked(request.set, demand);
        // With fewer slots than experts, the last ones take turns in slots and leave no trace.
        for key in &missing {
            if residency.take_slot(*key).is_ok() {
                residency.arrived(*key);
                residency.hold(*key);
            }
        }
        keys().for_each(|key| residency.let_go(key));
        if index >= skip {
            replayed.add(&sets[request.set], request.experts.len(), hits.len());
        }
    }
    replayed
}

/// Replays `requests` as if the future were known: the expert used last is evicted (Belady's optimum), be it the
/// newcomer. No policy can have more hits.
pub fn replay_optimum(sets: &[SetShape], requests: &[Request], plan: &SlotPlan, skip: usize) -> Replayed {
    let never = requests.len();
    let mut next_use = vec![vec![]; requests.len()];
    let mut seen: Vec<Vec<usize>> = sets.iter().map(|s| vec![never; s.experts]).collect();
    for (index, request) in requests.iter().enumerate().rev() {
        for id in &request.experts {
            let next = &mut seen[request.set][*id as usize];
            next_use[index].push(std::mem::replace(next, index));
        }
    }
    // Present experts of each class by their next use.
    let mut classes: Vec<BTreeSet<(usize, Key)>> = vec![BTreeSet::new(); plan.classes().len()];
    let mut replayed = Replayed::default();
    for (index, request) in requests.iter().enumerate() {
        let class = plan.class_of()[request.set];
        let present = &mut classes[class];
        let mut hits = 0;
        for (id, next) in request.experts.iter().zip(&next_use[index]) {
            let key = (request.set, *id);
            // Whoever is present is known by its next use, which is now.
            hits += usize::from(present.remove(&(index, key)));
            present.insert((*next, key));
        }
        while present.len() > plan.classes()[class].slots {
            present.pop_last();
        }
        if index >= skip {
            replayed.add(&sets[request.set], request.experts.len(), hits);
        }
    }
    replayed
}

/// How good guesses would have been.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Guesses {
    /// Experts guessed.
    pub guessed: u64,
    /// Those of them that were asked for.
    pub right: u64,
    /// Experts asked for where there was a guess.
    pub asked: u64,
}

impl Guesses {
    fn add(&mut self, guess: &[u32], asked: &[u32]) {
        if !guess.is_empty() {
            self.guessed += guess.len() as u64;
            self.right += guess.iter().filter(|id| asked.binary_search(id).is_ok()).count() as u64;
            self.asked += asked.len() as u64;
        }
    }

    /// Share of guesses that were right.
    pub fn precision(&self) -> f64 {
        self.right as f64 / self.guessed.max(1) as f64
    }

    /// Share of requests that were guessed.
    pub fn recall(&self) -> f64 {
        self.right as f64 / self.asked.max(1) as f64
    }
}

/// Guesses by the next layer's router, as recorded, and by what each layer asked for one batch before.
pub fn guesses(sets: &[SetShape], requests: &[Request]) -> [Guesses; 2] {
    let mut found = [Guesses::default(); 2];
    let mut last: Vec<&[u32]> = vec![&[]; sets.len()];
    for request in requests {
        found[0].add(&request.guess, &request.experts);
        found[1].add(last[request.set], &request.experts);
        last[request.set] = &request.experts;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampler::random::Random;

    const SHAPE: SetShape = SetShape { experts: 8, expert_bytes: 100, slot_bytes: 4096 };

    fn requests(of: &[(usize, &[u32])]) -> Vec<Request> {
        let request = |(set, experts): &(usize, &[u32])| Request {
            set: *set,
            rows: 1,
            experts: experts.to_vec(),
            tokens: vec![1; experts.len()],
            guess: vec![],
        };
        of.iter().map(request).collect()
    }

    #[test]
    fn known_sequences() {
        let plan = SlotPlan::of_slots(&[SHAPE; 2], 2);
        let sequence: &[(usize, &[u32])] =
            &[(0, &[1]), (0, &[2]), (0, &[3]), (0, &[1]), (1, &[1]), (0, &[2])];
        let requests = requests(sequence);
        let lru = replay(&[SHAPE; 2], &requests, &plan, PolicyKind::Lru, 0);
        assert_eq!(lru, Replayed { asked: 6, hits: 0, bytes_read: 600 });
        // Keeps 1 and 2, as 3 and the other layer's expert are never asked for again.
        let best = replay_optimum(&[SHAPE; 2], &requests, &plan, 0);
        assert_eq!(best, Replayed { asked: 6, hits: 2, bytes_read: 400 });
        assert_eq!(replay_optimum(&[SHAPE; 2], &requests, &plan, 3).asked, 3);
    }

    /// Prompts go through all experts of all layers, again and again, whose numbers say little of when they are next needed.
    #[test]
    fn layers_keep_experts_through_prompts() {
        let (sets, slots) = ([SHAPE; 12], 48);
        let plan = SlotPlan::of_slots(&sets, slots);
        let mut random = Random::new(1);
        let mut layer = |set| Request {
            set,
            rows: 64,
            experts: (0..8).collect(),
            tokens: (0..8).map(|_| (random.next_unit() * 64.0) as u32).collect(),
            guess: vec![],
        };
        let prompts: Vec<Request> = (0..6 * 12).map(|i| layer(i % 12)).collect();
        for policy in ["lru", "lfu:64", "blend"] {
            let hits = replay(&sets, &prompts, &plan, policy.parse().unwrap(), 24).hits;
            // In each of four prompts all slots but those of two layers, which make room for each other.
            assert!(hits >= 4 * (slots as u64 - 2 * 8), "{policy}: {hits}");
        }
    }

    /// Hits of the best choice of victims, by trying all of them.
    fn best_hits(requests: &[Request], present: &[Key], slots: usize) -> u64 {
        let Some((request, rest)) = requests.split_first() else { return 0 };
        let key = (request.set, request.experts[0]);
        if present.contains(&key) {
            return 1 + best_hits(rest, present, slots);
        }
        let mut all = present.to_vec();
        all.push(key);
        if all.len() <= slots {
            return best_hits(rest, &all, slots);
        }
        let without = |i: usize| all.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, k)| *k).collect();
        (0..all.len()).map(|i| best_hits(rest, &without(i) as &Vec<Key>, slots)).max().unwrap_or(0)
    }

    #[test]
    fn no_choice_of_victims_beats_the_optimum() {
        let mut random = Random::new(1);
        let mut below = |n: usize| (random.next_unit() * n as f64) as usize;
        for _ in 0..60 {
            let drawn: Vec<(usize, [u32; 1])> = (0..9).map(|_| (below(2), [below(3) as u32])).collect();
            let requests = requests(&drawn.iter().map(|(s, e)| (*s, &e[..])).collect::<Vec<_>>());
            let slots = 1 + below(3);
            let plan = SlotPlan::of_slots(&[SHAPE; 2], slots);
            let best = replay_optimum(&[SHAPE; 2], &requests, &plan, 0);
            assert_eq!(best.hits, best_hits(&requests, &[], slots), "{requests:?}, {slots} slots");
            for policy in ["lru", "lfu:2", "blend:8:2:0.5"] {
                let hits = replay(&[SHAPE; 2], &requests, &plan, policy.parse().unwrap(), 0).hits;
                assert!(hits <= best.hits, "{policy}");
            }
        }
    }

    #[test]
    fn guesses_are_counted() {
        let mut requests = requests(&[(0, &[1, 2]), (1, &[3]), (0, &[2, 3])]);
        requests[1].guess = vec![3, 4];
        let [router, last] = guesses(&[SHAPE; 2], &requests);
        assert_eq!(router, Guesses { guessed: 2, right: 1, asked: 1 });
        assert_eq!(last, Guesses { guessed: 2, right: 1, asked: 2 });
        assert_eq!((last.precision(), router.recall()), (0.5, 1.0));
    }
}
