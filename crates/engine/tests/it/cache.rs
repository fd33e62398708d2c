//! The cache of experts by itself: what is guessed, and what devices give back to it.

use moeflux::experts::{CacheStats, ExpertCache};
use moeflux::io::pread::PreadPool;
use moeflux_compute::backend::ExpertSource;
use moeflux_compute::graph::ExpertSetId;

use crate::support::expert_cache;

const FIRST: ExpertSetId = ExpertSetId(0);
const SECOND: ExpertSetId = ExpertSetId(1);

fn of_slots(slots: usize) -> ExpertCache {
    expert_cache("hf/qwen3_moe_basic", slots, Box::new(PreadPool::new(1).unwrap()))
}

/// Statistics of a batch that asks for `experts`.
fn ask(cache: &mut ExpertCache, set: ExpertSetId, experts: &[u32]) -> CacheStats {
    cache.take_stats();
    let mut seen = 0;
    cache.announce(set, experts).unwrap();
    cache.visit(set, experts, &mut |views| seen += views.len()).unwrap();
    assert_eq!(seen, experts.len());
    cache.take_stats()
}

/// What is likely and there is not evicted for what is likely and not there.
#[test]
fn a_guess_keeps_what_it_names() {
    let mut cache = of_slots(4);
    ask(&mut cache, SECOND, &[3]);
    ask(&mut cache, FIRST, &[0, 1, 2]);
    // Every slot is taken, and (1, 3) was used least recently.
    cache.forecast(SECOND, &[3, 4]);
    assert_eq!(cache.take_stats().prefetches, 1);
    let stats = ask(&mut cache, SECOND, &[3, 4]);
    assert!(
        stats.bytes_read == 0 && stats.misses == stats.late,
        "both were there or on their way: {stats:?}"
    );
}

#[test]
fn what_was_read_ahead_is_counted_once() {
    let mut cache = of_slots(4);
    cache.forecast(FIRST, &[2]);
    ask(&mut cache, FIRST, &[2]);
    cache.forecast(SECOND, &[1, 2]);
    ask(&mut cache, FIRST, &[2]);
    let first = ask(&mut cache, SECOND, &[1, 2]);
    // What came before the first visit had ended is a hit like any other.
    assert!(first.prefetch_hits <= first.hits, "{first:?}");
    let again = ask(&mut cache, SECOND, &[1, 2]);
    assert!(again.hits == 2 && again.prefetch_hits == 0, "{again:?}");
}

/// A device chooses an expert that it holds.
fn choose(cache: &mut ExpertCache, expert: u32) {
    cache.announce_missing(FIRST, &[expert], &[]).unwrap();
    cache.visit(FIRST, &[], &mut |_| ()).unwrap();
}

/// Whether the host keeps an expert that a device gives up.
fn is_kept(cache: &mut ExpertCache, expert: u32) -> bool {
    let mut fill = |planes: &mut [&mut [u8]]| {
        planes.iter_mut().for_each(|plane| plane.fill(0));
        Ok(())
    };
    cache.give(FIRST, expert, &mut fill).unwrap()
}

#[test]
fn what_devices_give_up_is_kept_if_it_is_worth_more_than_what_is_there() {
    let mut cache = of_slots(2);
    choose(&mut cache, 4);
    ask(&mut cache, FIRST, &[0, 1]);
    assert!(!is_kept(&mut cache, 4), "used before what is there");
    for expert in [2, 3, 5] {
        choose(&mut cache, expert);
    }
    assert!(is_kept(&mut cache, 2) && is_kept(&mut cache, 3));
    // Copies to slots may be under way until they are said to have arrived: nobody gets the slots before.
    choose(&mut cache, 5);
    assert!(!is_kept(&mut cache, 5));
    cache.arrived();
    assert!(is_kept(&mut cache, 5), "used after what is there");
}
