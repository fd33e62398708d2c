// Mamba-1's state space model.
#include "ssm.h"

// Warps of a group, and tokens between its barriers: what is done once a token is done by a warp each.
CONSTANT uint SSM_WARPS = 8;

struct SelectiveConstants {
    // Channels, groups of them that share what they write and read, numbers of a channel's state.
    uint channels, groups, state_size;
    // Smallest and largest time step.
    float least, most;
};

struct SelectiveMemory {
    // (tokens, 32 channels): time steps and inputs; (tokens, warps, 32): sums of a warp's numbers.
    SPTR(float) steps;
    SPTR(float) inputs;
    SPTR(float) parts;
};

// A thread holds HELD numbers of a channel's state.
template <uint HELD>
DEVICE void selective_scan(CTX, const SelectiveConstants c, const SsmBuffers b, const SelectiveMemory m) {
    const uint warp = ctx.warp(), lane = ctx.lane(), channel = ctx.group_x() * 32 + lane;
    const Sequence s = b.sequences[ctx.group_z()];
    const uint each = (c.state_size + SSM_WARPS - 1) / SSM_WARPS, begin = warp * each;
    const uint end = begin + each < c.state_size ? begin + each : c.state_size;
    const bool active = channel < c.channels;
    const uint count = active && begin < end ? end - begin : 0;
    const ulong own = (ulong)channel * c.state_size + begin, size = (ulong)c.state_size * c.channels;
    const ulong shared = (active ? channel / (c.channels / c.groups) : 0) * c.state_size + begin;
    float held[HELD], decay[HELD];
#pragma unroll
    for (uint i = 0; i < HELD; ++i) {
        held[i] = i < count && s.start != 0 ? (float)b.state[s.read * size + own + i] : 0.0f;
        decay[i] = i < count ? (float)b.a[own + i] : 0.0f;
    }
    for (uint t = 0; t < s.rows; t += SSM_WARPS) {
        const uint tokens = s.rows - t < SSM_WARPS ? s.rows - t : SSM_WARPS;
        const ulong row = s.first_row + t, mine = (row + warp) * c.channels + channel;
        if (active && warp < tokens) {
            const float raw = softplus(b.dt[mine] + b.dt_bias[channel]);
            m.steps[warp * 32 + lane] = raw < c.least ? c.least : raw > c.most ? c.most : raw;
            m.inputs[warp * 32 + lane] = b.x[mine];
        }
        barrier(ctx);
        for (uint k = 0; active && k < tokens; ++k) {
            const ulong from = (row + k) * c.groups * c.state_size + shared;
            const float step = m.steps[k * 32 + lane], input = m.inputs[k * 32 + lane];
            float sum = 0.0f;
#pragma unroll
            for (uint i = 0; i < HELD; ++i) {
                if (i >= count) continue;
                held[i] = exp_of(step * decay[i]) * held[i] + step * input * b.written[from + i];
                sum += held[i] * b.read[from + i];
            }
            m.parts[(k * SSM_WARPS + warp) * 32 + lane] = sum;
        }
        barrier(ctx);
        if (active && warp < tokens) {
            float total = b.d[channel] * m.inputs[warp * 32 + lane];
            for (uint w = 0; w < SSM_WARPS; ++w) total += m.parts[(warp * SSM_WARPS + w) * 32 + lane];
            b.out[mine] = total;
        }
    }
#pragma unroll
    for (uint i = 0; i < HELD; ++i) {
        if (i < count) b.state[s.write * size + own + i] = held[i];
    }
}

// The selective scan, token by token: see `GraphBuilder::ssm_scan`, of heads of one channel whose numbers decay each on its own. x, dt
// (rows, channels); what is written and read (rows, groups · state_size); a (channels, state_size); state (slots, channels,
// state_size). A group of 8 warps does 32 channels: a lane has a channel, a warp a part of its numbers, which stay in registers from
// token to token. Grid: (channels / 32, 1, sequences).
#define SELECTIVE_SCAN(HELD)                                                                                         \
    KERNEL(selective_scan_##HELD, SelectiveConstants, (const float, x), (const float, written), (const float, read), \
           (const float, dt), (const float, a), (const float, d), (const float, dt_bias),                            \
           (const Sequence, sequences), (float, state), (float, out)) {                                              \
        SHARED(float, steps, SSM_WARPS * 32);                                                                        \
        SHARED(float, inputs, SSM_WARPS * 32);                                                                       \
        SHARED(float, parts, SSM_WARPS * SSM_WARPS * 32);                                                            \
        const SsmBuffers b = {x, written, read, dt, a, d, dt_bias, sequences, state, out};                           \
        const SelectiveMemory m = {steps, inputs, parts};                                                            \
        selective_scan<HELD>(ctx, c, b, m);                                                                          \
    }

// Up to 16 numbers of a channel, and up to 256.
SELECTIVE_SCAN(2)
SELECTIVE_SCAN(32)
