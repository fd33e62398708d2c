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

CONSTANT uint MAX_KEY_DIM = 512;

struct DeltaConstants {
    uint key_heads, value_heads, key_dim, value_dim;
    // Whether value head h reads key head h % key_heads; else h / (value_heads / key_heads).
    uint tiled;
    float l2_eps;
    // The least logarithm of what is kept of a state, if there is one.
    uint bounded;
    float bound;
};

// What is kept of a state, for A and x = a + dt_bias.
DEVICE float kept_of(const DeltaConstants c, float a, float x) {
    return exp_of(c.bounded ? c.bound * sigmoid(-a * x) : a * softplus(x));
}

struct DeltaBuffers {
    GPTR(const float) q;
    GPTR(const float) k;
    GPTR(const float) v;
    GPTR(const float) a;
    GPTR(const float) b;
    GPTR(const float) decay;
    GPTR(const float) dt_bias;
    GPTR(const Sequence) sequences;
    GPTR(float) state;
    GPTR(float) out;
};

struct DeltaMemory {
    SPTR(float) query;
    SPTR(float) key;
    // Factors of the state's rows, if each has its own.
    SPTR(float) decays;
    SPTR(float) scratch;
};

// The gated delta rule, token by token; a thread does a column of a value head's state (key_dim, value_dim). With
// `channels`, a and dt_bias are (…, value_heads, key_dim): each row of the state decays on its own. Grid:
// (value_dim / threads, value_heads, sequences).
template <bool channels>
DEVICE void delta_rule(CTX, const DeltaConstants c, const DeltaBuffers d, const DeltaMemory m) {
    const uint column = ctx.group_x() * ctx.threads() + ctx.thread(), head = ctx.group_y();
    const Sequence s = d.sequences[ctx.group_z()];
    const uint key_head = c.tiled ? head % c.key_heads : head / (c.value_heads / c.key_heads);
    const bool active = column < c.value_dim;
    const ulong each = (ulong)c.key_dim * c.value_dim, heads = c.value_heads;
    const GPTR(float) old = d.state + ((ulong)s.read * heads + head) * each + column;
    const GPTR(float) held = d.state + ((ulong)s.write * heads + head) * each + column;
    for (uint t = 0; t < s.rows; ++t) {
        const ulong row = s.first_row + t, at = row * heads + head;
        const ulong keys = (row * c.key_heads + key_head) * c.key_dim;
        float q_sum = 0.0f, k_sum = 0.0f;
        for (uint i = ctx.thread(); i < c.key_dim; i += ctx.threads()) {
            q_sum += d.q[keys + i] * d.q[keys + i];
            k_sum += d.k[keys + i] * d.k[keys + i];
        }
        q_sum = group_sum(ctx, q_sum, m.scratch);
        k_sum = group_sum(ctx, k_sum, m.scratch);
        const float q_factor = 1.0f / sqrt_of(q_sum + c.l2_eps) / sqrt_of((float)c.key_dim);
        const float k_factor = 1.0f / sqrt_of(k_sum + c.l2_eps);
        for (uint i = ctx.thread(); i < c.key_dim; i += ctx.threads()) {
            m.query[i] = d.q[keys + i] * q_factor;
            m.key[i] = d.k[keys + i] * k_factor;
            if (!channels) continue;
            const float x = d.a[at * c.key_dim + i] + d.dt_bias[head * c.key_dim + i];
            m.decays[i] = kept_of(c, d.decay[head], x);
        }
        barrier(ctx);
        if (active) {
            const float g = channels ? 1.0f : kept_of(c, d.decay[head], d.a[at] + d.dt_bias[head]);
            const float beta = sigmoid(d.b[at]);
            const bool fresh = t == 0 && s.start == 0;
            const GPTR(float) from = t == 0 ? old : held;
            float recalled = 0.0f;
            for (uint i = 0; i < c.key_dim && !fresh; ++i) {
                recalled += channels ? from[i * c.value_dim] * (float)m.decays[i] * (float)m.key[i]
                                     : from[i * c.value_dim] * (float)m.key[i];
            }
            const float delta = beta * (d.v[at * c.value_dim + column] - g * recalled);
            float sum = 0.0f;
            for (uint i = 0; i < c.key_dim; ++i) {
                const float before = fresh ? 0.0f : (float)from[i * c.value_dim];
                const float now = (channels ? (float)m.decays[i] : g) * before + m.key[i] * delta;
                held[i * c.value_dim] = now;
                sum += now * m.query[i];
            }
            d.out[at * c.value_dim + column] = sum;
        }
        barrier(ctx);
    }
}

#define DELTA_RULE(name, channels)                                                                       \
    KERNEL(name, DeltaConstants, (const float, q), (const float, k), (const float, v), (const float, a), \
           (const float, b), (const float, decay), (const float, dt_bias), (const Sequence, sequences),  \
           (float, state), (float, out)) {                                                               \
        SHARED(float, query, MAX_KEY_DIM);                                                               \
        SHARED(float, key, MAX_KEY_DIM);                                                                 \
        SHARED(float, decays, channels ? MAX_KEY_DIM : 1);                                               \
        SHARED(float, scratch, 32);                                                                      \
        const DeltaBuffers d = {q, k, v, a, b, decay, dt_bias, sequences, state, out};                   \
        const DeltaMemory m = {query, key, decays, scratch};                                             \
        delta_rule<channels>(ctx, c, d, m);                                                              \
    }

DELTA_RULE(gated_delta_rule, false)
DELTA_RULE(channel_delta_rule, true)

// Numbers of a channel's state that a thread holds, and warps of a group.
CONSTANT uint SSM_HELD = 32, SSM_WARPS = 8;

