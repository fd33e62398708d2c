// The common dialect of device code: what CUDA C++, Metal Shading Language and the emulator's C++ share.
//
// A kernel is written once:
//
//     struct AddConstants { uint count; };
//
//     KERNEL(add, AddConstants, (const float, a), (const float, b), (float, out)) {
//         const uint i = ctx.group_x() * ctx.threads() + ctx.thread();
//         if (i < c.count) out[i] = a[i] + b[i];
//     }
//
// Rules that keep the text valid everywhere:
// - Buffers come first, then the constants `c`: 32-bit words only, in the order in which the host lists them.
// - Threadgroups are one-dimensional, a multiple of 32 and at most 256 threads: a *warp* is 32 consecutive threads.
// - No buffer that a dispatch writes overlaps another of its buffers.
// - `ctx` gives a thread's place. A function that needs it takes `CTX` as its first parameter.
// - Device memory is GPTR(T), threadgroup memory SPTR(T); SHARED(T, name, count) stands in a kernel's outermost block.
// - No words of Metal as names (thread, kernel, half, device, constant, vertex, sampler, …), and of C++ what C++14 has.
// - No double, no pointers but GPTR and SPTR, no references, no recursion, no virtual functions, no globals but constants.
// - Barriers and lane operations are reached by all threads of the group (of the warp) or by none.
// - A KERNEL begins when the dispatches before it have ended. A KERNEL_AHEAD may begin while the one right before it runs:
//   until it has called `after_previous`, which every thread does, it writes nothing and reads nothing that that one writes.
//   From `writes_apart` on it may write what that one neither reads nor writes.
// - `tally` adds to a counter in threadgroup memory that other threads add to at the same time, `tally_device` to one in device
//   memory, where other groups may, too. Both return what it was before. The sum is there after a barrier, or in the next dispatch.
// - Values reach other threads of a group through threadgroup memory and a barrier, or through lane operations; other
//   groups through device memory and the next dispatch.
#pragma once

// Applies f to (index, item) of up to 16 items.
#define MF_EACH_1(f, a, ...) f(0, a)
#define MF_EACH_2(f, a, b) f(0, a), f(1, b)
#define MF_EACH_3(f, a, b, d) MF_EACH_2(f, a, b), f(2, d)
#define MF_EACH_4(f, a, b, d, e) MF_EACH_3(f, a, b, d), f(3, e)
#define MF_EACH_5(f, a, b, d, e, g) MF_EACH_4(f, a, b, d, e), f(4, g)
#define MF_EACH_6(f, a, b, d, e, g, h) MF_EACH_5(f, a, b, d, e, g), f(5, h)
#define MF_EACH_7(f, a, b, d, e, g, h, i) MF_EACH_6(f, a, b, d, e, g, h), f(6, i)
#define MF_EACH_8(f, a, b, d, e, g, h, i, j) MF_EACH_7(f, a, b, d, e, g, h, i), f(7, j)
#define MF_EACH_9(f, a, b, d, e, g, h, i, j, k) MF_EACH_8(f, a, b, d, e, g, h, i, j), f(8, k)
#define MF_EACH_10(f, a, b, d, e, g, h, i, j, k, l) MF_EACH_9(f, a, b, d, e, g, h, i, j, k), f(9, l)
#define MF_EACH_11(f, a, b, d, e, g, h, i, j, k, l, m) MF_EACH_10(f, a, b, d, e, g, h, i, j, k, l), f(10, m)
#define MF_EACH_12(f, a, b, d, e, g, h, i, j, k, l, m, n) MF_EACH_11(f, a, b, d, e, g, h, i, j, k, l, m), f(11, n)
#define MF_EACH_13(f, a, b, d, e, g, h, i, j, k, l, m, n, o) MF_EACH_12(f, a, b, d, e, g, h, i, j, k, l, m, n), f(12, o)
#define MF_EACH_14(f, a, b, d, e, g, h, i, j, k, l, m, n, o, p) \
    MF_EACH_13(f, a, b, d, e, g, h, i, j, k, l, m, n, o), f(13, p)
#define MF_EACH_15(f, a, b, d, e, g, h, i, j, k, l, m, n, o, p, q) \
    MF_EACH_14(f, a, b, d, e, g, h, i, j, k, l, m, n, o, p), f(14, q)
#define MF_EACH_16(f, a, b, d, e, g, h, i, j, k, l, m, n, o, p, q, r) \
    MF_EACH_15(f, a, b, d, e, g, h, i, j, k, l, m, n, o, p, q), f(15, r)
