// The gated delta rule, token by token, with states in registers from a batch's first token to its last.
#include "state_columns.h"

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

// Of some tokens: normalised queries and keys, factors of the state's rows if each has its own, and values of the group's
// columns; what each token keeps of a state, and how much of a value it writes.
struct DeltaMemory {
    SPTR(float) queries;
    SPTR(float) keys;
    SPTR(float) decays;
    SPTR(float) values;
    SPTR(float) kept;
    SPTR(float) betas;
};

// What a thread reads of the next tokens while those before are computed.
struct DeltaAhead {
    float q[STATE_BROUGHT], k[STATE_BROUGHT], decays[STATE_BROUGHT], values[STATE_BROUGHT];
    float a, b;
};

// Which sequence, heads and columns a group does.
struct DeltaPlace {
    Sequence s;
    uint head, key_head, first_column;
};

template <uint PARTS, bool CHANNELS>
DEVICE DeltaAhead delta_ahead(CTX, const DeltaConstants c, const DeltaBuffers d, const DeltaPlace at, uint base) {
    typedef StateShape<PARTS> Shape;
    DeltaAhead r;
#pragma unroll
    for (uint n = 0; n < Shape::OF_WARP * Shape::OF_LANE; ++n) {
        const uint t = base + ctx.warp() * Shape::OF_WARP + n / Shape::OF_LANE, i = n % Shape::OF_LANE * 32 + ctx.lane();
        const bool is_there = t < at.s.rows && i < c.key_dim;
        const ulong row = at.s.first_row + t, from = (row * c.key_heads + at.key_head) * c.key_dim + i;
        r.q[n] = is_there ? (float)d.q[from] : 0.0f;
        r.k[n] = is_there ? (float)d.k[from] : 0.0f;
        if (CHANNELS) r.decays[n] = is_there ? (float)d.a[(row * c.value_heads + at.head) * c.key_dim + i] : 0.0f;
    }
#pragma unroll
    for (uint n = 0; n < Shape::VALUES; ++n) {
        const uint own = n * ctx.threads() + ctx.thread(), column = at.first_column + own % Shape::COLUMNS;
        const uint t = own / Shape::COLUMNS;
        const bool is_there = t < Shape::TOKENS && base + t < at.s.rows && column < c.value_dim;
        const ulong row = at.s.first_row + base + t;
        r.values[n] = is_there ? (float)d.v[(row * c.value_heads + at.head) * c.value_dim + column] : 0.0f;
    }
    const uint t = base + ctx.thread();
    const bool is_there = ctx.thread() < Shape::TOKENS && t < at.s.rows;
    const ulong row = ((ulong)at.s.first_row + t) * c.value_heads + at.head;
    r.a = is_there && !CHANNELS ? (float)d.a[row] : 0.0f;
    r.b = is_there ? (float)d.b[row] : 0.0f;
    return r;
}

template <uint PARTS, bool CHANNELS>
DEVICE void enter_delta(CTX, const DeltaConstants c, const DeltaBuffers d, const DeltaPlace at, const DeltaMemory m,
                        const DeltaAhead r) {
    typedef StateShape<PARTS> Shape;
    const float decay = d.decay[at.head];
#pragma unroll
    for (uint u = 0; u < Shape::OF_WARP; ++u) {
        float q_sum = 0.0f, k_sum = 0.0f;
#pragma unroll
        for (uint e = 0; e < Shape::OF_LANE; ++e) {
            const float q = r.q[u * Shape::OF_LANE + e], k = r.k[u * Shape::OF_LANE + e];
            q_sum = fma_of(q, q, q_sum);
            k_sum = fma_of(k, k, k_sum);
        }
        const float q_factor = 1.0f / sqrt_of(lane_sum(ctx, q_sum) + c.l2_eps) / sqrt_of((float)c.key_dim);
        const float k_factor = 1.0f / sqrt_of(lane_sum(ctx, k_sum) + c.l2_eps);
#pragma unroll
        for (uint e = 0; e < Shape::OF_LANE; ++e) {
            const uint n = u * Shape::OF_LANE + e, i = e * 32 + ctx.lane();
            const uint to = (ctx.warp() * Shape::OF_WARP + u) * Shape::ROWS + i;
            m.queries[to] = r.q[n] * q_factor;
            m.keys[to] = r.k[n] * k_factor;
            if (!CHANNELS) continue;
            const float bias = i < c.key_dim ? (float)d.dt_bias[at.head * c.key_dim + i] : 0.0f;
            m.decays[to] = kept_of(c, decay, r.decays[n] + bias);
        }
    }
#pragma unroll
    for (uint n = 0; n < Shape::VALUES; ++n) {
        const uint own = n * ctx.threads() + ctx.thread();
        if (own < Shape::TOKENS * Shape::COLUMNS) m.values[own] = r.values[n];
    }
    if (ctx.thread() >= Shape::TOKENS) return;
    m.kept[ctx.thread()] = CHANNELS ? 1.0f : kept_of(c, decay, r.a + d.dt_bias[at.head]);
    m.betas[ctx.thread()] = sigmoid(r.b);
}

