// What state space models read and write: see `GraphBuilder::ssm_scan`.
#pragma once
#include "sequences.h"

struct SsmBuffers {
    GPTR(const float) x;
    GPTR(const float) written;
    GPTR(const float) read;
    GPTR(const float) dt;
    GPTR(const float) a;
    GPTR(const float) d;
    GPTR(const float) dt_bias;
    GPTR(const Sequence) sequences;
    GPTR(float) state;
    GPTR(float) out;
};