#define MF_PICK(_1, _2, _3, _4, _5, _6, _7, _8, _9, _10, _11, _12, _13, _14, _15, _16, name, ...) name
#define MF_EACH(f, ...)                                                                                           \
    MF_PICK(__VA_ARGS__, MF_EACH_16, MF_EACH_15, MF_EACH_14, MF_EACH_13, MF_EACH_12, MF_EACH_11, MF_EACH_10,      \
            MF_EACH_9, MF_EACH_8, MF_EACH_7, MF_EACH_6, MF_EACH_5, MF_EACH_4, MF_EACH_3, MF_EACH_2, MF_EACH_1, _) \
    (f, __VA_ARGS__)

#if defined(MOEFLUX_EMULATOR)
#include "emulator/dialect.h"
#elif defined(__METAL_VERSION__)
#include "metal/dialect.h"
#else // CUDA

#include <cuda_fp16.h>

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;

#define DEVICE static __device__ __forceinline__
// What is seldom needed, and would take room where it is inlined.
#define SELDOM static __device__ __noinline__
#define CONSTANT static __device__ constexpr
template <class T>
using pointer = T*;
#define GPTR(T) pointer<T>
#define SPTR(T) pointer<T>
#define SHARED(T, name, count) __shared__ __align__(16) T name[count]
#define CTX const Ctx& ctx

struct Ctx {
    __device__ __forceinline__ uint thread() const { return threadIdx.x; }
    __device__ __forceinline__ uint threads() const { return blockDim.x; }
    __device__ __forceinline__ uint lane() const { return threadIdx.x & 31; }
    __device__ __forceinline__ uint warp() const { return threadIdx.x >> 5; }
    __device__ __forceinline__ uint warps() const { return blockDim.x >> 5; }
    __device__ __forceinline__ uint group_x() const { return blockIdx.x; }
    __device__ __forceinline__ uint group_y() const { return blockIdx.y; }
    __device__ __forceinline__ uint group_z() const { return blockIdx.z; }
    __device__ __forceinline__ uint groups_x() const { return gridDim.x; }
};

#define MF_ARG_(T, name) T* __restrict__ name
#define MF_ARG(index, pair) MF_ARG_ pair
// Programmatic dependent launch, from compute capability 9.0 on: the next dispatch is set up while this one runs. Without
// that launch attribute both instructions do nothing. The next one may come only when the one before this has ended:
// otherwise what that reads could stay in a cache in which this one's results are then looked for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
static __device__ __forceinline__ void after_previous(CTX) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
}
#else
static __device__ __forceinline__ void after_previous(CTX) {}
#endif
DEVICE void writes_apart(CTX) {}

// Groups that should fit on a multiprocessor bound the registers of a thread.
#ifndef GROUPS_AT_ONCE
#define GROUPS_AT_ONCE 2
#endif
#define KERNEL(...) MF_KERNEL(after_previous(ctx), __VA_ARGS__)
#define KERNEL_AHEAD(...) MF_KERNEL((void)0, __VA_ARGS__)
#define MF_KERNEL(first, name, Constants, ...)                                             \
    static __device__ __forceinline__ void name##_body(const Ctx& ctx, const Constants& c, \
                                                       MF_EACH(MF_ARG, __VA_ARGS__));      \
    extern "C" __global__ void __launch_bounds__(256, GROUPS_AT_ONCE)                      \
        name(MF_EACH(MF_ARG, __VA_ARGS__), const __grid_constant__ Constants c) {          \
        const Ctx ctx;                                                                     \
        first;                                                                             \
        name##_body(ctx, c, MF_EACH(MF_NAME, __VA_ARGS__));                                \
    }                                                                                      \
    static __device__ __forceinline__ void name##_body(const Ctx& ctx, const Constants& c, MF_EACH(MF_ARG, __VA_ARGS__))
#define MF_NAME_(T, name) name
#define MF_NAME(index, pair) MF_NAME_ pair