struct SsmConstants {
    // Heads, their channels, groups of heads that share what they write and read, numbers of a channel's state.
    uint heads, head_dim, groups, state_size;
    // Smallest and largest time step.
    float least, most;
};

// Mamba-2's state space model, token by token: see `GraphBuilder::ssm_scan`. x (rows, heads · head_dim); what is written and
// read (rows, groups · state_size); dt (rows, heads); state (slots, heads, state_size, head_dim). A group of 8 warps does 32
// channels of a head: a lane has a channel, a warp a part of its numbers, which stay in registers from token to token. Grid:
// (head_dim / 32, heads, sequences).
KERNEL(ssm_scan, SsmConstants, (const float, x), (const float, written), (const float, read), (const float, dt),
       (const float, a), (const float, d), (const float, dt_bias), (const Sequence, sequences), (float, state),
       (float, out)) {
    SHARED(float, parts, SSM_WARPS * 32);
    const uint column = ctx.group_x() * 32 + ctx.lane(), head = ctx.group_y();
    const Sequence s = sequences[ctx.group_z()];
    const uint each = (c.state_size + SSM_WARPS - 1) / SSM_WARPS, begin = ctx.warp() * each;
    const uint end = begin + each < c.state_size ? begin + each : c.state_size;
    const uint count = begin < end ? end - begin : 0;
    const bool active = column < c.head_dim;
    const ulong size = (ulong)c.state_size * c.head_dim, first = (ulong)begin * c.head_dim + column;
    const GPTR(float) old = state + ((ulong)s.read * c.heads + head) * size + first;
    const GPTR(float) after = state + ((ulong)s.write * c.heads + head) * size + first;
    float held[SSM_HELD];
#pragma unroll
    for (uint i = 0; i < SSM_HELD; ++i)
        held[i] = active && i < count && s.start != 0 ? (float)old[i * c.head_dim] : 0.0f;
    for (uint t = 0; t < s.rows; ++t) {
        const ulong row = s.first_row + t, at = row * c.heads + head;
        const ulong from = (row * c.groups + head / (c.heads / c.groups)) * c.state_size + begin;
        const float raw = softplus(dt[at] + dt_bias[head]), step = raw < c.least ? c.least
                                                                 : raw > c.most  ? c.most
                                                                                 : raw;
        const float decay = exp_of(step * a[head]), own = active ? (float)x[at * c.head_dim + column] : 0.0f;
        float sum = 0.0f;
#pragma unroll
        for (uint i = 0; i < SSM_HELD; ++i) {
            if (i >= count) continue;
            held[i] = decay * held[i] + step * own * written[from + i];
            sum += held[i] * read[from + i];
        }
        parts[ctx.thread()] = sum;
        barrier(ctx);
        if (ctx.warp() == 0 && active) {
            float total = d[head] * own;
            for (uint w = 0; w < SSM_WARPS; ++w) total += parts[w * 32 + ctx.lane()];
            out[at * c.head_dim + column] = total;
        }
        barrier(ctx);
    }
#pragma unroll
    for (uint i = 0; i < SSM_HELD; ++i) {
        if (active && i < count) after[i * c.head_dim] = held[i];
    }
}

// The same where heads have one channel, whose numbers decay each on its own: a (heads, state_size), state (slots, heads,
// state_size). A group of 8 warps does 32 channels. Grid: (heads / 32, 1, sequences).
KERNEL(selective_scan, SsmConstants, (const float, x), (const float, written), (const float, read), (const float, dt),
       (const float, a), (const float, d), (const float, dt_bias), (const Sequence, sequences), (float, state),
       (float, out)) {
    SHARED(float, parts, SSM_WARPS * 32);
    const uint channel = ctx.group_x() * 32 + ctx.lane();
    const Sequence s = sequences[ctx.group_z()];
    const uint each = (c.state_size + SSM_WARPS - 1) / SSM_WARPS, begin = ctx.warp() * each;
    const uint end = begin + each < c.state_size ? begin + each : c.state_size;
    const bool active = channel < c.heads;
    const uint count = active && begin < end ? end - begin : 0;
    const ulong own = (ulong)channel * c.state_size + begin;
    const ulong size = (ulong)c.state_size * c.heads;
    float held[SSM_HELD];
#pragma unroll
    for (uint i = 0; i < SSM_HELD; ++i)
        held[i] = i < count && s.start != 0 ? (float)state[s.read * size + own + i] : 0.0f;
    for (uint t = 0; t < s.rows; ++t) {
        const ulong row = s.first_row + t, at = row * c.heads + channel;
        float sum = 0.0f, input = 0.0f;
        if (active) {
            const ulong from = (row * c.groups + channel / (c.heads / c.groups)) * c.state_size + begin;
            const float raw = softplus(dt[at] + dt_bias[channel]), step = raw < c.least ? c.least
                                                                        : raw > c.most  ? c.most
                                                                                        : raw;
            input = x[at];
#pragma unroll
            for (uint i = 0; i < SSM_HELD; ++i) {
                if (i >= count) continue;
                held[i] = exp_of(step * a[own + i]) * held[i] + step * input * written[from + i];
                sum += held[i] * read[from + i];
            }
        }
        parts[ctx.thread()] = sum;
        barrier(ctx);
        if (ctx.warp() == 0 && active) {
            float total = d[channel] * input;
            for (uint w = 0; w < SSM_WARPS; ++w) total += parts[w * 32 + ctx.lane()];
            out[at] = total;
        }
        barrier(ctx);
    }
#pragma unroll
    for (uint i = 0; i < SSM_HELD; ++i) {
        if (i < count) state[s.write * size + own + i] = held[i];
    }
}
