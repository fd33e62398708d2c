//! Lowering of attention over pages of `Q8_0` to kernels that read f16: what a layer's rows see is unpacked before.

use crate::gpu::arguments::UnpackPagesConstants;
use crate::gpu::device::Slice;
use crate::gpu::lower::context::{Launch, Lowering, THREADS};

/// Groups of the kernel that a multiprocessor has at once.
const GROUPS: usize = 8;

impl Lowering<'_> {
    /// Whether keys and values are f16 or can be unpacked to that.
    pub(super) fn reads_f16(&self) -> bool {
        self.f16_cache() || !self.memory.state.unpacked.is_empty()
    }

    /// Caches as f16, of so many elements a page; what the batch's rows see of them, positions of a window and of a chunk, is
    /// unpacked where they are not.
    pub(super) fn in_f16<const CACHES: usize>(
        &mut self,
        caches: [Slice; CACHES],
        elements: usize,
        [window, chunk]: [u32; 2],
    ) -> [Slice; CACHES] {
        if self.f16_cache() {
            return caches;
        }
        let pools = &self.memory.state.unpacked;
        let unpacked: [Slice; CACHES] = std::array::from_fn(|i| pools[i].slice());
        let (from, to) = ([caches[0], caches[CACHES - 1]], [unpacked[0], unpacked[CACHES - 1]]);
        let (sequences, places) = (self.input(self.layout.sequences), self.input(self.layout.places));
        let buffers = [from[0], from[1], sequences, places, self.pages(), to[0], to[1]];
        let constants = &UnpackPagesConstants { elements, window, chunk };
        let launch = Launch { unit: "attention", kernel: "unpack_pages", buffers: &buffers, constants };
        let sequences = self.shape.sequences;
        let groups = (GROUPS * self.memory.info.multiprocessors).div_ceil(CACHES * sequences);
        self.run.push(launch.over([groups, sequences, CACHES], THREADS));
        unpacked
    }
}
