// Stands in for `cuda/instructions.h`: copies that arrive when they are awaited, and no sooner (see `copies.h`).
#pragma once

#include "../../dialect.h"
#include "../copies.h"

DEVICE bool starts_copies(CTX) { return ctx.lane() == 0; }
DEVICE void expect_copies(ulong* bar, uint count) { emulator::expect_copies(bar, count); }
DEVICE void await_copies(ulong* bar, uint parity = 0) { emulator::await_copies(bar, parity); }
DEVICE void await_copies_of_all(CTX, ulong* bar) {
    barrier(ctx);
    await_copies(bar);
}
DEVICE void expect_bytes(ulong* bar, uint bytes) { emulator::expect_bytes(bar, bytes); }
DEVICE void copy_bulk(CTX, uchar* to, const uchar* from, uint bytes, ulong* bar) {
    emulator::copy_bulk(to, from, bytes, bar);
}

template <uint BYTES>
DEVICE void copy_async(void* to, const void* from) {
    static_assert(BYTES == 8 || BYTES == 16, "what the instruction copies past the nearest cache or by halves");
    emulator::copy_async(to, from, BYTES);
}
DEVICE void await_async() { emulator::await_async(); }

#define ASKED_MEMORY(T, name) T* const name = (T*)emulator::asked_data(#name)
