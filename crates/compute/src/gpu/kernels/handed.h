// Pairs whose experts the processor computes.
#pragma once
#include "fetch.h"

// What `place` writes of them, in words: how many pairs there are, of how many experts, how many come over the bus instead,
// groups that have done their part, when the choice was made, and the pairs.
CONSTANT uint HANDED_PAIRS = 0, HANDED_EXPERTS = 1, HANDED_FETCHED = 2, HANDED_ARRIVED = 3, HANDED_SINCE = 4;
CONSTANT uint HANDED_LIST = 5;
// Shares are known for so many missing experts, and for more.
CONSTANT uint MOST_SHARED = 64;

DEVICE uint handed_pair(uint pair, uint expert) { return pair << 16 | expert; }

// Words of the desk: whether pairs wait for the processor and whether it has computed them, each in a line of its own;
// whether it was waited for in vain; then the number of pairs, the set that their experts are of, and the pairs.
CONSTANT uint DESK_ASKED = 0, DESK_DONE = 64, DESK_LATE = 128, DESK_PAIRS = 192, DESK_SET = 193, DESK_LIST = 194;

// Words of a row on the desk: its bytes, its blocks' scales, its norm's factor, to a multiple of four.
DEVICE uint desk_row_words(uint cols) { return (cols / 4 + cols / 16 + 1 + 3) / 4 * 4; }
