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
    fn requests(&self, sets: &[SetShape]) -> Result<Vec<Request>, &'static str> {
        let mut reader = Reader { bytes: &self.bytes };
        let mut requests = vec![];
        while !reader.bytes.is_empty() {
            let set = reader.number()? as usize;
            let shape = sets.get(set).ok_or("a set that the model has")?;
            let rows = reader.number()? as usize;
            let experts = reader.ascending(shape.experts)?;
            let tokens = match rows {
                0 => return Err("rows"),
                1 => vec![1; experts.len()],
                _ => experts.iter().map(|_| reader.number().map(|n| n as u32)).collect::<Result<_, _>>()?,
            };
            let guess = reader.ascending(shape.experts)?;
            requests.push(Request { set, rows, experts, tokens, guess });
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
        Self::decode(&bytes).map_err(|expected| Error::Malformed {
            path: path.into(),
            what: "trace".into(),
            expected: expected.into(),
            got: format!("{} bytes that are not", bytes.len()),
        })
    }

    fn decode(bytes: &[u8]) -> Result<(TraceHeader, Vec<Request>), &'static str> {
        let (content, hash) = bytes.split_last_chunk::<8>().ok_or("a trace file")?;
        let rest = content.strip_prefix(MAGIC).ok_or("a trace file")?;
        if xxhash_rust::xxh3::xxh3_64(content).to_le_bytes() != *hash {
            return Err("a whole and undamaged file");
        }
        let (len, rest) = rest.split_first_chunk::<4>().ok_or("a header")?;
        let (json, rest) = rest.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or("a header")?;
        let header: TraceHeader = serde_json::from_slice(json).map_err(|_| "a header")?;
        let requests = Self { bytes: rest.to_vec() }.requests(&header.sets)?;
        Ok((header, requests))
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
}

impl Reader<'_> {
    fn number(&mut self) -> Result<u64, &'static str> {
        let mut value = 0;
        for shift in (0..63).step_by(7) {
            let (byte, rest) = self.bytes.split_first().ok_or("more numbers")?;
            self.bytes = rest;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err("numbers of at most 63 bits")
    }

    /// As many distinct ids below `limit` as the first number says.
    fn ascending(&mut self, limit: usize) -> Result<Vec<u32>, &'static str> {
        let count = self.number()? as usize;
        if count > limit {
            return Err("at most all experts of a set");
        }
        let mut ids: Vec<u32> = Vec::with_capacity(count);
        for _ in 0..count {
            let id = self.number()?.saturating_add(ids.last().map_or(0, |id| u64::from(*id)));
            if id >= limit as u64 || ids.last().is_some_and(|last| u64::from(*last) == id) {
                return Err("ascending ids of a set's experts");
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
}
