//! [`Fingerprint`]: what the keys, values and states of a session depend on besides its tokens.
//!
//! Two engines with the same one would have evaluated the same tokens alike. The graph enters as a whole, by its `Debug`
//! text: what is derived forgets no field, and Rust prints every f32 so that it reads back the same. Weights enter by
//! samples, small ones whole, and experts by samples from the disk, which are read when a session is first saved or
//! loaded. The price of the text: renaming a field of an operation makes sessions saved before unreadable.

use std::fmt::Write as _;
use std::sync::OnceLock;

use moeflux_compute::Tensor;
use moeflux_compute::backend::{ActivationMode, KvType};
use moeflux_compute::graph::Graph;
use xxhash_rust::xxh3::Xxh3;

use crate::Result;
use crate::experts::ExpertStore;

/// Bytes of a sample.
const SAMPLE: usize = 4096;
/// Samples of a plane: planes up to so many enter whole.
const SAMPLES: usize = 16;

/// Hashes text while it is printed.
struct HashedText(Xxh3);

impl std::fmt::Write for HashedText {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        self.0.update(text.as_bytes());
        Ok(())
    }
}

/// What contents of sessions depend on, in parts, so that an error can say which is another.
#[derive(Debug)]
pub(crate) struct Fingerprint {
    arithmetic: String,
    weights: String,
    precision: String,
    /// Once it has been asked for.
    experts: OnceLock<String>,
}

impl Fingerprint {
    /// Of `graph` with `weights` on a backend of this description.
    pub(crate) fn new(
        graph: &Graph,
        weights: &[Tensor],
        backend: &str,
        (activations, kv_type): (ActivationMode, KvType),
    ) -> Self {
        let mut text = HashedText(Xxh3::new());
        write!(text, "{graph:?}").expect("hashing does not fail");
        let mut hash = Xxh3::new();
        for weight in weights {
            for plane in 0..weight.dtype().planes() {
                sample(weight.view().plane(plane), &mut hash);
            }
        }
        // Names of hardware and numbers of threads change no bit.
        let backend = backend.split([' ', ',', '(']).next().unwrap_or_default();
        Self {
            arithmetic: hex(&text.0),
            weights: hex(&hash),
            precision: format!("{backend}, {activations:?} activations, {kv_type:?} keys and values"),
            experts: OnceLock::new(),
        }
    }

    /// Of a layer that drafts, beside the model's: its experts are taken on trust, as what they change is no answer.
    pub(crate) fn of_layer(graph: &Graph, weights: &[Tensor]) -> String {
        let mut text = HashedText(Xxh3::new());
        write!(text, "{graph:?}").expect("hashing does not fail");
        for weight in weights {
            (0..weight.dtype().planes()).for_each(|plane| sample(weight.view().plane(plane), &mut text.0));
        }
        hex(&text.0)
    }

    /// Names and values of all parts; the model has the first `sets` expert sets of `store`.
    ///
    /// # Errors
    /// If experts cannot be read.
    pub(crate) fn parts(&self, store: &ExpertStore, sets: usize) -> Result<[(&'static str, &str); 4]> {
        let experts = match self.experts.get() {
            Some(experts) => experts,
            None => {
                let mut hash = Xxh3::new();
                store.sample(SAMPLE, sets, |bytes| hash.update(bytes))?;
                self.experts.get_or_init(|| hex(&hash))
            }
        };
        Ok([
            ("precision", &self.precision),
            ("arithmetic", &self.arithmetic),
            ("weights", &self.weights),
            ("experts", experts),
        ])
    }
}

pub(crate) fn hex(hash: &Xxh3) -> String {
    format!("{:032x}", hash.digest128())
}

/// Hashes all of a small plane, and pieces of a large one from its beginning to its end.
pub(crate) fn sample(plane: &[u8], hash: &mut Xxh3) {
    if plane.len() <= SAMPLE * SAMPLES {
        return hash.update(plane);
    }
    let room = plane.len() - SAMPLE;
    for piece in 0..SAMPLES {
        let at = room / (SAMPLES - 1) * piece;
        hash.update(&plane[at..at + SAMPLE]);
    }
    hash.update(&plane[room..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_are_sampled_from_end_to_end() {
        let of = |plane: &[u8]| {
            let mut hash = Xxh3::new();
            sample(plane, &mut hash);
            hash.digest128()
        };
        for len in [1, SAMPLE, SAMPLE * SAMPLES, SAMPLE * SAMPLES + 1, 3_000_017] {
            let plane = vec![7; len];
            for at in [0, len - 1] {
                let mut other = plane.clone();
                other[at] = 8;
                assert_ne!(of(&plane), of(&other), "{at} of {len}");
            }
        }
        let small = vec![7; SAMPLE * SAMPLES];
        for at in (0..small.len()).step_by(997) {
            let mut other = small.clone();
            other[at] = 8;
            assert_ne!(of(&small), of(&other), "{at}");
        }
    }
}