DEVICE void barrier(CTX) { __syncthreads(); }
DEVICE uint tally(SPTR(uint) counter, uint number) { return atomicAdd(counter, number); }
DEVICE uint tally_device(GPTR(uint) counter, uint number) { return atomicAdd(counter, number); }
// Memory that the processor reads and writes at the same time: what was written before `tell` is there when the word is;
// `told` waits until a word is 1, for so many nanoseconds at most, and says whether it is; `peek4` reads what the processor
// wrote before.
DEVICE void publish(CTX) { __threadfence_system(); }
DEVICE void tell(GPTR(uint) word) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(1) : "memory"); }
DEVICE uint nanoseconds() {
    ulong now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return (uint)now;
}
DEVICE bool told(GPTR(const uint) word, uint limit) {
    const uint begin = nanoseconds();
    for (;;) {
        uint now;
        asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(word) : "memory");
        if (now == 1) return true;
        if (nanoseconds() - begin > limit) return false;
    }
}
DEVICE float lane_xor(CTX, float v, uint mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE uint lane_xor(CTX, uint v, uint mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
DEVICE float lane_read(CTX, float v, uint lane) { return __shfl_sync(0xffffffffu, v, lane); }
DEVICE uint lane_read(CTX, uint v, uint lane) { return __shfl_sync(0xffffffffu, v, lane); }

// Largest and smallest value over the lanes of a warp, in every lane.
DEVICE uint lane_max(CTX, uint v) { return __reduce_max_sync(0xffffffffu, v); }
DEVICE uint lane_min(CTX, uint v) { return __reduce_min_sync(0xffffffffu, v); }

// Sum over the lanes of a warp, in every lane.
DEVICE int lane_add(CTX, int v) { return __reduce_add_sync(0xffffffffu, v); }

DEVICE float as_float(uint v) { return __uint_as_float(v); }
DEVICE uint as_uint(float v) { return __float_as_uint(v); }
DEVICE float f16_to_f32(ushort bits) { return __half2float(__ushort_as_half(bits)); }
DEVICE ushort f32_to_f16(float v) { return __half_as_ushort(__float2half_rn(v)); }
// a · b over four signed bytes each, plus sum.
DEVICE int dot4(uint a, uint b, int sum) { return __dp4a((int)a, (int)b, sum); }
// The same with a's bytes unsigned.
DEVICE int dot4_unsigned(uint a, uint b, int sum) {
    int r;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(sum));
    return r;
}

DEVICE float exp_of(float x) { return expf(x); }
DEVICE float exp2_of(float x) { return exp2f(x); }
DEVICE float log1p_of(float x) { return log1pf(x); }
DEVICE float sqrt_of(float x) { return sqrtf(x); }
// 1 / √x within two units in the last place.
DEVICE float inverse_sqrt(float x) { return rsqrtf(x); }
// a / b, rounded.
DEVICE float quotient(float a, float b) { return __fdiv_rn(a, b); }
DEVICE float abs_of(float x) { return fabsf(x); }
DEVICE float round_of(float x) { return rintf(x); }
DEVICE float fma_of(float a, float b, float d) { return fmaf(a, b, d); }
// a · b, rounded: never part of a sum that is rounded once.
DEVICE float product_of(float a, float b) { return __fmul_rn(a, b); }
DEVICE bool is_finite(float x) { return isfinite(x); }
DEVICE float infinity() { return __int_as_float(0x7f800000); }
DEVICE float not_a_number() { return __int_as_float(0x7fc00000); }

// Loads of what no dispatch writes while this one runs; kernels that copy weights to shared memory first load from there.
#ifdef WEIGHTS_IN_SHARED_MEMORY
#define MF_LOAD(p) (*(p))
#else
#define MF_LOAD(p) __ldg(p)
#endif
// Little-endian words at p + offset bytes; the address is a multiple of the word's size.
struct Word4 {
    uint x, y, z, w;
};
DEVICE uint load_u16(GPTR(const uchar) p, uint offset) { return MF_LOAD((const ushort*)(p + offset)); }
DEVICE uint load_u32(GPTR(const uchar) p, uint offset) { return MF_LOAD((const uint*)(p + offset)); }
DEVICE Word4 load_u32x4(GPTR(const uchar) p, uint offset) {
    const uint4 v = MF_LOAD((const uint4*)(p + offset));
    return Word4{v.x, v.y, v.z, v.w};
}
DEVICE void store_u32x4(GPTR(uchar) p, uint offset, Word4 v) { *(uint4*)(p + offset) = make_uint4(v.x, v.y, v.z, v.w); }
DEVICE Word4 peek4(GPTR(const uint) p) {
    Word4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
#define GCAST(T, p) ((T*)(p))
// The sixteen bytes at p + offset, a multiple of 2 (of `load_any` not even that): two aligned loads, and what lies between
// shifted out of them.
DEVICE Word4 load_loose(GPTR(const uchar) p, uint offset) {
    const uint shift = (uint)(ulong)(p + offset) & 15;
    const uint4* const from = (const uint4*)(p + offset - shift);
    const uint4 a = MF_LOAD(from), b = MF_LOAD(from + (shift != 0));
    const bool two = shift & 8, one = shift & 4;
    const uint w0 = two ? a.z : a.x, w1 = two ? a.w : a.y, w2 = two ? b.x : a.z;
    const uint w3 = two ? b.y : a.w, w4 = two ? b.z : b.x, w5 = two ? b.w : b.y;
    const uint v0 = one ? w1 : w0, v1 = one ? w2 : w1, v2 = one ? w3 : w2, v3 = one ? w4 : w3, v4 = one ? w5 : w4;
    const uint by = shift * 8 & 24;
    return Word4{__funnelshift_r(v0, v1, by), __funnelshift_r(v1, v2, by), __funnelshift_r(v2, v3, by),
                 __funnelshift_r(v3, v4, by)};
}
DEVICE Word4 load_any(GPTR(const uchar) p, uint offset) { return load_loose(p, offset); }
// The bytes of high and low that the low three bits of each of the lowest four nibbles name.
DEVICE uint pick(uint low, uint high, uint nibbles) { return __byte_perm(low, high, nibbles & 0x7777); }
// The same of bytes below 128, and 0 for nibbles with their highest bit.
DEVICE uint pick_positive(uint low, uint high, uint nibbles) {
    uint r;
    // A selector's highest bit asks for copies of the byte's sign.
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(low), "r"(high), "r"(nibbles));
    return r;
}
// Starts bringing `bytes` bytes from p on nearer, to a cache that all groups share. One lane of a warp asks for each run.
DEVICE void prefetch(GPTR(const uchar) p, uint bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    const ulong from = (ulong)p & ~15ul;
    const uint size = (uint)((ulong)p - from + bytes + 15) & ~15u;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(size));
#endif
}

