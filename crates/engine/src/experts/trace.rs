//! [`Trace`]: the experts that a model's routers chose, and its file format.
//!
//! The file: `MOEFLUXT`, a little-endian u32 and as many bytes of JSON ([`TraceHeader`]), then requests, each a
//! sequence of LEB128 numbers: set, rows, number of experts, ascending ids as differences, tokens of each if rows are
//! more than one, number of guessed experts, and their ids as differences. The last eight bytes are the XXH3 hash of all
//! others. A token takes about 12 bytes per layer.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::slots::SetShape;
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"MOEFLUXT";
/// Most experts of a set: what a request costs a replay grows with them, whatever the file's size.
const MAX_EXPERTS: usize = 4096;
/// Most experts of all sets.
const MAX_EXPERTS_OF_ALL: u64 = 1 << 20;
/// Most bytes of an expert, and of memory for all but experts: sums over all sets stay far below 2^64.
const MAX_BYTES: u64 = 1 << 40;

/// What is wrong with a file: where, what is expected there, and what was found.
#[derive(Debug, PartialEq)]
struct Fault {
    what: String,
    expected: String,
    got: String,
}

impl Fault {
    fn new(what: impl Into<String>, expected: impl Into<String>, got: impl ToString) -> Self {
        Self { what: what.into(), expected: expected.into(), got: got.to_string() }
    }
}

/// Passes `got` on if it is at most `most`.
fn at_most(what: impl Into<String>, most: u64, got: u64) -> Result<u64, Fault> {
    if got > most {
        return Err(Fault::new(what, format!("at most {most}"), got));
    }
    Ok(got)
}

/// A layer's request for experts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Index of the layer's expert set.
    pub set: usize,
    /// Tokens of the batch.
    pub rows: usize,
    /// Distinct ids, ascending.
    pub experts: Vec<u32>,
    /// Tokens that chose each.
    pub tokens: Vec<u32>,
    /// What the router of this layer chose on the hidden state of the layer before, ascending; empty without a guess.
    pub guess: Vec<u32>,
}

/// What a replay has to know of the model and the machine.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct TraceHeader {
    /// Where the model was.
    pub model: String,
    /// Every layer's experts.
    pub sets: Vec<SetShape>,
    /// Most experts that a token needs in a layer.
    pub top_k: usize,
    /// Bytes of memory for all but experts.
    pub needs: u64,
    /// Seconds of computing that a generated token took, without waiting for reads.
    pub compute_seconds: f64,
    /// Bytes a second that experts were read with; 0 if nothing was read.
    pub bandwidth: f64,
}

impl TraceHeader {
    /// Refuses numbers that no model and machine have: a file is not more memory or time than its size is worth.
    fn check(&self) -> Result<(), Fault> {
        for (index, set) in self.sets.iter().enumerate() {
            let key = |name: &str| format!("header sets[{index}].{name}");
            at_most(key("experts"), MAX_EXPERTS as u64, set.experts as u64)?;
            at_most(key("slot_bytes"), MAX_BYTES, set.slot_bytes as u64)?;
            at_most(key("expert_bytes"), MAX_BYTES, set.expert_bytes)?;
        }
        let experts = self.sets.iter().map(|set| set.experts as u64).sum();
        at_most("header experts of all sets", MAX_EXPERTS_OF_ALL, experts)?;
        at_most("header top_k", MAX_EXPERTS as u64, self.top_k as u64)?;
        at_most("header needs", MAX_BYTES, self.needs)?;
        for (key, number) in [("compute_seconds", self.compute_seconds), ("bandwidth", self.bandwidth)] {
            if !(number.is_finite() && number >= 0.0) {
                return Err(Fault::new(format!("header {key}"), "a number that is not negative", number));
            }
        }
        Ok(())
    }
}

/// Requests in the order in which they were made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Trace {
    bytes: Vec<u8>,
}

