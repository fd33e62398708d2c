//! [`GpuOptions`]: how device memory is used.

use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// How device memory is used.
#[derive(Debug, Clone, Copy, Default)]
pub struct GpuOptions {
    /// Bytes of device memory for everything; by default what is free, less a margin.
    pub memory: Option<u64>,
    /// Slots for experts, in place of those that memory leaves; in every layer, where host memory keeps all experts.
    pub expert_slots: Option<usize>,
    /// Whether linear layers, routers and experts give a row the same bits in batches of up to 256 rows, whatever else is in
    /// the batch. Batches of more than a few rows are slower then.
    pub batch_invariant: bool,
    /// Whether host memory is another than the device's, and keeps experts that the device has no room for.
    pub host_memory: bool,
    /// What the processor computes of them; nothing by default.
    pub processor: Option<ProcessorShare>,
    /// Whether each of several devices gets layers, even where fewer of them hold the whole model.
    pub spread: bool,
    /// What several devices divide.
    pub split: Split,
}

/// What several devices divide. It changes no bits of a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Split {
    /// Layers: each device has those after the ones of the device before.
    #[default]
    Layers,
    /// The experts of every layer: each device has everything else too, and evaluates every batch.
    Experts,
}

impl FromStr for Split {
    type Err = String;

    /// `layers` or `experts`.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        match text {
            "layers" => Ok(Self::Layers),
            "experts" => Ok(Self::Experts),
            _ => Err(format!("expected layers or experts; got {text:?}")),
        }
    }
}

impl Display for Split {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Layers => "layers",
            Self::Experts => "experts",
        })
    }
}

/// The processor's part in experts that host memory keeps and a batch of few rows misses: what it computes need not come over
/// the bus. It changes no bits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessorShare {
    /// Its threads.
    pub threads: usize,
    /// The part of missing experts that it computes, from 0 to 1; if that is not said, as much as makes batches fastest by what
    /// both sides are measured to take.
    pub part: Option<f32>,
}