// With CHANNELS, a and dt_bias are (…, value_heads, key_dim): each row of the state decays on its own. States are
// (key_dim, value_dim). Grid: (value_dim / COLUMNS, value_heads, sequences).
template <uint PARTS, bool CHANNELS>
DEVICE void delta_rule(CTX, const DeltaConstants c, const DeltaBuffers d, const DeltaMemory m) {
    typedef StateShape<PARTS> Shape;
    const Sequence s = d.sequences[ctx.group_z()];
    const uint head = ctx.group_y(), part = ctx.thread() % PARTS;
    const uint key_head = c.tiled ? head % c.key_heads : head / (c.value_heads / c.key_heads);
    const DeltaPlace at = {s, head, key_head, ctx.group_x() * Shape::COLUMNS};
    const uint own = ctx.thread() / PARTS * 2, column = at.first_column + own;
    // Columns of a warp end together, so that its lanes stay together.
    const bool is_idle = at.first_column + ctx.warp() * (64 / PARTS) >= c.value_dim;
    const ulong each = (ulong)c.key_dim * c.value_dim;
    const GPTR(const float) old = d.state + ((ulong)s.read * c.value_heads + head) * each + column;
    const GPTR(float) after = d.state + ((ulong)s.write * c.value_heads + head) * each + column;
    const bool has_first = column < c.value_dim, has_second = column + 1 < c.value_dim;
    StateRows first = state_before<PARTS>(s, old, has_first, part, c.key_dim, c.value_dim);
    StateRows second = state_before<PARTS>(s, old + 1, has_second, part, c.key_dim, c.value_dim);
    DeltaAhead ahead = delta_ahead<PARTS, CHANNELS>(ctx, c, d, at, 0);
    for (uint base = 0; base < s.rows; base += Shape::TOKENS) {
        enter_delta<PARTS, CHANNELS>(ctx, c, d, at, m, ahead);
        barrier(ctx);
        if (base + Shape::TOKENS < s.rows) ahead = delta_ahead<PARTS, CHANNELS>(ctx, c, d, at, base + Shape::TOKENS);
        const uint left = s.rows - base, count = left < Shape::TOKENS ? left : Shape::TOKENS;
        for (uint t = 0; t < count && !is_idle; ++t) {
            const StateRows key = state_rows<PARTS>(m.keys, t, part);
            if (CHANNELS) {
                const StateRows decays = state_rows<PARTS>(m.decays, t, part);
#pragma unroll
                for (uint j = 0; j < STATE_ROWS; ++j) {
                    first.of[j] *= decays.of[j];
                    second.of[j] *= decays.of[j];
                }
            } else {
                first = state_kept(first, m.kept[t]);
                second = state_kept(second, m.kept[t]);
            }
            const float beta = m.betas[t], recalled_first = state_dot<PARTS>(ctx, first, key),
                        recalled_second = state_dot<PARTS>(ctx, second, key);
            first = state_written(first, key, beta * (m.values[t * Shape::COLUMNS + own] - recalled_first));
            second = state_written(second, key, beta * (m.values[t * Shape::COLUMNS + own + 1] - recalled_second));
            const StateRows query = state_rows<PARTS>(m.queries, t, part);
            const float result_first = state_dot<PARTS>(ctx, first, query),
                        result_second = state_dot<PARTS>(ctx, second, query);
            const ulong to = (((ulong)s.first_row + base + t) * c.value_heads + head) * c.value_dim + column;
            if (part == 0 && has_first) d.out[to] = result_first;
            if (part == 0 && has_second) d.out[to + 1] = result_second;
        }
        barrier(ctx);
    }
    store_state<PARTS>(first, after, has_first, part, c.key_dim, c.value_dim);
    store_state<PARTS>(second, after + 1, has_second, part, c.key_dim, c.value_dim);
}

#define DELTA_RULE(name, PARTS, CHANNELS)                                                                \
    KERNEL(name, DeltaConstants, (const float, q), (const float, k), (const float, v), (const float, a), \
           (const float, b), (const float, decay), (const float, dt_bias), (const Sequence, sequences),  \
           (float, state), (float, out)) {                                                               \
        constexpr uint ENTRIES = StateShape<PARTS>::TOKENS * StateShape<PARTS>::ROWS;                     \
        SHARED(float, queries, ENTRIES);                                                                 \
        SHARED(float, keys, ENTRIES);                                                                    \
        SHARED(float, decays, CHANNELS ? ENTRIES : 1);                                                   \
        SHARED(float, values, StateShape<PARTS>::TOKENS * StateShape<PARTS>::COLUMNS);                    \
        SHARED(float, kept, StateShape<PARTS>::TOKENS);                                                  \
        SHARED(float, betas, StateShape<PARTS>::TOKENS);                                                 \
        const DeltaBuffers d = {q, k, v, a, b, decay, dt_bias, sequences, state, out};                   \
        const DeltaMemory m = {queries, keys, decays, values, kept, betas};                              \
        delta_rule<PARTS, CHANNELS>(ctx, c, d, m);                                                       \
    }

// By the threads that share a column: keys of up to 32, 128 and 512 channels.
DELTA_RULE(gated_delta_rule_2, 2, false)
DELTA_RULE(gated_delta_rule_8, 8, false)
DELTA_RULE(gated_delta_rule_32, 32, false)
DELTA_RULE(channel_delta_rule_2, 2, true)
DELTA_RULE(channel_delta_rule_8, 8, true)
DELTA_RULE(channel_delta_rule_32, 32, true)
