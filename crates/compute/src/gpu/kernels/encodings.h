// The encodings of weights: one table for the kernels and, read as text, for `gpu/encodings.rs`, `tools/cuda/build_kernels.py`.
//
// A row: X(name, NAME, code, few, early, tensor, simdgroup)
// - name: ends the names of kernels for the encoding; NAME is its constant
// - code: bits 0..8 of `Format.kind`; what more bits say is part of `Format.kind` too
// - few: whether `few_rows.h` and `few_experts.h` multiply it with activations of eight `bytes`, or `few_rows.h` as `plain`
//   floats; `no` leaves it to `floats.h`, which has kernels for all. Those of `bytes` have pieces in `pieces.h`; of some small
//   weights are floats to `few_rows.h`, which lists them
// - early: whether `cuda/early.cu` copies it ahead
// - tensor: whether products of many rows on tensor cores are compiled for it, with its unpacker of `cuda/unpack.h` or
//   `cuda/unpack_low_bit.h`
// - simdgroup: whether `metal/gemm.h` has kernels of its own for it
// What its bytes mean is in `weights.h`.
#pragma once

// clang-format off
#define ENCODINGS(X) \
    X(f32,          F32,          1,       plain, no,  no,  yes) \
    X(f16,          F16,          2,       plain, no,  yes, yes) \
    X(bf16,         BF16,         3,       plain, no,  yes, yes) \
    X(q4_k,         Q4_K,         9,       bytes, yes, yes, yes) \
    X(q5_k,         Q5_K,         10,      bytes, yes, yes, yes) \
    X(q6_k,         Q6_K,         11,      bytes, yes, yes, yes) \
    X(q8_0,         Q8_0,         6,       bytes, yes, yes, yes) \
    X(q4_0,         Q4_0,         4,       bytes, no,  yes, no) \
    X(q5_0,         Q5_0,         5,       bytes, no,  yes, no) \
    X(mxfp4,        MXFP4,        12,      bytes, no,  yes, yes) \
    X(mxfp4_planes, MXFP4_PLANES, 13,      bytes, no,  yes, yes) \
    X(nvfp4,        NVFP4,        27,      bytes, no,  yes, no) \
    X(affine4,      AFFINE4,      0x4000e, bytes, no,  yes, no) \
    X(affine8,      AFFINE8,      0x8000e, bytes, no,  yes, no) \
    X(affine,       AFFINE,       14,      no,    no,  no,  yes) \
    X(fp8,          FP8,          15,      no,    no,  yes, no) \
    X(q4_1,         Q4_1,         16,      no,    no,  yes, no) \
    X(q5_1,         Q5_1,         17,      no,    no,  yes, no) \
    X(iq4_nl,       IQ4_NL,       18,      bytes, no,  yes, no) \
    X(iq4_xs,       IQ4_XS,       19,      bytes, yes, yes, no) \
    X(q2_k,         Q2_K,         7,       bytes, yes, yes, no) \
    X(q3_k,         Q3_K,         8,       bytes, yes, yes, no) \
    X(iq2_xxs,      IQ2_XXS,      20,      bytes, no,  yes, no) \
    X(iq2_xs,       IQ2_XS,       21,      bytes, no,  yes, no) \
    X(iq2_s,        IQ2_S,        22,      bytes, no,  yes, no) \
    X(iq3_xxs,      IQ3_XXS,      23,      bytes, no,  yes, no) \
    X(iq3_s,        IQ3_S,        24,      bytes, no,  yes, no) \
    X(iq1_s,        IQ1_S,        25,      bytes, no,  yes, no) \
    X(iq1_m,        IQ1_M,        26,      bytes, no,  yes,  no)
// clang-format on

// What follows, if a column says so.
#define IF_BYTES_bytes(...) __VA_ARGS__
#define IF_BYTES_plain(...)
#define IF_BYTES_no(...)
#define IF_PLAIN_bytes(...)
#define IF_PLAIN_plain(...) __VA_ARGS__
#define IF_PLAIN_no(...)
#define IF_yes(...) __VA_ARGS__
#define IF_no(...)
