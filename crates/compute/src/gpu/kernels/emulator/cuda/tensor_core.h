// Stands in for `cuda/tensor_core.h`: products of fragments that a warp makes together, copies that arrive when they are awaited, and
// the rest of CUDA C++ that text of kernels for tensor cores has beside the dialect's.
#pragma once

#include "dialect.h"

#include "emulator/copies.h"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#undef DEVICE
#define DEVICE inline
#define __device__
#define __forceinline__ inline
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// Of the thread that runs the group: see `variables.cpp`.
#define __shared__ thread_local

struct Place3 {
    u32 x, y, z;
};
#define threadIdx (Place3{emulator::own_index(), 0, 0})
#define blockDim (Place3{emulator::threads(), 1, 1})
#define blockIdx (Place3{emulator::group(0), emulator::group(1), emulator::group(2)})
#define gridDim (Place3{emulator::groups(0), emulator::groups(1), emulator::groups(2)})
#define __syncthreads() emulator::wait_for_group(__FILE__, __LINE__)

DEVICE float __shfl_sync(u32, float v, u32 lane) { return as_float(emulator::exchange(as_uint(v), lane)); }
DEVICE u32 __shfl_sync(u32, u32 v, u32 lane) { return emulator::exchange(v, lane); }
DEVICE float __shfl_xor_sync(u32 mask, float v, u32 by) { return __shfl_sync(mask, v, emulator::lane() ^ by); }
DEVICE u32 __shfl_xor_sync(u32 mask, u32 v, u32 by) { return __shfl_sync(mask, v, emulator::lane() ^ by); }
DEVICE u32 __shfl_up_sync(u32 mask, u32 v, u32 by) {
    const u32 lane = emulator::lane();
    return __shfl_sync(mask, v, lane < by ? lane : lane - by);
}
DEVICE u32 atomicAdd(u32* counter, u32 number) { return emulator::tally_at(counter, number); }

DEVICE uint2 make_uint2(u32 x, u32 y) { return UintPair{x, y}; }
DEVICE float2 make_float2(float x, float y) { return Float2{x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return Float4{x, y, z, w}; }
template <class T>
DEVICE T __ldg(const T* p) {
    return *p;
}
DEVICE float __uint_as_float(u32 v) { return as_float(v); }
DEVICE u32 __float_as_uint(float v) { return as_uint(v); }
DEVICE float __expf(float x) { return expf(x); }
DEVICE float rsqrtf(float x) { return inverse_sqrt(x); }
DEVICE u32 __byte_perm(u32 low, u32 high, u32 nibbles) {
    const u64 all = (u64)high << 32 | low;
    u32 r = 0;
    for (u32 i = 0; i < 4; ++i) r |= (u32)(all >> (nibbles >> 4 * i & 7) * 8 & 255) << 8 * i;
    return r;
}

// An f16 as a float, and back from what may have more digits than that has.
DEVICE float low_of(u32 two) { return f16_to_f32((u16)two); }
DEVICE float high_of(u32 two) { return f16_to_f32((u16)(two >> 16)); }
DEVICE u32 h2_rounded(double low, double high) { return emulator::f64_to_f16(low) | (u32)emulator::f64_to_f16(high) << 16; }
DEVICE u32 h2_fma(u32 a, u32 b, u32 c) {
    return h2_rounded((double)low_of(a) * low_of(b) + low_of(c), (double)high_of(a) * high_of(b) + high_of(c));
}
DEVICE u32 h2_mul(u32 a, u32 b) {
    return f32_to_f16(low_of(a) * low_of(b)) | (u32)f32_to_f16(high_of(a) * high_of(b)) << 16;
}
DEVICE u32 h2_sub(u32 a, u32 b) { return h2_rounded((double)low_of(a) - low_of(b), (double)high_of(a) - high_of(b)); }
DEVICE u32 h2_of(float low, float high) { return f32_to_f16(low) | (u32)f32_to_f16(high) << 16; }
DEVICE u32 h2_splat(float x) { return h2_of(x, x); }
DEVICE float f32_of_f16(u32 bits) { return low_of(bits); }
DEVICE float f32_of_bf16(u32 bits) { return as_float(bits << 16); }

DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    emulator::multiply_halves(d, a, b, d, 2);
}

DEVICE u32 __cvta_generic_to_shared(const void* p) { return emulator::shared_number(p); }
DEVICE u32 shared_address(const void* p) { return emulator::shared_number(p); }

// Rows of matrices are where lanes say.
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    for (u32 i = 0; i < 4; ++i) {
        const u32 lane = emulator::lane(), row = emulator::exchange(address, 8 * i + lane / 4);
        r[i] = ((const u32*)emulator::at_shared_number(row))[lane % 4];
    }
}
DEVICE void ldmatrix_x4_transposed(u32 (&r)[4], u32 address) {
    for (u32 i = 0; i < 4; ++i) {
        const u32 lane = emulator::lane(), first = 8 * i + lane % 4 * 2;
        r[i] = 0;
        for (u32 k = 0; k < 2; ++k) {
            const u32 row = emulator::exchange(address, first + k);
            r[i] |= (u32)((const u16*)emulator::at_shared_number(row))[lane / 4] << 16 * k;
        }
    }
}

DEVICE void copy_async_16(u32 to, const void* from, bool present) {
    emulator::copy_in_group(emulator::at_shared_number(to), present ? from : nullptr, 16);
}
DEVICE void copy_async_commit() { emulator::commit(); }
template <int n>
DEVICE void copy_async_wait() {
    emulator::await_groups(n);
}

DEVICE void store_shared_16(u32 to, u32 a, u32 b, u32 c, u32 d) {
    *(uint4*)emulator::at_shared_number(to) = make_uint4(a, b, c, d);
}

DEVICE void after_previous() { emulator::after_previous_of_thread(); }
