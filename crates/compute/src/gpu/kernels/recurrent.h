// Operations with a state of fixed size a sequence. States are (slots, elements), f32.
#include "dialect.h"

// A sequence's rows of the batch.
struct Sequence {
    uint first_row, rows;
    // Position of the first row: at 0 the state before is zeros.
    uint start;
    // State slots: read before, written after.
    uint read, write;
};

struct ConvConstants {
    uint channels, taps, rows;
};

// Input `index`, counted from the oldest that the state holds.
DEVICE float conv_input(GPTR(const float) x, GPTR(const float) state, const Sequence s, uint channels, uint held,
                        uint index, uint channel) {
    if (index >= held) return x[((ulong)s.first_row + index - held) * channels + channel];
    if (s.start == 0) return 0.0f;
    return state[((ulong)s.read * held + index) * channels + channel];
}

// x (rows, channels) → out: silu of the causal convolution with weight (channels, taps). Grid: (channels / threads,
// rows); `owners` says which sequence a row is of.
KERNEL(causal_conv1d, ConvConstants, (const float, x), (const float, weight), (const float, state),
       (const Sequence, sequences), (const uint, owners), (float, out)) {
    const uint channel = ctx.group_x() * ctx.threads() + ctx.thread(), row = ctx.group_y();
    if (channel >= c.channels) return;
    const Sequence s = sequences[owners[row]];
    float sum = 0.0f;
    for (uint j = 0; j < c.taps; ++j) {
        const float v = conv_input(x, state, s, c.channels, c.taps - 1, row - s.first_row + j, channel);
        sum += weight[channel * c.taps + j] * v;
    }
    out[(ulong)row * c.channels + channel] = silu(sum);
}

// The state after: the last taps − 1 inputs. Grid: (channels / threads, sequences).
KERNEL(causal_conv1d_state, ConvConstants, (const float, x), (const Sequence, sequences), (float, state)) {
    const uint channel = ctx.group_x() * ctx.threads() + ctx.thread(), held = c.taps - 1;
    if (channel >= c.channels) return;
    const Sequence s = sequences[ctx.group_y()];
    // Ascending, because the slots may be the same: input rows + i is read before it is overwritten.
    for (uint i = 0; i < held; ++i) {
        float v = 0.0f;
        const uint index = s.rows + i;
        if (index >= held) v = x[((ulong)s.first_row + index - held) * c.channels + channel];
        else if (s.start != 0) v = state[((ulong)s.read * held + index) * c.channels + channel];
        state[((ulong)s.write * held + i) * c.channels + channel] = v;
    }
}

CONSTANT uint MAX_KEY_DIM = 512;

struct DeltaConstants {
    uint key_heads, value_heads, key_dim, value_dim;
    // Whether value head h reads key head h % key_heads; else h / (value_heads / key_heads).
    uint tiled;
    float l2_eps;
};

// The gated delta rule, token by token; a thread does a column of a value head's state (key_dim, value_dim). Grid:
// (value_dim / threads, value_heads, sequences).
KERNEL(gated_delta_rule, DeltaConstants, (const float, q), (const float, k), (const float, v), (const float, a),
       (const float, b), (const float, decay), (const float, dt_bias), (const Sequence, sequences), (float, state),
       (float, out)) {
    SHARED(float, query, MAX_KEY_DIM);
    SHARED(float, key, MAX_KEY_DIM);
    SHARED(float, scratch, 32);
    const uint column = ctx.group_x() * ctx.threads() + ctx.thread(), head = ctx.group_y();
    const Sequence s = sequences[ctx.group_z()];
    const uint key_head = c.tiled ? head % c.key_heads : head / (c.value_heads / c.key_heads);
    const bool active = column < c.value_dim;
    const ulong each = (ulong)c.key_dim * c.value_dim, heads = c.value_heads;
    const GPTR(float) old = state + ((ulong)s.read * heads + head) * each + column;
    const GPTR(float) held = state + ((ulong)s.write * heads + head) * each + column;
    for (uint t = 0; t < s.rows; ++t) {
        const ulong row = s.first_row + t;
        const ulong keys = (row * c.key_heads + key_head) * c.key_dim;
        float q_sum = 0.0f, k_sum = 0.0f;
        for (uint i = ctx.thread(); i < c.key_dim; i += ctx.threads()) {
            q_sum += q[keys + i] * q[keys + i];
            k_sum += k[keys + i] * k[keys + i];
        }
        q_sum = group_sum(ctx, q_sum, scratch);
        k_sum = group_sum(ctx, k_sum, scratch);
        const float q_factor = 1.0f / sqrt_of(q_sum + c.l2_eps) / sqrt_of((float)c.key_dim);
        const float k_factor = 1.0f / sqrt_of(k_sum + c.l2_eps);
        for (uint i = ctx.thread(); i < c.key_dim; i += ctx.threads()) {
            query[i] = q[keys + i] * q_factor;
            key[i] = k[keys + i] * k_factor;
        }
        barrier(ctx);
        if (active) {
            const ulong at = row * heads + head;
            const float x = a[at] + dt_bias[head];
            // ln(1 + eˣ), without overflow.
            const float softplus = (x > 0.0f ? x : x != x ? x : 0.0f) + log1p_of(exp_of(-abs_of(x)));
            const float g = exp_of(decay[head] * softplus), beta = sigmoid(b[at]);
            const bool fresh = t == 0 && s.start == 0;
            const GPTR(float) from = t == 0 ? old : held;
            float recalled = 0.0f;
            for (uint i = 0; i < c.key_dim && !fresh; ++i) recalled += from[i * c.value_dim] * (float)key[i];
            const float delta = beta * (v[at * c.value_dim + column] - g * recalled);
            float sum = 0.0f;
            for (uint i = 0; i < c.key_dim; ++i) {
                const float before = fresh ? 0.0f : (float)from[i * c.value_dim];
                const float now = g * before + key[i] * delta;
                held[i * c.value_dim] = now;
                sum += now * query[i];
            }
            out[at * c.value_dim + column] = sum;
        }
        barrier(ctx);
    }
}
