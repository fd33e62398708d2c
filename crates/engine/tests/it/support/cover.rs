//! Which fixtures are enough to see everything of a kind once, for tests that take too long with all.

use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::thread;

use super::{Fixture, all};
use moeflux::checkpoint::Checkpoint;
use moeflux::models;
use moeflux_compute::graph::{Graph, Op, Output, Value};

/// What the graph of a fixture is made of, without sizes.
#[derive(Debug, Clone, Default)]
pub struct Traits {
    /// Operations with what is optional in them, each with the kind of one whose result it takes: devices compute some
    /// together.
    pub operations: Vec<String>,
    /// Operations with the encodings of their weights.
    pub encoded: Vec<String>,
    /// Those of the latter that experts take part in.
    pub experts: Vec<String>,
}

impl Traits {
    fn of(fixture: &Fixture) -> Self {
        let graph = models::record(Arc::new(Checkpoint::open(&fixture.path).unwrap())).unwrap().graph;
        let maker = |value: Value| {
            let node = graph.nodes().iter().find(|node| node.out == Output::Value(value));
            node.map_or("", |node| node.op.kind())
        };
        let mut traits = Self::default();
        for node in graph.nodes() {
            let plain = described(&graph, &node.op, false);
            let takes = node.op.values().into_iter().map(|value| format!("{plain} of {}", maker(value)));
            traits.operations.extend(takes);
            traits.operations.push(plain);
            let encoded = described(&graph, &node.op, true);
            if matches!(node.op, Op::MoeExperts(_)) {
                traits.experts.push(encoded.clone());
            }
            traits.encoded.push(encoded);
        }
        traits
    }
}

/// An operation without its sizes, with or without the encodings of its weights.
fn described(graph: &Graph, op: &Op, encodings: bool) -> String {
    let replace = |text: &str, name: &str, of: &dyn Fn(usize) -> String| {
        let mut parts = text.split(name);
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |text, part| {
            let (index, rest) = part.split_once(')').expect("an id in brackets");
            let index = index.trim().trim_end_matches(',').parse().expect("a number");
            format!("{text}{} {rest}", if encodings { of(index) } else { name.into() })
        })
    };
    let weight = |i: usize| format!("{:?}", graph.weights()[i].matrix.dtype);
    let experts = |i: usize| {
        format!("{:?}", graph.expert_sets()[i].matrices().map(|matrix| matrix.dtype).collect::<Vec<_>>())
    };
    let text = replace(&format!("{op:?}"), "WeightId(", &weight);
    let text = replace(&text, "ExpertSetId(", &experts);
    // Numbers are sizes, and names of encodings.
    let is_word = |word: &&str| !word.starts_with(|c: char| c.is_ascii_digit() || c == '-');
    text.split([' ', ',', '(', ')', '[', ']']).filter(is_word).collect::<Vec<_>>().join(" ")
}

/// Fixtures of these that have among them all that `wanted` names of any of these: next is always the one that adds most
/// for the operations it has.
pub fn cover(
    fixtures: impl IntoIterator<Item = Fixture>,
    wanted: impl Fn(&Traits) -> Vec<String>,
) -> Vec<Fixture> {
    static TRAITS: LazyLock<Vec<(String, Traits)>> = LazyLock::new(|| {
        all().into_iter().map(|fixture| (fixture.name.clone(), Traits::of(&fixture))).collect()
    });
    let mut left: Vec<(Fixture, HashSet<String>, usize)> = fixtures
        .into_iter()
        .map(|fixture| {
            let (_, traits) = TRAITS.iter().find(|(name, _)| *name == fixture.name).expect("one of all");
            (fixture, wanted(traits).into_iter().collect(), traits.encoded.len())
        })
        .collect();
    let mut taken = vec![];
    loop {
        let worth = |index: usize| left[index].1.len() as f64 / left[index].2 as f64;
        // Of equals the first.
        let best = (0..left.len()).rev().max_by(|a, b| worth(*a).total_cmp(&worth(*b)));
        let Some(best) = best.filter(|best| !left[*best].1.is_empty()) else { return taken };
        let (fixture, seen, _) = left.remove(best);
        for (_, adds, _) in &mut left {
            adds.retain(|one| !seen.contains(one));
        }
        taken.push(fixture);
    }
}

/// Checks each, on all cores: a device is emulated by one thread.
pub fn check_each<T: Sync>(all: &[T], check: impl Fn(usize, &T) + Sync) {
    let next = AtomicUsize::new(0);
    let take = || {
        let index = next.fetch_add(1, Ordering::Relaxed);
        all.get(index).map(|one| (index, one))
    };
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| std::iter::from_fn(take).for_each(|(index, one)| check(index, one)));
        }
    });
}
