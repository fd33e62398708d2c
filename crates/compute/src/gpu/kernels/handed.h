// Pairs whose experts the processor computes.
#pragma once
#include "fetch.h"

// What `place` writes of them, in words: how many pairs there are, of how many experts, how many come over the bus instead,
// groups that have brought their rows to the processor, when the choice was made, and the pairs.
CONSTANT uint HANDED_PAIRS = 0, HANDED_EXPERTS = 1, HANDED_FETCHED = 2, HANDED_ARRIVED = 3, HANDED_SINCE = 4;
CONSTANT uint HANDED_LIST = 5;
// Shares are known for so many missing experts, and for more.
CONSTANT uint MOST_SHARED = 64;

DEVICE uint handed_pair(uint pair, uint expert) { return pair << 16 | expert; }
