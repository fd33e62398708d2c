// Mamba-1's state space model.
#include "sequences.h"

// Numbers of a channel's state that a thread holds, and warps of a group.
CONSTANT uint SSM_HELD = 32, SSM_WARPS = 8;

struct SelectiveConstants {
    // Channels, groups of them that share what they write and read, numbers of a channel's state.
    uint channels, groups, state_size;
    // Smallest and largest time step.
    float least, most;
};

// The selective scan, token by token: see `GraphBuilder::ssm_scan`, of heads of one channel whose numbers decay each on its own. x, dt
// (rows, channels); what is written and read (rows, groups · state_size); a (channels, state_size); state (slots, channels,
// state_size). A group of 8 warps does 32 channels: a lane has a channel, a warp a part of its numbers, which stay in registers from
// token to token. Grid: (channels / 32, 1, sequences).
KERNEL(selective_scan, SelectiveConstants, (const float, x), (const float, written), (const float, read), (const float, dt),
       (const float, a), (const float, d), (const float, dt_bias), (const Sequence, sequences), (float, state),
       (float, out)) {
    SHARED(float, parts, SSM_WARPS * 32);
    const uint channel = ctx.group_x() * 32 + ctx.lane();
    const Sequence s = sequences[ctx.group_z()];
    const uint each = (c.state_size + SSM_WARPS - 1) / SSM_WARPS, begin = ctx.warp() * each;
    const uint end = begin + each < c.state_size ? begin + each : c.state_size;
    const bool active = channel < c.channels;
    const uint count = active && begin < end ? end - begin : 0;
    const ulong own = (ulong)channel * c.state_size + begin;
    const ulong size = (ulong)c.state_size * c.channels;
    float held[SSM_HELD];
#pragma unroll
    for (uint i = 0; i < SSM_HELD; ++i)
        held[i] = i < count && s.start != 0 ? (float)state[s.read * size + own + i] : 0.0f;
    for (uint t = 0; t < s.rows; ++t) {
        const ulong row = s.first_row + t, at = row * c.channels + channel;
        float sum = 0.0f, input = 0.0f;
        if (active) {
            const ulong from = (row * c.groups + channel / (c.channels / c.groups)) * c.state_size + begin;
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
