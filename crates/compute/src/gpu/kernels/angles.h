// What rotary embedding turns pairs of channels by.
#include "dialect.h"

#if defined(__METAL_VERSION__)
DEVICE float sine_of(float x) { return precise::sin(x); }
DEVICE float cosine_of(float x) { return precise::cos(x); }
#else
DEVICE float sine_of(float x) { return sinf(x); }
DEVICE float cosine_of(float x) { return cosf(x); }
#endif

struct AnglesConstants {
    uint rows, pairs;
    // Positions count from the start of the window of so many tokens that they are in.
    uint stride;
    // Factor on cosines and sines.
    float magnitude;
};

// positions (rows, 3), of three axes, and pairs (pairs, 2), the bits of a frequency and an axis → out (rows, pairs, 2): cosine and
// sine.
KERNEL(angles, AnglesConstants, (const uint, positions), (const uint, pairs), (float, out)) {
    const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
    if (i >= c.rows * c.pairs) return;
    const uint row = i / c.pairs, pair = i % c.pairs;
    const uint position = positions[3 * row + pairs[2 * pair + 1]];
    const float angle = product_of((float)(position - position % c.stride), as_float(pairs[2 * pair]));
    out[2 * i] = product_of(cosine_of(angle), c.magnitude);
    out[2 * i + 1] = product_of(sine_of(angle), c.magnitude);
}