// Words index..index + 4 of threadgroup memory; index is a multiple of 4.
DEVICE Word4 load_u32x4(SPTR(const uint) p, uint index) {
    const uint4 v = *(const uint4*)(p + index);
    return Word4{v.x, v.y, v.z, v.w};
}

// Elements index..index + 4 of threadgroup memory; index is a multiple of 4.
struct Float4 {
    float x, y, z, w;
};
DEVICE Float4 load_f32x4(SPTR(const float) p, uint index) {
    const float4 v = *(const float4*)(p + index);
    return Float4{v.x, v.y, v.z, v.w};
}

#endif

struct Float8 {
    float v[8];
};

#define FOR_LANES(mask) for (uint mask = 16; mask > 0; mask >>= 1)

// Sum and maximum over the lanes of a warp, in every lane; the order of additions is fixed.
DEVICE float lane_sum(CTX, float v) {
    FOR_LANES(mask) v += lane_xor(ctx, v, mask);
    return v;
}

DEVICE float lane_max(CTX, float v) {
    FOR_LANES(mask) {
        const float other = lane_xor(ctx, v, mask);
        v = other > v ? other : v;
    }
    return v;
}

// Sum over all threads of a group, in every thread; `scratch` holds one float a warp (up to 32).
DEVICE float group_sum(CTX, float v, SPTR(float) scratch) {
    v = lane_sum(ctx, v);
    if (ctx.lane() == 0) scratch[ctx.warp()] = v;
    barrier(ctx);
    float sum = 0.0f;
    for (uint i = 0; i < ctx.warps(); ++i) sum += scratch[i];
    barrier(ctx);
    return sum;
}

// The same for the maximum.
DEVICE float group_max(CTX, float v, SPTR(float) scratch) {
    v = lane_max(ctx, v);
    if (ctx.lane() == 0) scratch[ctx.warp()] = v;
    barrier(ctx);
    float best = scratch[0];
    for (uint i = 1; i < ctx.warps(); ++i) best = scratch[i] > best ? (float)scratch[i] : best;
    barrier(ctx);
    return best;
}

DEVICE float bf16_to_f32(uint bits) { return as_float(bits << 16); }
// Within ±limit; NaN stays NaN.
DEVICE float clamped(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// eˣ to about one unit in the last place: `exp` of `cpu/vector.rs`, from operations that all machines round alike, so that the
// processor gives the same bits.
DEVICE float exponential(float x) {
    const float most = x < -104.0f ? -104.0f : x, t = most > 89.0f ? 89.0f : most;
    const float n = round_of(product_of(t, 1.44269504f));
    const float r = fma_of(n, 2.1219444e-4f, fma_of(n, -0.6933594f, t));
    float p = fma_of(1.9875691e-4f, r, 1.3982e-3f);
    p = fma_of(p, r, 8.333452e-3f);
    p = fma_of(p, r, 4.16658e-2f);
    p = fma_of(p, r, 0.16666666f);
    p = fma_of(p, r, 0.5f);
    p = fma_of(product_of(p, r), r, r) + 1.0f;
    // 2ⁿ in two factors, as n may lie outside the range of exponents.
    const int whole = (int)n, low = whole >> 1, high = (whole + 1) >> 1;
    return product_of(product_of(p, as_float((uint)(low + 127) << 23)), as_float((uint)(high + 127) << 23));
}

DEVICE float sigmoid(float x) { return quotient(1.0f, 1.0f + exponential(-x)); }
DEVICE float silu(float x) { return quotient(x, 1.0f + exponential(-x)); }
// ln(1 + eˣ), without overflow.
DEVICE float softplus(float x) { return (x > 0.0f ? x : x != x ? x : 0.0f) + log1p_of(exp_of(-abs_of(x))); }
