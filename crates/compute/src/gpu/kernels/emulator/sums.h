// What every unit begins with: the dialect, with the sum over a warp that the machine brings.
#pragma once

#include "../dialect.h"

#define lane_sum(place, value) emulator::sum_of_lanes(value)
