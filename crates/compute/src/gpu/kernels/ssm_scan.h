// Mamba-2's state space model, token by token.
#include "ssm.h"
#include "state_columns.h"

struct SsmConstants {
    // Heads, their channels, groups of heads that share what they write and read, numbers of a channel's state.
    uint heads, head_dim, groups, state_size;
    // Smallest and largest time step.
    float least, most;
};

// Of some tokens: what they write and read, inputs of the group's channels, what is kept of a state, and the time step.
struct SsmMemory {
    SPTR(float) written;
    SPTR(float) read;
    SPTR(float) inputs;
    SPTR(float) kept;
    SPTR(float) steps;
};

// What a thread reads of the next tokens while those before are computed.
struct SsmAhead {
    float written[STATE_BROUGHT], read[STATE_BROUGHT], inputs[STATE_BROUGHT];
    float dt;
};

template <uint PARTS>
DEVICE SsmAhead ssm_ahead(CTX, const SsmConstants c, const SsmBuffers b, const Sequence s, uint head, uint base) {
    typedef StateShape<PARTS> Shape;
    SsmAhead r;
#pragma unroll
    for (uint n = 0; n < Shape::OF_WARP * Shape::OF_LANE; ++n) {
        const uint t = base + ctx.warp() * Shape::OF_WARP + n / Shape::OF_LANE, i = n % Shape::OF_LANE * 32 + ctx.lane();
        const bool is_there = t < s.rows && i < c.state_size;
        const ulong from = (((ulong)s.first_row + t) * c.groups + head / (c.heads / c.groups)) * c.state_size + i;
        r.written[n] = is_there ? (float)b.written[from] : 0.0f;
        r.read[n] = is_there ? (float)b.read[from] : 0.0f;
    }
#pragma unroll
    for (uint n = 0; n < Shape::VALUES; ++n) {
        const uint own = n * ctx.threads() + ctx.thread(), t = own / Shape::COLUMNS;
        const uint column = ctx.group_x() * Shape::COLUMNS + own % Shape::COLUMNS;
        const bool is_there = t < Shape::TOKENS && base + t < s.rows && column < c.head_dim;
        const ulong row = (ulong)s.first_row + base + t;
        r.inputs[n] = is_there ? (float)b.x[(row * c.heads + head) * c.head_dim + column] : 0.0f;
    }
    const uint t = base + ctx.thread();
    const bool is_there = ctx.thread() < Shape::TOKENS && t < s.rows;
    r.dt = is_there ? (float)b.dt[((ulong)s.first_row + t) * c.heads + head] : 0.0f;
    return r;
}

template <uint PARTS>
DEVICE void enter_ssm(CTX, const SsmConstants c, const SsmBuffers b, uint head, const SsmMemory m, const SsmAhead r) {
    typedef StateShape<PARTS> Shape;
#pragma unroll
    for (uint n = 0; n < Shape::OF_WARP * Shape::OF_LANE; ++n) {
        const uint t = ctx.warp() * Shape::OF_WARP + n / Shape::OF_LANE;
        const uint to = t * Shape::ROWS + n % Shape::OF_LANE * 32 + ctx.lane();
        m.written[to] = r.written[n];
        m.read[to] = r.read[n];
    }
#pragma unroll
    for (uint n = 0; n < Shape::VALUES; ++n) {
        const uint own = n * ctx.threads() + ctx.thread();
        if (own < Shape::TOKENS * Shape::COLUMNS) m.inputs[own] = r.inputs[n];
    }
    if (ctx.thread() >= Shape::TOKENS) return;
    const float raw = softplus(r.dt + b.dt_bias[head]), step = raw < c.least ? c.least : raw > c.most ? c.most : raw;
    m.kept[ctx.thread()] = exp_of(step * b.a[head]);
    m.steps[ctx.thread()] = step;
}

