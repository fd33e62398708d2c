//! [`Logits`]: where a batch's logits are.

use super::Growing;
use crate::Result;
use crate::gpu::device::{BufferId, Device};

/// Memory of logits: (outputs, vocab_size), f32.
#[derive(Debug)]
pub(crate) struct Logits {
    /// On the device, for the next token of every sequence.
    near: BufferId,
    near_bytes: usize,
    /// Beside it, for more positions than that. What is free on the device is for pages, so it is in host memory where
    /// that is another.
    far: Option<Growing>,
    /// Which of them the batch uses.
    in_far: bool,
}

impl Logits {
    pub(super) fn new(device: &mut dyn Device, near_bytes: usize) -> Result<Self> {
        Ok(Self { near: device.alloc(near_bytes.max(4))?, near_bytes, far: None, in_far: false })
    }

    /// Makes room for a batch's `bytes`; true if a buffer has moved.
    pub(super) fn reserve(&mut self, device: &mut dyn Device, bytes: usize) -> Result<bool> {
        self.in_far = bytes > self.near_bytes;
        if !self.in_far || self.far.is_some_and(|far| bytes <= far.bytes) {
            return Ok(false);
        }
        if let Some(far) = self.far.take() {
            device.free(far.buffer);
        }
        let unified = device.info().unified;
        let buffer = if unified { device.alloc(bytes)? } else { device.alloc_host(bytes)? };
        self.far = Some(Growing { buffer, bytes });
        Ok(true)
    }

    /// Of the batch that room was made for last.
    pub(crate) fn buffer(&self) -> BufferId {
        match self.far {
            Some(far) if self.in_far => far.buffer,
            _ => self.near,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::emulator::Emulator;

    /// Memory that the budget left free is for pages, and the next token's logits stay near.
    #[test]
    fn logits_of_many_positions_take_nothing_of_the_device() {
        const NEAR: usize = 512;
        let mut device = Emulator::new(3).with_memory(4 * NEAR as u64);
        let mut logits = Logits::new(&mut device, NEAR).unwrap();
        let (near, free) = (logits.buffer(), device.info().free);
        for (bytes, moves) in
            [(NEAR, false), (2 * NEAR, true), (NEAR / 2, false), (3 * NEAR, true), (2 * NEAR, false)]
        {
            assert_eq!(logits.reserve(&mut device, bytes).unwrap(), moves, "{bytes}");
            assert_eq!(logits.buffer() == near, bytes <= NEAR, "{bytes}");
            device.upload(logits.buffer().into(), &vec![1; bytes]).unwrap();
            assert_eq!(device.info().free, free, "{bytes}");
        }
    }
}
