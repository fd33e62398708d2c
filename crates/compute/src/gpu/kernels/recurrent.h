// Operations with a state of fixed size a sequence.
#include "sequences.h"

struct WindowConstants {
    uint channels;
    // Tokens that a result depends on, and tokens from one of these to the next.
    uint taps, dilation;
    // Convolution: whether there is a bias, and whether there is no silu.
    uint has_bias, plain;
};

// x (rows, channels) → out: silu, if not plain, of the causal convolution with weight (channels, taps), plus bias (channels). Grid:
// (channels / threads, rows); `owners` says which sequence a row is of.
KERNEL(causal_conv1d, WindowConstants, (const float, x), (const float, weight), (const float, bias),
       (const float, state), (const Sequence, sequences), (const uint, owners), (float, out)) {
    const uint channel = ctx.group_x() * ctx.threads() + ctx.thread(), row = ctx.group_y();
    if (channel >= c.channels) return;
    const Sequence s = sequences[owners[row]];
    const uint held = (c.taps - 1) * c.dilation;
    float sum = 0.0f;
    for (uint j = 0; j < c.taps; ++j) {
        const uint index = row - s.first_row + j * c.dilation;
        const float v = held_input(x, state, s, c.channels, held, index, channel);
        sum += weight[channel * c.taps + j] * v;
    }
    const float biased = c.has_bias ? sum + bias[channel] : sum;
    out[(ulong)row * c.channels + channel] = c.plain ? biased : silu(biased);
}

// x (rows, channels) → out: the mean of the last `taps` tokens where these are a window that begins at a multiple of
// their number, else zeros. Grid: (channels / threads, rows).
KERNEL(window_mean, WindowConstants, (const float, x), (const float, state), (const Sequence, sequences),
       (const uint, owners), (float, out)) {
    const uint channel = ctx.group_x() * ctx.threads() + ctx.thread(), row = ctx.group_y();
    if (channel >= c.channels) return;
    const Sequence s = sequences[owners[row]];
    const uint own = row - s.first_row;
    float sum = 0.0f;
    for (uint j = 0; j < c.taps && (s.start + own + 1) % c.taps == 0; ++j) {
        sum += held_input(x, state, s, c.channels, c.taps - 1, own + j, channel);
    }
    out[(ulong)row * c.channels + channel] = sum / (float)c.taps;
}

struct PoolConstants {
    // Channels of an entry, tokens of a window, and whether the window before takes part.
    uint width, window, overlap;
};

// For the last token of each window Σ p ⊙ kv over its tokens (with an overlap, also those of the window before), p the
// softmax over them of gate + bias in each channel → out (rows, width); zeros for other tokens. kv, gate (rows, channels),
// where with an overlap a token has channels for the window after its own first; bias (window, channels); the state is kv and gate of the
// tokens before. Grid: (width / threads, rows).
KERNEL(window_pool, PoolConstants, (const float, kv), (const float, gate), (const float, bias), (const float, state),
       (const Sequence, sequences), (const uint, owners), (float, out)) {
    const uint channel = ctx.group_x() * ctx.threads() + ctx.thread(), row = ctx.group_y();
    if (channel >= c.width) return;
    const Sequence s = sequences[owners[row]];
    const uint channels = c.overlap ? 2 * c.width : c.width, held = c.overlap ? 2 * c.window - 1 : c.window - 1;
    const uint own = row - s.first_row, position = s.start + own;
    const ulong to = (ulong)row * c.width + channel;
    if ((position + 1) % c.window != 0) {
        out[to] = 0.0f;
        return;
    }
    // There is no window before the first one.
    const uint skipped = c.overlap && position < c.window ? c.window : 0;
    float best = -infinity(), sum = 0.0f, mixed = 0.0f;
    for (uint i = skipped; i <= held; ++i) {
        const uint of = c.overlap && i >= c.window ? c.width + channel : channel, index = own + i;
        const float weight = bias[i % c.window * channels + of];
        float value = 0.0f, logit = 0.0f;
        if (index >= held) {
            const ulong at = ((ulong)s.first_row + index - held) * channels + of;
            value = kv[at];
            logit = gate[at] + weight;
        } else {
            const ulong at = ((ulong)s.read * held + index) * 2 * channels + of;
            value = state[at];
            logit = state[at + channels] + weight;
        }
        // A logit that is not a number makes all that follows such.
        const float most = logit > best || logit != logit ? logit : best,
                    factor = most == best ? 1.0f : exp_of(best - most);
        const float share = exp_of(logit - most);
        sum = sum * factor + share;
        mixed = mixed * factor + share * value;
        best = most;
    }
    out[to] = mixed / sum;
}

struct CarryConstants {
    // Elements of a row of `a` and of `b`, and rows of the state.
    uint first, second, held;
};

// The state after: the last `held` rows of a and b side by side. Grid: ((first + second) / threads, sequences).
KERNEL(carry, CarryConstants, (const float, a), (const float, b), (const Sequence, sequences), (float, state)) {
    const uint channels = c.first + c.second, channel = ctx.group_x() * ctx.threads() + ctx.thread();
    if (channel >= channels) return;
    const Sequence s = sequences[ctx.group_y()];
    // Ascending, because the slots may be the same: input rows + i is read before it is overwritten.
    for (uint i = 0; i < c.held; ++i) {
        float v = 0.0f;
        const uint index = s.rows + i;
        if (index >= c.held) {
            const ulong row = (ulong)s.first_row + index - c.held;
            v = channel < c.first ? a[row * c.first + channel] : b[row * c.second + channel - c.first];
        } else if (s.start != 0) {
            v = state[((ulong)s.read * c.held + index) * channels + channel];
        }
        state[((ulong)s.write * c.held + i) * channels + channel] = v;
    }
}
