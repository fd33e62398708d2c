// Sums of experts that several devices hold: each has made the outputs of the pairs whose experts it has, and reads the others' in
// their memory.
#include "dialect.h"

// Devices that hold experts, at most, and pairs of a token that are read at once.
CONSTANT uint MOST_DEVICES = 8, READ_PAIRS = 8;

struct SumDividedConstants {
    // Whether pairs count as much as `weights` says; else all the same.
    uint top_k, width, has_residual, weighs;
    // Experts of the layer, of which device e % devices holds expert e, and which of the devices this is.
    uint experts, devices, own;
};

// residual + Σ_k weights[k] · pairs[k] in the router's order → out (tokens, width), an element a thread. part0, part1, …: the
// outputs of pairs (tokens · top_k, width) as each device has made those of its experts. What experts beyond the layer's return is
// in this device's. words: whether a device has been waited for in vain, in the second one; then sums are not numbers. Grid: (tokens,
// width / threads).
KERNEL(sum_divided, SumDividedConstants, (const uint, words), (const uint, ids), (const float, weights), (const float, residual),
       (const float, part0), (const float, part1), (const float, part2), (const float, part3), (const float, part4),
       (const float, part5), (const float, part6), (const float, part7), (float, out)) {
    const uint token = ctx.group_x(), i = ctx.group_y() * ctx.threads() + ctx.thread();
    if (i >= c.width) return;
    float sum = 0.0f;
    for (uint first = 0; first < c.top_k; first += READ_PAIRS) {
        // Reads of other devices' memory are long ones: all begin before the first is waited for.
        float read[READ_PAIRS];
#pragma unroll
        for (uint n = 0; n < READ_PAIRS; ++n) {
            read[n] = 0.0f;
            if (first + n >= c.top_k) continue;
            const ulong pair = (ulong)token * c.top_k + first + n, at = pair * c.width + i;
            const uint expert = ids[pair], holder = expert < c.experts ? expert % c.devices : c.own;
            if (holder == 0) read[n] = part0[at];
            else if (holder == 1) read[n] = part1[at];
            else if (holder == 2) read[n] = part2[at];
            else if (holder == 3) read[n] = part3[at];
            else if (holder == 4) read[n] = part4[at];
            else if (holder == 5) read[n] = part5[at];
            else if (holder == 6) read[n] = part6[at];
            else read[n] = part7[at];
        }
#pragma unroll
        for (uint n = 0; n < READ_PAIRS; ++n) {
            if (first + n >= c.top_k) break;
            const float weight = c.weighs ? (float)weights[(ulong)token * c.top_k + first + n] : 1.0f;
            sum = fma_of(weight, read[n], sum);
        }
    }
    const ulong at = (ulong)token * c.width + i;
    if (c.has_residual) sum += residual[at];
    out[at] = words[1] == 0 ? sum : not_a_number();
}
