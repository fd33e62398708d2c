//! [`Held`]: which experts a device holds where several divide those of every layer, and [`Exchange`]: how each finds what the
//! others make.

use crate::Result;
use crate::gpu::device::{BufferId, Device, Slice, View};

/// Devices that hold experts, at most: `MOST_DEVICES` of `kernels/divided.h`.
pub(crate) const MOST_HOLDERS: usize = 8;

/// The experts of every layer that a device holds: of so many devices, those whose id leaves its index as the remainder. Experts
/// of a layer are all as large, so that devices hold as many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) index: usize,
    pub(crate) devices: usize,
}

impl Held {
    /// All of them.
    pub(crate) const ALL: Self = Self { index: 0, devices: 1 };

    /// Whether other devices hold some.
    pub(crate) fn is_part(self) -> bool {
        self.devices > 1
    }

    /// Of a layer with so many experts, the ids of those held.
    pub(crate) fn ids(self, experts: usize) -> impl Iterator<Item = u32> {
        (self.index..experts).step_by(self.devices).map(|id| id as u32)
    }

    /// Of so many experts, how many are held.
    pub(crate) fn count(self, experts: usize) -> usize {
        experts.saturating_sub(self.index).div_ceil(self.devices)
    }
}

/// What devices that hold a part of the experts each read of each other's memory.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) held: Held,
    /// By device, this one's own among them.
    shown: Vec<Shown<BufferId>>,
    /// Of the other devices that are known.
    views: Vec<(usize, Shown<View>)>,
}

/// What a device shows others.
#[derive(Debug, Clone, Copy)]
struct Shown<T> {
    /// Outputs of pairs, (pairs, hidden), f32, for layers by turns: one is read by others while the device writes the other one.
    outputs: [T; 2],
    /// What devices tell each other, as `kernels/cuda/meet.cu` says.
    words: T,
}

/// Bytes of words.
const WORDS: usize = 4 * (MOST_HOLDERS + 1) * 32;
/// Where the words say whether another device was waited for in vain.
const LATE: usize = 4;

impl Exchange {
    /// Bytes of memory for outputs of `outputs` bytes, beside those that a device without others has.
    pub(super) fn bytes(outputs: usize) -> [usize; 2] {
        [outputs, WORDS]
    }

    /// With memory for outputs of `bytes` bytes, of which `first` is there already.
    pub(super) fn new(device: &mut dyn Device, held: Held, first: BufferId, bytes: usize) -> Result<Self> {
        let own = Shown { outputs: [first, device.alloc(bytes)?], words: device.alloc(WORDS)? };
        let mut made = Self { held, shown: vec![own; held.devices], views: vec![] };
        made.forget(device)?;
        Ok(made)
    }

    fn own(&self) -> &Shown<BufferId> {
        &self.shown[self.held.index]
    }

    /// The outputs that this device writes for the `turn`-th layer of experts.
    pub(crate) fn outputs(&self, turn: usize) -> BufferId {
        self.own().outputs[turn % 2]
    }

    /// Those of every device.
    pub(crate) fn all_outputs(&self, turn: usize) -> impl Iterator<Item = BufferId> {
        self.shown.iter().map(move |of| of.outputs[turn % 2])
    }

    /// What this device is told.
    pub(crate) fn words(&self) -> BufferId {
        self.own().words
    }

    /// What every device is told.
    pub(crate) fn all_words(&self) -> impl Iterator<Item = BufferId> {
        self.shown.iter().map(|of| of.words)
    }

    /// Makes what another device shows known, whose outputs are of `bytes` bytes too.
    pub(crate) fn meet(
        &mut self,
        device: &mut dyn Device,
        other: &Self,
        other_device: &mut (dyn Device + 'static),
        bytes: usize,
    ) -> Result<()> {
        let Shown { outputs: [first, second], words } = *other.own();
        let mut view = |buffer, bytes| device.view(other_device, buffer, bytes);
        let outputs = [view(first, bytes)?, view(second, bytes)?];
        let words = view(words, WORDS)?;
        self.shown[other.held.index] = Shown { outputs: outputs.map(|view| view.at), words: words.at };
        self.views.push((other.held.index, Shown { outputs, words }));
        Ok(())
    }

    /// Views of another device's outputs, of which batches of `rows` rows, of at most `most`, write a part.
    pub(crate) fn views(&self, of: usize, [rows, most]: [usize; 2]) -> Vec<View> {
        let part = |view: View| View { bytes: view.bytes / most.max(1) * rows.min(most), ..view };
        let views = self.views.iter().find(|(index, _)| *index == of);
        views.map_or(vec![], |(_, views)| views.outputs.map(part).to_vec())
    }

    /// Whether another device was waited for in vain.
    pub(crate) fn late(&self, device: &mut dyn Device) -> Result<bool> {
        let mut word = [0; 4];
        device.download(Slice::from(self.words()).at(LATE), &mut word)?;
        Ok(word != [0; 4])
    }

    /// Forgets what devices have told each other, none of which runs anything.
    pub(crate) fn forget(&mut self, device: &mut dyn Device) -> Result<()> {
        device.clear(self.words().into(), WORDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_expert_is_held_once_and_devices_hold_as_many() {
        for (experts, devices) in [(8, 2), (7, 2), (128, 3), (2, 4), (1, 8)] {
            let parts = (0..devices).map(|index| Held { index, devices });
            let mut all: Vec<u32> = parts.clone().flat_map(|held| held.ids(experts)).collect();
            all.sort_unstable();
            assert_eq!(all, (0..experts as u32).collect::<Vec<_>>());
            let counts: Vec<usize> = parts.clone().map(|held| held.count(experts)).collect();
            assert_eq!(counts, parts.map(|held| held.ids(experts).count()).collect::<Vec<_>>());
            assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1);
        }
    }
}
