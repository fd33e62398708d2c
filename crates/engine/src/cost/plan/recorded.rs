//! [`Recorded`]: a trace of the planned model, whose hits are replayed instead of assumed.

use std::path::Path;

use super::GUESSED;
use crate::cost::Popularity;
use crate::experts::replay::{guesses, replay};
use crate::experts::slots::SetShape;
use crate::experts::trace::{Request, Trace, TraceHeader};
use crate::experts::{PolicyKind, SlotPlan};
use crate::models::Model;
use crate::{Error, Result};

pub(super) struct Recorded {
    header: TraceHeader,
    requests: Vec<Request>,
    /// Share of misses that the next layer's router guessed.
    pub(super) guessed: f64,
}

impl Recorded {
    /// # Errors
    /// If the file is no trace of this model, or holds no requests.
    pub(super) fn read(path: &Path, model: &Model) -> Result<Self> {
        let (header, requests) = Trace::read(path)?;
        let refuse = |what: &str, expected: String, got: String| {
            Err(Error::Malformed { path: path.to_owned(), what: what.to_owned(), expected, got })
        };
        let described = |sets: &[SetShape]| -> Vec<usize> { sets.iter().map(|set| set.experts).collect() };
        let shapes = model.experts.shapes();
        if described(&header.sets) != described(&shapes) {
            let layers = |sets: usize| format!("{sets} layers with experts");
            let got = format!("a trace of {}, which has {}", header.model, layers(header.sets.len()));
            return refuse("trace", format!("this model's {}", layers(shapes.len())), got);
        }
        if requests.is_empty() {
            return refuse("trace", "requests".to_owned(), "none".to_owned());
        }
        let [router, _] = guesses(&header.sets, &requests);
        let guessed = if router.guessed > 0 { router.recall() } else { GUESSED };
        Ok(Self { header: TraceHeader { sets: shapes, ..header }, requests, guessed })
    }

    /// Hits with the slots of `plan`, after the first quarter of the trace has filled them.
    pub(super) fn popularity(&self, plan: &SlotPlan) -> Popularity {
        let skip = self.requests.len() / 4;
        let replayed = replay(&self.header.sets, &self.requests, plan, PolicyKind::default(), skip);
        Popularity::Measured(replayed.hit_rate())
    }
}
