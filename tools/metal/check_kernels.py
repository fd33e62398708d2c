#!/usr/bin/env python3
"""Checks with clang that the kernels' text is Metal's: address spaces above all.

    python3 -m venv .venv && .venv/bin/pip install -r tools/metal/requirements.txt
    .venv/bin/python tools/metal/check_kernels.py

Metal's own compiler exists for macOS and Windows only. This is clang with C++ for OpenCL, which has the same address
spaces with the same rules (no conversion between them, threadgroup memory in kernels only) under other names, and a
small stand-in for Metal's standard library. On top of that every pointer and reference must name its address space,
which Metal asks for and OpenCL does not. A kernel's constants are checked as if in device memory: OpenCL, unlike Metal,
does not copy structs from constant memory.
"""

import re
import sys
from pathlib import Path

import clang.cindex as clang

KERNELS = Path(__file__).resolve().parents[2] / "crates/compute/src/gpu/kernels"
STAND_IN = r"""
#define device __global
#define constant __constant
#define threadgroup __local
// Words of Metal that OpenCL does not have: as names they are errors.
#define vertex typedef
#define fragment typedef
#define sampler typedef
#define bfloat typedef
#define visible typedef
#define stitchable typedef
#define object_data typedef
#define ray_data typedef
// A word of OpenCL that Metal does not have.
#define local local_
#pragma OPENCL EXTENSION __cl_clang_non_portable_kernel_param_types : enable
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
namespace metal {
struct uint3 { uint x, y, z; };
struct mem_flags { enum flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 }; };
void threadgroup_barrier(int flags);
template <class To, class From> To as_type(From from);
template <class T> T simd_shuffle(T v, ushort lane);
template <class T> T simd_shuffle_xor(T v, ushort mask);
// OpenCL has words like these of its own.
#define atomic_uint metal_atomic_uint
#define memory_order_relaxed 0
#define atomic_fetch_add_explicit metal_atomic_fetch_add
typedef uint atomic_uint;
uint atomic_fetch_add_explicit(device atomic_uint* to, uint v, int order);
uint atomic_fetch_add_explicit(threadgroup atomic_uint* to, uint v, int order);
struct simdgroup_float8x8 { float own[2]; };
template <class T, int size> simdgroup_float8x8 make_filled_simdgroup_matrix(T v);
void simdgroup_load(__private simdgroup_float8x8& to, const device float* from, ulong line);
void simdgroup_load(__private simdgroup_float8x8& to, const threadgroup float* from, ulong line);
void simdgroup_store(simdgroup_float8x8 from, device float* to, ulong line);
void simdgroup_store(simdgroup_float8x8 from, threadgroup float* to, ulong line);
void simdgroup_multiply_accumulate(__private simdgroup_float8x8& to, simdgroup_float8x8 a, simdgroup_float8x8 b,
                                   simdgroup_float8x8 sum);
float fabs(float x);
float rint(float x);
float fma(float a, float b, float d);
namespace precise {
float exp(float x);
float exp2(float x);
float log(float x);
float sqrt(float x);
float sin(float x);
float cos(float x);
}
}
"""
ARGUMENTS = [
    "-x", "cl", "-cl-std=clc++2021", "-target", "spir64-unknown-unknown", "-Wall", "-Werror=all", "-Wno-unused-function",
    "-Wno-unused-const-variable", "-Wno-unknown-attributes", "-Wno-ignored-attributes", "-D__METAL_VERSION__=300",
    "-DMF_KERNEL=kernel void", "-DMF_REGISTER(...)=", "-DMF_CONSTANTS(T)=const device T&", "-DSHARED(T,name,count)=threadgroup T name[count]",
    "-I", str(KERNELS), "-I", "/stand-in",
]
# Of the target: device, constant and threadgroup memory.
SPACES = {1, 2, 3}


def complaints(text: str) -> list[str]:
    files = [("/stand-in/metal_stdlib", STAND_IN), ("/stand-in/opencl-c-base.h", ""), ("/stand-in/unit.cl", text)]
    unit = clang.Index.create().parse("/stand-in/unit.cl", args=ARGUMENTS, unsaved_files=files)
    found = [str(d) for d in unit.diagnostics if d.severity >= clang.Diagnostic.Warning]
    for node in unit.cursor.walk_preorder():
        if node.location.file is None or node.location.file.name.endswith("metal_stdlib"):
            continue
        kind = node.type.get_canonical().kind
        if kind in (clang.TypeKind.POINTER, clang.TypeKind.LVALUEREFERENCE, clang.TypeKind.RVALUEREFERENCE):
            named = node.kind in (clang.CursorKind.PARM_DECL, clang.CursorKind.VAR_DECL, clang.CursorKind.FIELD_DECL)
            if named and node.type.get_canonical().get_pointee().get_address_space() not in SPACES:
                found.append(f"{node.location.file}:{node.location.line}: {node.spelling} has no address space")
    # With brackets it is a method's name: see `metal/dialect.h`.
    names = re.search(r"\bthread\b(?!\()", re.sub(r"//.*", "", text))
    return found + (["thread is no name"] if names else [])


def main() -> None:
    listed = re.search(r"units!\[(.*?)\]", (KERNELS / "mod.rs").read_text(), re.S)
    units = re.findall(r'"(\w+)"', listed.group(1)) + ["metal/gemm"] if listed else []
    # What must be refused, so that silence means something.
    faults = {
        "a pointer without an address space": "DEVICE float f(const float* p) { return *p; }",
        "a conversion between address spaces": "DEVICE float f(SPTR(float) p) { GPTR(float) q = p; return *q; }",
        "threadgroup memory outside of a kernel": "DEVICE void f(CTX) { SHARED(float, x, 4); x[0] = 1.0f; }",
        "a reserved name": "DEVICE float f(float half) { return half; }",
        "a word of Metal": "DEVICE uint f(uint sampler) { return sampler; }",
        "the word thread as a name": "DEVICE uint f(uint thread) { return thread; }",
    }
    failed = [f"not noticed: {what}" for what, text in faults.items()
              if not complaints(f'#include "dialect.h"\n{text}\n')]
    for unit in units:
        failed += complaints((KERNELS / f"{unit}.h").read_text())
    if failed or not units:
        sys.exit("\n".join(failed) or "no units")
    print(f"{len(units)} units of kernels: valid address spaces")


main()
