//! [`Policy`]: the score of a cached expert, which decides what is evicted.
//!
//! A policy sees every layer's requests in order and gives each of the layer's experts a score; when a slot is needed, the
//! expert with the lowest score that is not in use is evicted. The same code decides in the engine and in the replay of a
//! trace.

use std::str::FromStr;

use crate::{Error, Result};

/// What a batch asks of one layer: experts, and how many of the batch's tokens chose each.
#[derive(Debug, Clone, Copy)]
pub struct Demand<'a> {
    /// Distinct ids, ascending.
    pub experts: &'a [u32],
    /// Tokens that chose each.
    pub tokens: &'a [u32],
    /// Tokens of the batch.
    pub rows: usize,
}

/// A way to say what experts are worth keeping.
pub trait Policy: Send {
    /// A batch asks for experts of `set`; brings `worth`, one number for each expert of the set, up to date. Numbers
    /// of different sets are compared with each other.
    fn asked(&mut self, set: usize, demand: Demand<'_>, worth: &mut [f64]);
}

/// The eviction policies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum PolicyKind {
    /// Least recently used.
    Lru,
    /// Least frequently used: how often tokens chose an expert, where a token counts half as much after `half_life`
    /// tokens.
    Lfu {
        /// In tokens.
        half_life: f64,
    },
    /// Long-term plus short-term frequency: keeps popular experts and those that the current text needs.
    Blend {
        /// Half-life of the long while, in tokens.
        long: f64,
        /// Half-life of the short while, in tokens.
        short: f64,
        /// Part of the short one, 0 to 1.
        part: f64,
    },
}

impl Default for PolicyKind {
    /// Chosen by replaying traces: nearly the best on all of them, where each of the others is far behind on one.
    fn default() -> Self {
        Self::Blend { long: 256.0, short: 8.0, part: 0.3 }
    }
}

impl PolicyKind {
    /// A policy for layers with so many experts each.
    pub fn policy(self, experts: &[usize]) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(Lru { clock: 0.0 }),
            Self::Lfu { half_life } => Box::new(Lfu { frequencies: Frequencies::new(experts, half_life) }),
            Self::Blend { long, short, part } => Box::new(Blend {
                long: Frequencies::new(experts, long),
                short: Frequencies::new(experts, short),
                part,
            }),
        }
    }
}

impl std::fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Lru => write!(f, "lru"),
            Self::Lfu { half_life } => write!(f, "lfu:{half_life}"),
            Self::Blend { long, short, part } => write!(f, "blend:{long}:{short}:{part}"),
        }
    }
}

impl FromStr for PolicyKind {
    type Err = Error;

    /// `lru`, `lfu:HALF_LIFE`, `blend:LONG:SHORT:PART`, or `blend` for the default.
    fn from_str(text: &str) -> Result<Self> {
        let refused = || Error::Option {
            option: "cache_policy",
            expected: "lru, lfu:HALF_LIFE or blend:LONG:SHORT:PART with half-lives in tokens".into(),
            got: text.into(),
        };
        let (name, numbers) = text.split_once(':').unwrap_or((text, ""));
        let numbers = numbers.split(':').filter(|n| !n.is_empty()).map(str::parse::<f64>);
        let numbers: Vec<f64> = numbers.collect::<Result<_, _>>().map_err(|_| refused())?;
        let half_life = |n: f64| (n.is_finite() && n >= 1.0).then_some(n).ok_or_else(refused);
        match (name, &numbers[..]) {
            ("lru", []) => Ok(Self::Lru),
            ("blend", []) => Ok(Self::default()),
            ("lfu", [n]) => Ok(Self::Lfu { half_life: half_life(*n)? }),
            ("blend", [long, short, part]) if (0.0..=1.0).contains(part) => {
                Ok(Self::Blend { long: half_life(*long)?, short: half_life(*short)?, part: *part })
            }
            _ => Err(refused()),
        }
    }
}

struct Lru {
    clock: f64,
}

impl Policy for Lru {
    fn asked(&mut self, _: usize, demand: Demand<'_>, worth: &mut [f64]) {
        self.clock += 1.0;
        demand.experts.iter().for_each(|id| worth[*id as usize] = self.clock);
    }
}