// See `GraphBuilder::ssm_scan`. x (rows, heads · head_dim); what is written and read (rows, groups · state_size); dt (rows, heads);
// state (slots, heads, state_size, head_dim). Grid: (head_dim / COLUMNS, heads, sequences).
template <uint PARTS>
DEVICE void ssm_scan(CTX, const SsmConstants c, const SsmBuffers b, const SsmMemory m) {
    typedef StateShape<PARTS> Shape;
    const Sequence s = b.sequences[ctx.group_z()];
    const uint head = ctx.group_y(), part = ctx.thread() % PARTS, first_column = ctx.group_x() * Shape::COLUMNS;
    const uint own = ctx.thread() / PARTS * 2, column = first_column + own;
    // Columns of a warp end together, so that its lanes stay together.
    const bool is_idle = first_column + ctx.warp() * (64 / PARTS) >= c.head_dim;
    const bool has_first = column < c.head_dim, has_second = column + 1 < c.head_dim;
    const ulong size = (ulong)c.state_size * c.head_dim;
    const GPTR(const float) old = b.state + ((ulong)s.read * c.heads + head) * size + column;
    const GPTR(float) after = b.state + ((ulong)s.write * c.heads + head) * size + column;
    StateRows first = state_before<PARTS>(s, old, has_first, part, c.state_size, c.head_dim);
    StateRows second = state_before<PARTS>(s, old + 1, has_second, part, c.state_size, c.head_dim);
    const float through = b.d[head];
    SsmAhead ahead = ssm_ahead<PARTS>(ctx, c, b, s, head, 0);
    for (uint base = 0; base < s.rows; base += Shape::TOKENS) {
        enter_ssm<PARTS>(ctx, c, b, head, m, ahead);
        barrier(ctx);
        if (base + Shape::TOKENS < s.rows) ahead = ssm_ahead<PARTS>(ctx, c, b, s, head, base + Shape::TOKENS);
        const uint left = s.rows - base, count = left < Shape::TOKENS ? left : Shape::TOKENS;
        for (uint t = 0; t < count && !is_idle; ++t) {
            const StateRows written = state_rows<PARTS>(m.written, t, part);
            const float kept = m.kept[t], step = m.steps[t];
            const float input_first = m.inputs[t * Shape::COLUMNS + own], input_second = m.inputs[t * Shape::COLUMNS + own + 1];
            first = state_written(state_kept(first, kept), written, step * input_first);
            second = state_written(state_kept(second, kept), written, step * input_second);
            const StateRows read = state_rows<PARTS>(m.read, t, part);
            const float result_first = state_dot<PARTS>(ctx, first, read), result_second = state_dot<PARTS>(ctx, second, read);
            const ulong to = (((ulong)s.first_row + base + t) * c.heads + head) * c.head_dim + column;
            if (part == 0 && has_first) b.out[to] = fma_of(through, input_first, result_first);
            if (part == 0 && has_second) b.out[to + 1] = fma_of(through, input_second, result_second);
        }
        barrier(ctx);
    }
    store_state<PARTS>(first, after, has_first, part, c.state_size, c.head_dim);
    store_state<PARTS>(second, after + 1, has_second, part, c.state_size, c.head_dim);
}

#define SSM_SCAN(name, PARTS)                                                                                      \
    KERNEL(name, SsmConstants, (const float, x), (const float, written), (const float, read), (const float, dt),   \
           (const float, a), (const float, d), (const float, dt_bias), (const Sequence, sequences), (float, state), \
           (float, out)) {                                                                                         \
        constexpr uint ENTRIES = StateShape<PARTS>::TOKENS * StateShape<PARTS>::ROWS;                              \
        SHARED(float, of_written, ENTRIES);                                                                        \
        SHARED(float, of_read, ENTRIES);                                                                           \
        SHARED(float, inputs, StateShape<PARTS>::TOKENS * StateShape<PARTS>::COLUMNS);                             \
        SHARED(float, kept, StateShape<PARTS>::TOKENS);                                                            \
        SHARED(float, steps, StateShape<PARTS>::TOKENS);                                                           \
        const SsmBuffers b = {x, written, read, dt, a, d, dt_bias, sequences, state, out};                         \
        const SsmMemory m = {of_written, of_read, inputs, kept, steps};                                            \
        ssm_scan<PARTS>(ctx, c, b, m);                                                                             \
    }

// By the threads that share a channel: states of up to 32, 128 and 512 numbers.
SSM_SCAN(ssm_scan_2, 2)
SSM_SCAN(ssm_scan_8, 8)
SSM_SCAN(ssm_scan_32, 32)
