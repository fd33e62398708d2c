// What kernels meet on the emulated device: memory that knows who wrote it, and threads that wait for each other.
//
// Reads of bytes that nothing has written, accesses outside the allocation, words at odd addresses and races (two threads
// of a group touching a byte with no barrier between, one of them writing; a thread reading what another group of the
// same dispatch wrote) stop the dispatch with a message. Threads are fibres: barriers and lane operations are where they
// switch, in random order.
#pragma once

#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;

namespace emulator {

// Who wrote last: the group, numbered over all dispatches, and the thread with the stretch between barriers.
struct Stamp {
    uint32_t group, mark;
};
inline bool same(const Stamp& a, const Stamp& b) {
    uint64_t of_a, of_b;
    memcpy(&of_a, &a, sizeof of_a), memcpy(&of_b, &b, sizeof of_b);
    return of_a == of_b;
}

// The same of an element of threadgroup memory, where what happens between barriers of a warp counts, too: the stretch between
// barriers of the group, that between those of the warp, and the thread. Of what was copied, COPIED and which batch of copies it was in.
typedef uint64_t Mark;
const Mark COPIED = 1ull << 63;

// Threads of a group at most, and bits of a mark that say which it was; the last number is none of them.
const uint32_t MOST_THREADS = 1024, THREAD_BITS = 11, NO_THREAD = (1u << THREAD_BITS) - 2;

// What is running. A mark is a thread within a stretch between barriers: the same mark, the same thread and stretch.
struct Now {
    uint32_t group, first_group, epoch, thread;
    // `first_group` of the dispatches right before, which may still be running while threads run ahead.
    uint32_t before;
    // Barriers that the warp has passed in this group.
    uint32_t warp_epoch;
    uint32_t mark() const { return epoch << THREAD_BITS | (thread + 1); }
    Mark own_mark() const { return (Mark)epoch << 32 | warp_epoch << THREAD_BITS | (thread + 1); }
};
extern __thread Now now;

// An allocation: a device buffer, or an array of one group's threadgroup memory.
struct Memory {
    uint8_t* data;
    // Of a device buffer: 1 for each byte that was ever written.
    uint8_t* written;
    // Of a device buffer: the last write of each byte.
    Stamp* stamps;
    uint64_t bytes;
    const char* name;
    // Of a device buffer: `first_group` of the dispatch that wrote to it last.
    uint32_t writer;
    // Of threadgroup memory: bytes of an element, and marks of the last write and the last read of each.
    uint32_t element;
    Mark* writes;
    Mark* reads;
};

[[noreturn]] void fail(const char* format, ...);
[[noreturn]] void fail_access(const Memory& memory, uint64_t at, uint64_t size, bool write);

// Whether two marks are of different threads with no barrier between.
inline bool races(uint32_t a, uint32_t b) { return a != b && a >> THREAD_BITS == b >> THREAD_BITS; }
// The thread that a mark is of.
inline uint32_t thread_of(Mark mark) { return (uint32_t)(mark & ((1u << THREAD_BITS) - 1)) - 1; }
// Of each thread and warp, where threads wait for others' arrivals, before which barrier of the warp all that it did is known to the
// thread, as it comes before; null where none wait.
extern __thread uint32_t (*known)[MOST_THREADS / 32];
// The same, of a mark and the one of what the running thread does.
inline bool races(Mark a, Mark b) {
    if (a == b || a >> 32 != b >> 32) return false;
    const uint32_t warp = thread_of(a) / 32, barriers = (uint32_t)a >> THREAD_BITS;
    if (warp != thread_of(b) / 32)
        return !known || warp >= MOST_THREADS / 32 || thread_of(b) >= MOST_THREADS || known[thread_of(b)][warp] <= barriers;
    return (uint32_t)a >> THREAD_BITS == (uint32_t)b >> THREAD_BITS;
}

// Whether the running thread comes after copies that have arrived: it has waited for them, or for one who has.
bool comes_after_copies(Mark copied);

inline bool all_written(const uint8_t* written, uint64_t size) {
    if (size == 4) {
        uint32_t flags;
        memcpy(&flags, written, 4);
        return flags == 0x01010101;
    }
    for (uint64_t i = 0; i < size; ++i)
        if (!written[i]) return false;
    return true;
}

// `allowed` of threadgroup memory.
bool allowed_elements(Memory& memory, uint64_t at, uint64_t size, bool write);

// The same for one element that no other thread has written since the group's last barrier, nor a copy.
inline bool is_calm(Memory& memory, uint64_t at, bool write) {
    // Divisions take longer than all the rest.
    const uint32_t element = memory.element;
    const uint64_t i = element == 4 ? at / 4 : element == 1 ? at : at / element;
    const Mark mark = now.own_mark(), before = memory.writes[i];
    const bool is_own = before == mark || (before >> 32 != mark >> 32 && !(before & COPIED));
    if (!is_own || (before == 0 && !write)) return false;
    Mark& read = memory.reads[i];
    // Of several readers, any one that is not the writer to come.
    if (races(read, mark)) return !write;
    (write ? memory.writes[i] : read) = mark;
    return true;
}

// Whether the running thread may do this; fail_access says what is wrong if not.
inline bool allowed(Memory& memory, uint64_t at, uint64_t size, bool write) {
    if (at + size > memory.bytes || at + size < size || ((size & (size - 1)) == 0 && (at & (size - 1)))) return false;
    if (memory.element)
        return (size == memory.element && is_calm(memory, at, write)) || allowed_elements(memory, at, size, write);
    if (!write && !all_written(memory.written + at, size)) return false;
    if (!write && memory.writer != now.first_group) return true;
    Stamp* const stamps = memory.stamps + at;
    const uint32_t mark = now.mark();
    const uint32_t group = now.group, first_group = now.first_group;
    const auto free = [&](Stamp stamp) {
        return stamp.group < first_group || (stamp.group == group && !races(stamp.mark, mark));
    };
    // Bytes of a word mostly have one writer, and most accesses are to words.
    if (size == 4 && same(stamps[0], stamps[1]) && same(stamps[0], stamps[2]) && same(stamps[0], stamps[3])) {
        if (!free(stamps[0])) return false;
    } else {
        for (uint64_t i = 0; i < size; ++i)
            if (!free(stamps[i])) return false;
    }
    if (write) {
        const Stamp own = {group, mark};
        if (size == 4) stamps[0] = stamps[1] = stamps[2] = stamps[3] = own;
        else for (uint64_t i = 0; i < size; ++i) stamps[i] = own;
        memset(memory.written + at, 1, size);
        memory.writer = first_group;
    }
    return true;
}

// Threads that run ahead, 1, and those that also write, 2: the dispatches right before may not have ended.
extern __thread uint8_t ahead[MOST_THREADS];
[[noreturn]] void fail_ahead(const Memory& memory);
// The dispatches before have ended for the running thread.
void after_previous_of_thread();

// A thread that runs ahead writes nothing, or nothing of what they write, and reads nothing of that.
inline void check_ahead(const Memory& memory, uint64_t at, uint64_t size, bool write) {
    if (write && ahead[now.thread] == 1) fail_ahead(memory);
    for (uint64_t i = at; i < at + size && i < memory.bytes; ++i)
        if (memory.stamps[i].group >= now.before) fail_ahead(memory);
}

inline void check(Memory& memory, uint64_t at, uint64_t size, bool write) {
    if (ahead[now.thread] && !memory.element) check_ahead(memory, at, size, write);
    if (!allowed(memory, at, size, write)) fail_access(memory, at, size, write);
}

// Adds to a counter that other threads and groups add to at the same time, and returns what it was. To anything else it is a
// write by one thread that is none of the group's.
inline uint32_t tally(Memory& memory, uint64_t at, uint32_t number) {
    if (ahead[now.thread] && !memory.element) check_ahead(memory, at, sizeof number, true);
    const Now own = now;
    now.thread = NO_THREAD;
    now.group = memory.element ? own.group : own.first_group;
    const bool may = allowed(memory, at, sizeof number, false) && allowed(memory, at, sizeof number, true);
    if (!may) fail_access(memory, at, sizeof number, true);
    now = own;
    uint32_t before;
    memcpy(&before, memory.data + at, sizeof before);
    number += before;
    memcpy(memory.data + at, &number, sizeof number);
    return before;
}
// The same at an address.
uint32_t tally_at(void* counter, uint32_t number);

// Words that the processor reads and writes at the same time; waiting lets its threads run.
void tell(Memory& memory, uint64_t at);
bool told(Memory& memory, uint64_t at, uint32_t limit);
uint32_t nanoseconds();

// The running thread's place in its group and its warp, and where the group is.
uint own_index();
uint lane();
uint threads();
uint group(uint axis);
uint groups(uint axis);
void wait_for_group(const char* file, int line);
void wait_for_warp();
// Gives `value` to the warp and returns that of `lane`.
uint32_t exchange(uint32_t value, uint lane);
// A bit for each lane that gives true.
uint32_t ballot(bool value);
// The dialect's `lane_sum`, with one exchange in place of five: a lane and its partner add the same two numbers, so that
// every lane has the sum of the first one.
float sum_of_lanes(float value);
// a · b + sum of 8 × 8 matrices, of which lane l holds columns 2(l % 4) and the next of row l / 4.
void multiply_accumulate(float* to, const float* a, const float* b, const float* sum);
// a · b + sum of (16, 16 · halves) and (16 · halves, 8) bytes, signed: with g = lane / 4 and t = lane % 4, a lane holds of each half
// of a rows g and g + 8 and of b column g, columns and rows 4t to 4t + 3; of the result rows g and g + 8, columns 2t and 2t + 1.
void multiply_bytes(int* to, const uint* a, const uint* b, uint halves);
// d = a · b + c of (16, 8 · parts) and (8 · parts, 8) f16: with g = lane / 4 and t = lane % 4, a lane holds of each part of a rows g and
// g + 8 and of b column g, columns and rows 2t and 2t + 1; of c and d rows g and g + 8, columns 2t and 2t + 1.
void multiply_halves(float* d, const uint* a, const uint* b, const float* c, uint parts);
// d += a · b of (16, 8) and (8, 8) f32 of which the upper 19 bits count: a lane holds of a rows g and g + 8 of column t, then of t + 4;
// of b column g of rows t and t + 4; of d as above.
void multiply_tf32(float* d, const uint* a, const uint* b);
Memory* shared(const char* name, uint64_t bytes, uint32_t element);
// The same for kernels with plain pointers, whose accesses the compiler reports.
void* shared_data(const char* name, uint64_t bytes, uint32_t element);
// The threadgroup memory that the dispatch asks for.
void* asked_data(const char* name);
void copy(void* to, const void* from, size_t bytes);
// That an address is a multiple of the size, which compilers take for granted.
void check_alignment(const void* address, uint64_t size);
// The memory of variables that a group's threads share, if an address is in it; and that they are new to the next group.
Memory* variable_at(const uint8_t* address);
void forget_variables();
// Addresses of such variables as 32-bit numbers, which one can add to.
uint32_t shared_number(const void* p);
void* at_shared_number(uint32_t number);
// Bytes of threadgroup memory that the dispatch asks for.
uint asked_bytes();
// Whose memory an address is, which is none of a thread's own.
Memory& memory_at(const void* address, uint64_t size, bool write);
// Stops the running thread until another one wakes it.
void sleep();
void wake(uint thread);
// What the warp does from here on comes after a barrier of its own.
void begin_warp_epoch();
// `known` of a thread, which is there from the first time on.
uint32_t* known_by(uint thread);
// A function whose accesses are not reported.
#define UNREPORTED __attribute__((no_sanitize("thread")))

struct Binding {
    Memory* memory;
    uint64_t offset;
};

struct Kernel {
    const char* name;
    void (*run)(const Binding*, const void*);
    uint32_t buffers;
    uint32_t constant_bytes;
    const Kernel* next;
};

// Adds a kernel to its unit's list while the program starts.
struct Register : Kernel {
    Register(const Kernel*& list, const char* name, void (*run)(const Binding*, const void*), uint32_t buffers,
             uint32_t constant_bytes)
        : Kernel{name, run, buffers, constant_bytes, list} {
        list = this;
    }
};

// A kernel as CUDA C++ has it, with its constants last.
#if __cplusplus >= 201703L
template <class... Arguments, size_t... I>
UNREPORTED void call(void (*kernel)(Arguments...), const Binding* bindings, const void* constants, std::index_sequence<I...>) {
    using Constants = std::tuple_element_t<sizeof...(I), std::tuple<Arguments...>>;
    Constants c;
    memcpy((void*)&c, constants, sizeof c);
    kernel((std::tuple_element_t<I, std::tuple<Arguments...>>)(bindings[I].memory->data + bindings[I].offset)..., c);
}
// One that `waits` for the dispatches before by itself, and before may write what those neither read nor write, or begins after them.
template <auto kernel, bool waits>
struct Plain;
template <class... Arguments, void (*kernel)(Arguments...), bool waits>
struct Plain<kernel, waits> : Register {
    static constexpr size_t BUFFERS = sizeof...(Arguments) - 1;
    UNREPORTED static void run_it(const Binding* bindings, const void* constants) {
        ahead[now.thread] = waits ? 2 : 0;
        call(kernel, bindings, constants, std::make_index_sequence<BUFFERS>());
    }
    Plain(const Kernel*& list, const char* name)
        : Register(list, name, run_it, BUFFERS, sizeof(std::tuple_element_t<BUFFERS, std::tuple<Arguments...>>)) {}
};
#endif

} // namespace emulator

// Kernels of the unit that is being compiled.
static const emulator::Kernel* mf_kernels = nullptr;
