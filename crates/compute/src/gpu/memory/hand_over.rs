//! [`HandOver`]: memory through which a device hands experts over to the processor.

use super::expert_layout::most_chosen;
use super::tiers::words;
use crate::Result;
use crate::gpu::device::{BufferId, Device};
use crate::gpu::processor::{DeskLayout, HandedPair, HandedSet, MOST_PAIRS, MOST_SHARED, RowForm};
use crate::graph::{ExpertSetId, Graph};

/// What hands experts over to the processor: see `kernels/handed.h`.
#[derive(Debug)]
pub(crate) struct HandOver {
    /// Host memory that both sides write.
    pub(crate) desk: BufferId,
    pub(crate) layout: DeskLayout,
    /// Which pairs a batch hands over.
    pub(crate) handed: BufferId,
    /// How many experts, by how many are missing.
    pub(crate) shares: BufferId,
    /// What bringing experts took.
    pub(crate) times: BufferId,
    /// What the processor takes for experts of each set, if it takes any.
    forms: Vec<Option<RowForm>>,
}

/// Words of [`HandOver::handed`] before its list, and sums of [`HandOver::times`]: `TIMES` of `kernels/share.h`.
const HANDED_LIST: usize = 5;
const HANDED_WORDS: usize = HANDED_LIST + MOST_PAIRS;
const TIMES: usize = 8;

impl HandOver {
    /// Bytes of device memory.
    pub(super) const BYTES: usize = 4 * (HANDED_WORDS + MOST_SHARED + 1 + TIMES);

    /// Memory for handing over experts of `sets`; nothing if the processor takes none.
    pub(super) fn new(
        device: &mut dyn Device,
        graph: &Graph,
        sets: &[Option<HandedSet>],
    ) -> Result<Option<Self>> {
        let widths = || sets.iter().flatten().map(HandedSet::widths);
        let (row, width) = (widths().map(|w| w[0]).max(), widths().map(|w| w[1]).max());
        let Some((row, width)) = row.zip(width) else { return Ok(None) };
        let layout = DeskLayout::new(row, width, most_chosen(graph));
        let own = Self {
            desk: device.alloc_host(layout.bytes())?,
            layout,
            handed: device.alloc(HANDED_WORDS * 4)?,
            shares: device.alloc((MOST_SHARED + 1) * 4)?,
            times: device.alloc(TIMES * 4)?,
            forms: sets.iter().map(|set| set.as_ref().map(HandedSet::form)).collect(),
        };
        device.clear(own.handed.into(), HANDED_WORDS * 4)?;
        device.clear(own.shares.into(), (MOST_SHARED + 1) * 4)?;
        device.clear(own.times.into(), TIMES * 4)?;
        Ok(Some(own))
    }

    /// What rows of x the processor takes for experts of a set, if it takes any.
    pub(crate) fn form(&self, set: ExpertSetId) -> Option<RowForm> {
        self.forms[set.0]
    }

    /// Says how many experts the processor computes, by how many are missing.
    pub(crate) fn set_shares(&self, device: &mut dyn Device, shares: &[u32]) -> Result<()> {
        device.upload(self.shares.into(), &words(shares))
    }

    /// Says which pairs the processor has computed, of so many experts.
    pub(crate) fn set_handed(
        &self,
        device: &mut dyn Device,
        pairs: &[HandedPair],
        experts: usize,
    ) -> Result<()> {
        let mut list = vec![pairs.len() as u32, experts as u32, 0, 0, 0];
        list.extend(pairs.iter().map(HandedPair::word));
        device.upload(self.handed.into(), &words(&list))
    }

    /// What bringing experts and waiting for the processor has taken since this was last asked: the sums of
    /// [`HandOver::times`].
    pub(crate) fn take_times(&self, device: &mut dyn Device) -> Result<[f64; TIMES]> {
        let mut bytes = [0; TIMES * 4];
        device.download(self.times.into(), &mut bytes)?;
        device.clear(self.times.into(), TIMES * 4)?;
        let mut sums = [0.0; TIMES];
        for (sum, bytes) in sums.iter_mut().zip(bytes.as_chunks().0) {
            *sum = f64::from(f32::from_le_bytes(*bytes));
        }
        Ok(sums)
    }
}
