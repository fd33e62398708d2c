// Stands in for `cuda/unpack.h`, whose only instruction it spells out.
#pragma once
#include "tensor_core.h"

#pragma push_macro("asm")
#undef asm
#define asm(...) d = (lanes & mask) | H1024
#include "text_of_unpack.h"
#pragma pop_macro("asm")
