//! Where an executable's time goes: for every kind of work how often it ran, how long it took, and what it read and
//! computed. Weights and cached keys and values count as read, activations do not: they stay in caches.

use std::time::Duration;

/// What a step must at least do, whoever does it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes of weights and caches that it reads.
    pub bytes: u64,
    /// Its multiplications and additions.
    pub flops: u64,
}

/// All steps of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The kind.
    pub name: String,
    /// How many there were.
    pub calls: u64,
    /// Time that passed in them.
    pub time: Duration,
    /// What they did.
    pub work: Work,
}

/// Times by kind of step, in order of first appearance.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Profile {
    entries: Vec<Entry>,
}

impl Profile {
    /// Counts a step.
    pub fn add(&mut self, name: &str, time: Duration, work: Work) {
        self.add_all(name, 1, time, work);
    }

    /// Counts what another counted.
    pub fn merge(&mut self, other: &Self) {
        for entry in &other.entries {
            self.add_all(&entry.name, entry.calls, entry.time, entry.work);
        }
    }

    /// Counts `calls` steps of a kind, which took `time` and did `work` together.
    pub(crate) fn add_all(&mut self, name: &str, calls: u64, time: Duration, work: Work) {
        let index = self.entries.iter().position(|entry| entry.name == name).unwrap_or_else(|| {
            let (calls, time, work) = (0, Duration::ZERO, Work::default());
            self.entries.push(Entry { name: name.to_owned(), calls, time, work });
            self.entries.len() - 1
        });
        let entry = &mut self.entries[index];
        entry.calls += calls;
        entry.time += time;
        entry.work.bytes += work.bytes;
        entry.work.flops += work.flops;
    }

    /// One entry a kind.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Time of all steps.
    pub fn total(&self) -> Duration {
        self.entries.iter().map(|entry| entry.time).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_a_kind_add_up() {
        let mut profile = Profile::default();
        let ms = Duration::from_millis;
        profile.add("a", ms(2), Work { bytes: 3, flops: 5 });
        profile.add("b", ms(1), Work::default());
        profile.add("a", ms(4), Work { bytes: 1, flops: 2 });
        let entry = |name: &str, calls, time, bytes, flops| Entry {
            name: name.to_owned(),
            calls,
            time,
            work: Work { bytes, flops },
        };
        assert_eq!(profile.entries(), [entry("a", 2, ms(6), 4, 7), entry("b", 1, ms(1), 0, 0)]);
        assert_eq!(profile.total(), ms(7));
    }
}
