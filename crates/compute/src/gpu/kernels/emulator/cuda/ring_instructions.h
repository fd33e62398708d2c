// Stands in for `cuda/ring_instructions.h`: counters that tell warps what others did before they arrived.
#pragma once
#include "tensor_core.h"

DEVICE void ring_bar(u32 bar, u32 count) { emulator::expect_copies(emulator::at_shared_number(bar), count); }
DEVICE void ring_arrive(u32 bar) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) emulator::arrive(emulator::at_shared_number(bar));
}
DEVICE void ring_wait(u32 bar, u32 phase) { emulator::await_arrivals(emulator::at_shared_number(bar), phase); }
DEVICE void ring_expect(u32 bar, u32 bytes) { emulator::expect_more(emulator::at_shared_number(bar), bytes); }
DEVICE void ring_arrive_with(u32 bar, u32 bytes) { emulator::arrive_with(emulator::at_shared_number(bar), bytes); }
DEVICE u64 ring_once() { return 0; }
DEVICE void ring_copy_bulk(u32 to, const u8* piece, u32 bytes, u32 bar, u64) {
    emulator::copy_bulk(emulator::at_shared_number(to), piece, bytes, emulator::at_shared_number(bar));
}
DEVICE void ring_bars_are_ready() {}
DEVICE void ring_after_previous() { after_previous(); }
