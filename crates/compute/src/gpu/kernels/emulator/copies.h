// Copies to threadgroup memory that are under way while threads do something else. What they bring arrives when a thread that waits
// for them goes on, no sooner: until then nothing may be read or written there.
#pragma once

#include "machine.h"

namespace emulator {

// A counter in threadgroup memory of copies in phases, as `cuda/instructions.h` has it: `count` warps say in each phase how many bytes
// they copy, which must be what they do copy. Waiting is for the phase of a parity, if that has not passed.
void expect_copies(void* bar, uint count);
void expect_bytes(void* bar, uint bytes);
void copy_bulk(void* to, const void* from, uint bytes, void* bar);
void await_copies(void* bar, uint parity);

// The same counter where what warps did before they arrive is to be seen by those that wait: arriving, with all that the warp's lanes did
// before its last barrier; with the number of bytes that the arriving thread is about to copy, and all that it did; bytes that are
// counted beside those of the thread that is to arrive; and waiting.
void arrive(void* bar);
void arrive_with(void* bar, uint bytes);
void expect_more(void* bar, uint bytes);
void await_arrivals(void* bar, uint parity);

// A thread's own copies, and waiting for all of them.
void copy_async(void* to, const void* from, uint bytes);
void await_async();

// The same in groups: what `commit` closes, and waiting until at most so many of a thread's groups are under way. Without an address
// to copy from, zeros. What nothing has written arrives as numbers that are none: products have places for more tokens than there are.
void copy_in_group(void* to, const void* from, uint bytes);
void commit();
void await_groups(uint left);

// What the machine asks for: that a group begins, and what has become of its copies.
void forget_copies();
bool all_copies_awaited();
// Whether what a mark is of has arrived.
bool has_arrived(Mark copied);

} // namespace emulator
