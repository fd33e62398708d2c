// Which keys a token sees.
#pragma once

// The position of the first one: a window has the last so many positions, a chunk all from a multiple of its size on; 0 for
// none.
DEVICE unsigned first_seen(unsigned position, unsigned window, unsigned chunk) {
    const unsigned oldest = window != 0 && position + 1 > window ? position + 1 - window : 0;
    const unsigned start = chunk != 0 ? position - position % chunk : 0;
    return start > oldest ? start : oldest;
}
