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

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;
    use crate::backend::PAGE_TOKENS;
    use crate::gpu::device::Device;
    use crate::gpu::emulator::Emulator;
    use crate::kv_type::Q8Block;

    const ELEMENTS: usize = 2 * PAGE_TOKENS * 32;
    const PAGES: usize = 5;
    /// What is in memory that nothing is written to.
    const LEFT: [u8; 2] = [0x55; 2];

    /// Pages of one cache as they are kept, and as f16.
    fn pages(seed: usize) -> [Vec<u8>; 2] {
        let (mut kept, mut halves) = (vec![], vec![]);
        for block in 0..PAGES * ELEMENTS / Q8Block::LEN {
            let x = std::array::from_fn(|i| ((block * 37 + i * 101 + seed) % 257) as f32 - 128.0);
            let block = Q8Block::of(&x.map(|v| v * 0.01 * (1 + block % 3) as f32));
            let mut elements = [0.0; Q8Block::LEN];
            block.load(&mut elements);
            kept.extend(block.to_bytes());
            halves.extend(elements.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()));
        }
        [kept, halves]
    }

    /// Two sequences in a window of ten: of the second one, the first page is not seen any more.
    #[test]
    fn pages_that_sequences_see_are_unpacked_and_no_others() {
        let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<_>>();
        let inputs = [
            words(&[0, 3, 62, 0, 0, 3, 1, 130, 0, 0]),
            words(&[62, 0, 63, 0, 64, 0, 130, 2]),
            words(&[2, 0, 3, 1, 4]),
        ];
        let ([keys, key_halves], [values, value_halves]) = (pages(1), pages(2));
        for mut device in [Emulator::new(5), Emulator::new(6).metal()] {
            let mut uploaded = |bytes: &[u8]| {
                let buffer = device.alloc(bytes.len()).unwrap();
                device.upload(buffer.into(), bytes).unwrap();
                Slice::from(buffer)
            };
            let left = LEFT.repeat(PAGES * ELEMENTS);
            let [sequences, places, pages] = [0, 1, 2].map(|i| uploaded(&inputs[i]));
            let buffers = [uploaded(&keys), uploaded(&values), sequences, places, pages];
            let to = [uploaded(&left), uploaded(&left)];
            let buffers: Vec<_> = buffers.into_iter().chain(to).collect();
            let constants = &UnpackPagesConstants { elements: ELEMENTS, window: 10, chunk: 0 };
            let launch = Launch { unit: "attention", kernel: "unpack_pages", buffers: &buffers, constants };
            device.run(&[launch.over([3, 2, 2], THREADS)]).unwrap();
            for (to, halves) in to.into_iter().zip([&key_halves, &value_halves]) {
                let mut got = vec![0; left.len()];
                device.download(to, &mut got).unwrap();
                for (page, (got, halves)) in
                    got.chunks(2 * ELEMENTS).zip(halves.chunks(2 * ELEMENTS)).enumerate()
                {
                    let expected = if page == 3 { &left[..2 * ELEMENTS] } else { halves };
                    assert!(got == expected, "page {page}");
                }
            }
        }
    }
}
