// Devices that divide experts wait for each other within recorded lists: each tells the others, in their memory, how often it has
// come, and waits until they have come as often.
#include "../dialect.h"

// Words of a device: how often it has come, whether a device was waited for in vain; then how often each of the devices has come,
// in lines of their own.
const uint COME = 0, LATE = 1, ARRIVED = 32, LINE = 32;
// Another device is waited for as many nanoseconds.
const uint MOST_WAITED = 4000000000u;

struct MeetConstants {
    // Devices, and which of them this is.
    uint devices, own;
};

static __device__ __forceinline__ void tell_others(uint* word, uint value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// words0, words1, …: those of each device. One warp, of which a lane is for one device.
extern "C" __global__ void __launch_bounds__(32)
    meet(uint* words0, uint* words1, uint* words2, uint* words3, uint* words4, uint* words5, uint* words6, uint* words7,
         const __grid_constant__ MeetConstants c) {
    const Ctx ctx;
    after_previous(ctx);
    auto words_of = [&](uint device) {
        return device == 0   ? words0
               : device == 1 ? words1
               : device == 2 ? words2
               : device == 3 ? words3
               : device == 4 ? words4
               : device == 5 ? words5
               : device == 6 ? words6
                             : words7;
    };
    const uint device = ctx.lane();
    uint* const own = words_of(c.own);
    const uint come = own[COME] + 1;
    bool in_time = own[LATE] == 0;
    __syncwarp();
    if (device == 0) own[COME] = come;
    const bool other = device < c.devices && device != c.own;
    // Whatever kernels before have written is there when the word is.
    publish(ctx);
    if (other) {
        tell_others(words_of(device) + ARRIVED + LINE * c.own, come);
        const uint begin = nanoseconds();
        while (in_time) {
            uint now;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(now) : "l"(own + ARRIVED + LINE * device) : "memory");
            if ((int)(now - come) >= 0) break;
            in_time = nanoseconds() - begin <= MOST_WAITED;
        }
    }
    // Who waits for this one need not, then.
    if (!__all_sync(0xffffffffu, in_time) && device < c.devices) tell_others(words_of(device) + LATE, 1);
}