/// How often tokens chose each expert lately, per token.
///
/// Each layer counts its own tokens, so that layers are comparable at any moment: with one clock for all, a layer that
/// has just run would look more popular than one that is about to.
struct Frequencies {
    /// Decayed number of tokens that chose each expert, by set.
    chosen: Vec<Vec<f64>>,
    /// Decayed number of tokens, by set.
    tokens: Vec<f64>,
    half_life: f64,
}

impl Frequencies {
    fn new(experts: &[usize], half_life: f64) -> Self {
        let chosen = experts.iter().map(|n| vec![0.0; *n]).collect();
        Self { chosen, tokens: vec![0.0; experts.len()], half_life }
    }

    /// Counts a batch; returns for each expert how many tokens chose it and of how many.
    fn count(&mut self, set: usize, demand: Demand<'_>) -> (&[f64], f64) {
        let decay = (-(demand.rows as f64) / self.half_life).exp2();
        let (chosen, tokens) = (&mut self.chosen[set], &mut self.tokens[set]);
        chosen.iter_mut().for_each(|n| *n *= decay);
        for (id, n) in demand.experts.iter().zip(demand.tokens) {
            chosen[*id as usize] += f64::from(*n);
        }
        *tokens = *tokens * decay + demand.rows as f64;
        (chosen, *tokens)
    }
}

struct Lfu {
    frequencies: Frequencies,
}

impl Policy for Lfu {
    fn asked(&mut self, set: usize, demand: Demand<'_>, worth: &mut [f64]) {
        let (chosen, tokens) = self.frequencies.count(set, demand);
        worth.iter_mut().zip(chosen).for_each(|(worth, chosen)| *worth = chosen / tokens);
    }
}

struct Blend {
    long: Frequencies,
    short: Frequencies,
    part: f64,
}

impl Policy for Blend {
    fn asked(&mut self, set: usize, demand: Demand<'_>, worth: &mut [f64]) {
        let (chosen, tokens) = self.long.count(set, demand);
        worth.iter_mut().zip(chosen).for_each(|(worth, n)| *worth = (1.0 - self.part) * n / tokens);
        let (chosen, tokens) = self.short.count(set, demand);
        worth.iter_mut().zip(chosen).for_each(|(worth, n)| *worth += self.part * n / tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(kind: PolicyKind, asked: &[&[u32]], order: &[usize]) {
        let mut policy = kind.policy(&[4]);
        let mut worth = [0.0; 4];
        for experts in asked {
            let tokens = vec![1; experts.len()];
            policy.asked(0, Demand { experts, tokens: &tokens, rows: 1 }, &mut worth);
        }
        let mut by_worth = [0, 1, 2, 3];
        by_worth.sort_by(|a, b| worth[*a].total_cmp(&worth[*b]));
        assert_eq!(by_worth, order, "{kind}: {worth:?}");
    }

    #[test]
    fn recency_frequency_and_both() {
        let asked: &[&[u32]] = &[&[0, 1], &[0, 1], &[0, 2], &[3], &[3]];
        check(PolicyKind::Lru, asked, &[1, 0, 2, 3]);
        check(PolicyKind::Lfu { half_life: 1000.0 }, asked, &[2, 1, 3, 0]);
        check(PolicyKind::Lfu { half_life: 1.0 }, asked, &[1, 2, 0, 3]);
        check(PolicyKind::Blend { long: 1000.0, short: 1.0, part: 0.0 }, asked, &[2, 1, 3, 0]);
        check(PolicyKind::Blend { long: 1000.0, short: 1.0, part: 0.5 }, asked, &[2, 1, 0, 3]);
        check(PolicyKind::Blend { long: 1000.0, short: 1.0, part: 0.9 }, asked, &[1, 2, 0, 3]);
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for text in ["lru", "lfu:64", "blend:1024:16:0.25"] {
            assert_eq!(text.parse::<PolicyKind>().unwrap().to_string(), text);
        }
        assert_eq!("blend".parse::<PolicyKind>().unwrap(), PolicyKind::default());
        for text in ["", "LRU", "lru:1", "lfu", "lfu:0", "lfu:x", "lfu:nan", "blend:1:2", "blend:9:9:2"] {
            assert!(text.parse::<PolicyKind>().is_err(), "{text}");
        }
    }
}