impl Trace {
    /// Appends a request.
    pub fn push(&mut self, request: Request) {
        let Request { set, rows, experts, tokens, guess } = request;
        for number in [set, rows, experts.len()] {
            self.number(number as u64);
        }
        self.ascending(&experts);
        if rows > 1 {
            tokens.iter().for_each(|n| self.number(u64::from(*n)));
        }
        self.number(guess.len() as u64);
        self.ascending(&guess);
    }

    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
    }

    fn ascending(&mut self, ids: &[u32]) {
        let mut last = 0;
        for id in ids {
            self.number(u64::from(id - last));
            last = *id;
        }
    }

    /// All requests.
    ///
    /// # Errors
    /// What is wrong, if they do not fit `sets`.
    fn requests(&self, sets: &[SetShape]) -> Result<Vec<Request>, Fault> {
        let mut reader = Reader { bytes: &self.bytes };
        let mut requests = vec![];
        while !reader.bytes.is_empty() {
            let set = reader.number()?;
            let shape = usize::try_from(set).ok().and_then(|set| sets.get(set)).ok_or_else(|| {
                Fault::new("request's set", format!("one of the header's {}", sets.len()), set)
            })?;
            let rows = at_most("request's rows", u64::from(u32::MAX), reader.number()?)? as usize;
            let experts = reader.ascending(shape.experts)?;
            let tokens = match rows {
                0 => return Err(Fault::new("request's rows", "at least one", 0)),
                1 => vec![1; experts.len()],
                _ => experts.iter().map(|_| reader.token_count()).collect::<Result<_, _>>()?,
            };
            let guess = reader.ascending(shape.experts)?;
            requests.push(Request { set: set as usize, rows, experts, tokens, guess });
        }
        Ok(requests)
    }

    /// The content of a file that holds this trace.
    pub fn encode(&self, header: &TraceHeader) -> Vec<u8> {
        let json = serde_json::to_vec(header).expect("a header of numbers and text");
        let mut out = MAGIC.to_vec();
        out.extend((json.len() as u32).to_le_bytes());
        out.extend(json);
        out.extend(&self.bytes);
        out.extend(xxhash_rust::xxh3::xxh3_64(&out).to_le_bytes());
        out
    }

    /// Reads a trace file.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Malformed`] if it is not a whole trace.
    pub fn read(path: &Path) -> Result<(TraceHeader, Vec<Request>)> {
        let bytes =
            std::fs::read(path).map_err(|source| Error::Io { action: "read", path: path.into(), source })?;
        Self::decode(&bytes).map_err(|Fault { what, expected, got }| Error::Malformed {
            path: path.into(),
            what: format!("trace: {what}"),
            expected,
            got,
        })
    }

    fn decode(bytes: &[u8]) -> Result<(TraceHeader, Vec<Request>), Fault> {
        let size = || format!("{} bytes", bytes.len());
        let no_trace = || Fault::new("file", "a trace, which begins with MOEFLUXT", size());
        let (content, hash) = bytes.split_last_chunk::<8>().ok_or_else(no_trace)?;
        let rest = content.strip_prefix(MAGIC).ok_or_else(no_trace)?;
        let found = xxhash_rust::xxh3::xxh3_64(content);
        let said = u64::from_le_bytes(*hash);
        if found != said {
            return Err(Fault::new(
                "checksum",
                format!("{said:016x}"),
                format!("{found:016x}: it is damaged"),
            ));
        }
        let cut = || Fault::new("header", "as many bytes as the file says", size());
        let (len, rest) = rest.split_first_chunk::<4>().ok_or_else(cut)?;
        let (json, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or_else(cut)?;
        let header: TraceHeader = serde_json::from_slice(json)
            .map_err(|error| Fault::new("header", "model, sets, top_k and what else a trace has", error))?;
        header.check()?;
        let requests = Self { bytes: rest.to_vec() }.requests(&header.sets)?;
        Ok((header, requests))
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn number(&mut self) -> Result<u64, Fault> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let Some((byte, rest)) = self.bytes.split_first() else {
                return Err(Fault::new("requests", "more numbers", "the file's end"));
            };
            self.bytes = rest;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(Fault::new("requests", "numbers of at most 63 bits", "a longer one"))
    }

    /// Tokens that chose an expert.
    fn token_count(&mut self) -> Result<u32, Fault> {
        Ok(at_most("request's tokens", u64::from(u32::MAX), self.number()?)? as u32)
    }

    /// As many distinct ids below `limit` as the first number says.
    fn ascending(&mut self, limit: usize) -> Result<Vec<u32>, Fault> {
        let count = at_most("request's number of experts", limit as u64, self.number()?)? as usize;
        let mut ids: Vec<u32> = Vec::with_capacity(count);
        for _ in 0..count {
            let id = self.number()?.saturating_add(ids.last().map_or(0, |id| u64::from(*id)));
            if id >= limit as u64 || ids.last().is_some_and(|last| u64::from(*last) == id) {
                return Err(Fault::new("request's experts", format!("ascending ids below {limit}"), id));
            }
            ids.push(id as u32);
        }
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> (TraceHeader, Vec<Request>) {
        let shape = SetShape { experts: 300, expert_bytes: 10, slot_bytes: 4096 };
        let header = TraceHeader {
            model: "m".into(),
            sets: vec![shape; 2],
            top_k: 2,
            needs: 5,
            compute_seconds: 0.25,
            bandwidth: 1e9,
        };
        let request = |set, rows, experts: &[u32], tokens: &[u32], guess: &[u32]| Request {
            set,
            rows,
            experts: experts.into(),
            tokens: tokens.into(),
            guess: guess.into(),
        };
        let requests = vec![
            request(0, 7, &[0, 1, 299], &[7, 200, 1], &[]),
            request(1, 1, &[5, 130], &[1, 1], &[5, 6]),
            request(0, 1, &[], &[], &[0]),
        ];
        (header, requests)
    }

    fn encoded() -> Vec<u8> {
        let (header, requests) = sample();
        let mut trace = Trace::default();
        requests.into_iter().for_each(|request| trace.push(request));
        trace.encode(&header)
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Trace::decode(&encoded()).unwrap(), sample());
    }

    #[test]
    fn damage_is_noticed_and_never_panics() {
        let whole = encoded();
        for len in 0..whole.len() {
            assert!(Trace::decode(&whole[..len]).is_err(), "{len} bytes");
        }
        for at in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x40;
            assert!(Trace::decode(&damaged).is_err(), "byte {at}");
            // With a hash that fits the damage, the content is checked.
            let content = damaged.len() - 8;
            let hash = xxhash_rust::xxh3::xxh3_64(&damaged[..content]).to_le_bytes();
            damaged[content..].copy_from_slice(&hash);
            let _ = Trace::decode(&damaged);
        }
    }

    /// Files whose hash is right and whose numbers are not: each is refused by name, at no cost.
    #[test]
    fn numbers_that_no_model_has_are_refused() {
        let refused = |what: &str, change: &dyn Fn(&mut TraceHeader)| {
            let (mut header, requests) = sample();
            change(&mut header);
            let mut trace = Trace::default();
            requests.into_iter().for_each(|request| trace.push(request));
            let fault = Trace::decode(&trace.encode(&header)).expect_err(what);
            assert_eq!(fault.what, format!("header {what}"));
        };
        for experts in [MAX_EXPERTS + 1, 16_000_000, 1 << 32, 1 << 63] {
            refused("sets[1].experts", &|header| header.sets[1].experts = experts);
        }
        for bytes in [MAX_BYTES + 1, u64::MAX] {
            refused("sets[0].expert_bytes", &|header| header.sets[0].expert_bytes = bytes);
            refused("sets[0].slot_bytes", &|header| header.sets[0].slot_bytes = bytes as usize);
            refused("needs", &|header| header.needs = bytes);
        }
        refused("top_k", &|header| header.top_k = usize::MAX);
        refused("compute_seconds", &|header| header.compute_seconds = -1.0);
        refused("bandwidth", &|header| header.bandwidth = -1.0);
        refused("experts of all sets", &|header| header.sets = vec![header.sets[0]; 1 << 12]);
    }

    #[test]
    fn requests_beyond_their_types_are_refused() {
        let (header, _) = sample();
        let refused = |what: &str, numbers: &[u64]| {
            let mut trace = Trace::default();
            numbers.iter().for_each(|n| trace.number(*n));
            assert_eq!(Trace::decode(&trace.encode(&header)).unwrap_err().what, what, "{numbers:?}");
        };
        refused("request's set", &[2, 1, 0, 0]);
        refused("request's set", &[1 << 62, 1, 0, 0]);
        refused("request's rows", &[0, 0, 0, 0]);
        refused("request's rows", &[0, 1 << 32, 0, 0]);
        refused("request's number of experts", &[0, 1, 301]);
        refused("request's number of experts", &[0, 1, 1 << 62]);
        refused("request's experts", &[0, 1, 1, 300, 0]);
        refused("request's experts", &[0, 1, 2, 7, 0, 0]);
        refused("request's tokens", &[0, 2, 1, 7, 1 << 32, 0]);
        refused("requests", &[0, 1]);
    }
}
