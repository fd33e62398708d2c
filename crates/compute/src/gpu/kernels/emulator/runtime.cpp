// Runs kernels on the CPU: each thread of a group is a fibre.
#include "bits.h"
#include "copies.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace emulator {

// Where a fibre that has no turn goes on.
struct Place {
    void *stack, *frame, *code;
};

// Keeps the running fibre's place in `save` and goes on at `load`; all registers but those of the place may change. Inline, and
// with a jump: a function that comes back on another stack returns to where the processor does not expect it, each time.
inline __attribute__((always_inline)) void go_on(Place* save, const Place* load) {
#if defined(__x86_64__)
    asm volatile("leaq 1f(%%rip), %%rax\n"
                 "movq %%rsp, (%0)\n  movq %%rbp, 8(%0)\n  movq %%rax, 16(%0)\n"
                 "movq (%1), %%rsp\n  movq 8(%1), %%rbp\n  jmpq *16(%1)\n"
                 "1:\n"
                 : "+D"(save), "+S"(load)
                 :
                 : "rax", "rbx", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm0", "xmm1",
                   "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12", "xmm13",
                   "xmm14", "xmm15", "cc", "memory");
#elif defined(__aarch64__)
    register Place* from asm("x0") = save;
    register const Place* to asm("x1") = load;
    asm volatile("adr x9, 1f\n  mov x10, sp\n"
                 "stp x10, x29, [x0]\n  str x9, [x0, #16]\n"
                 "ldp x10, x29, [x1]\n  ldr x9, [x1, #16]\n"
                 "mov sp, x10\n  br x9\n"
                 "1:\n"
                 : "+r"(from), "+r"(to)
                 :
                 : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16",
                   "x17", "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v0", "v1", "v2",
                   "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", "v13", "v14", "v15", "v16", "v17",
                   "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26", "v27", "v28", "v29", "v30", "v31",
                   "cc", "memory");
#else
#error "the emulator knows how to switch fibres on x86-64 and AArch64"
#endif
}

__thread Now now = {0, 1, 1, 0, 0, 0};
__thread uint8_t ahead[MOST_THREADS];
__thread uint32_t (*known)[MOST_THREADS / 32];

namespace {

// What a thread is at, or is waiting for if it is not its turn: lane operations leave it at Running.
enum class State { Running, Barrier, Copies, Done };

// Not a power of two: stacks whose tops are a multiple of one apart share a few lines of the cache.
const size_t STACK_BYTES = (64 << 10) + 9 * 64;

// Switches after which another warp has a turn.
const uint MOST_TURNS = 1 << 14;

struct Fibre {
    // Without a stack before the first turn.
    Place place;
    // Which stack it has since then.
    uint stack;
    State state;
    const char* file;
    int line;
    uint arrays;
};

struct Warp {
    uint32_t values[2][32];
    float sums[2];
    float matrices[2][2][64];
    uint32_t shares[2][32][6];
    // Of products of f16: rows of the first matrix, and columns of the second.
    float rows[2][16][16], columns[2][8][16];
    // Lanes that wait in a lane operation, and which of two sets of values that has: a lane can be one operation ahead of
    // another, never two.
    uint waiting, set;
    // A bit for each lane that can run, and the lane whose turn comes first.
    uint32_t ready;
    uint first;
    // Barriers of the warp alone that it has passed.
    uint32_t epoch;
};

struct Array {
    Memory memory;
    std::vector<uint8_t> data;
    std::vector<Mark> writes, reads;
};

// What is running.
struct Machine {
    const Kernel* kernel;
    const Binding* bindings;
    const void* constants;
    uint grid[3], group[3], threads, asked;
    std::vector<Fibre> fibres;
    std::vector<Warp> warps;
    std::vector<Array*> arrays;
    std::vector<std::array<uint32_t, MOST_THREADS / 32>> known;
    // The dispatch's buffers, each once.
    std::vector<Memory*> buffers;
    // The one of the last access.
    Memory* last;
    // Not written before threads do: most kernels need few pages of them.
    std::unique_ptr<uint8_t[]> stacks;
    size_t stack_bytes;
    // Stacks that no thread has.
    std::vector<uint> free;
    // Warps, but for the running one, that have lanes that can run.
    std::vector<uint> ready;
    uint warp, turns;
    Place scheduler;
    uint64_t random;
    uint waiting, done;
    bool running, failed;
    std::string message;

    uint below(uint n) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        return (uint)((random >> 32) * n >> 32);
    }
};

// That of the thread, once it has run something: a plain pointer, which costs no look whether it is constructed.
__thread Machine* machine;

void report(const char* format, va_list arguments) {
    Machine& m = *machine;
    if (m.failed) return;
    char text[512], where[256];
    vsnprintf(text, sizeof text, format, arguments);
    snprintf(where, sizeof where, "kernel %s, group (%u, %u, %u), thread %u: ", m.kernel->name, m.group[0], m.group[1],
             m.group[2], now.thread);
    m.failed = true;
    m.message = std::string(where) + text;
}

void note(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(format, arguments);
    va_end(arguments);
}

// Gives the turn to any warp that waits for it.
void next_warp(Machine& m) {
    const uint pick = m.below((uint)m.ready.size());
    m.warp = m.ready[pick];
    m.ready[pick] = m.ready.back();
    m.ready.pop_back();
    m.turns = 0;
    now.warp_epoch = m.warps[m.warp].epoch;
}

// Any thread may run next.
void all_ready(Machine& m) {
    m.ready.clear();
    for (uint i = 0; i < m.warps.size(); ++i) {
        m.warps[i].ready = ~0u;
        m.warps[i].first = m.below(32);
        m.ready.push_back(i);
    }
    next_warp(m);
}

// All threads wait at the same place, or it is a divergence.
void release_group(Machine& m) {
    const Fibre& head = m.fibres[0];
    for (uint i = 0; i < m.threads; ++i) {
        Fibre& fibre = m.fibres[i];
        if (fibre.state != State::Barrier || fibre.line != head.line || fibre.file != head.file) {
            now.thread = i;
            return note("threads diverge at a barrier: %s:%d and %s:%d", head.file, head.line,
                        fibre.file ? fibre.file : "the end", fibre.line);
        }
    }
    for (Fibre& fibre : m.fibres) fibre.state = State::Running;
    all_ready(m);
}

// Gives the turn to a lane of the warp, at random the first of a round and then in their order.
inline void next_lane(Machine& m, Warp& warp) {
    const uint32_t turned = warp.ready >> warp.first | warp.ready << ((32 - warp.first) % 32);
    const uint lane = (warp.first + (uint)__builtin_ctz(turned)) % 32;
    warp.ready &= ~(1u << lane);
    now.thread = m.warp * 32 + lane;
}

// Gives the turn to any thread of the running warp that can run, else to any of another warp; false where none can. Warps
// keep their turn because the stacks of 32 threads stay in the nearest cache; what they do to each other is found by its
// marks, whoever comes first. One that waits for another in a loop loses its turn.
inline bool next_thread(Machine& m) {
    const bool goes_on = m.warps[m.warp].ready;
    if (!goes_on || ++m.turns == MOST_TURNS) {
        if (goes_on) m.ready.push_back(m.warp);
        if (m.ready.empty()) return false;
        next_warp(m);
    }
    next_lane(m, m.warps[m.warp]);
    return true;
}

[[noreturn]] void fibre_main();

// Gives a thread a stack on which the kernel begins.
__attribute__((noinline)) void begin(Machine& m, Fibre& fibre) {
    fibre.stack = m.free.back();
    m.free.pop_back();
    uintptr_t top = (uintptr_t)(m.stacks.get() + (fibre.stack + 1) * STACK_BYTES) & ~(uintptr_t)63;
    void** stack = (void**)(top - 64);
#if defined(__x86_64__)
    // As a call leaves it, with an address to return to.
    *--stack = nullptr;
#endif
    fibre.place = Place{stack, nullptr, (void*)fibre_main};
}

// Where the thread goes on whose turn it is.
inline const Place* running(Machine& m) {
    Fibre& fibre = m.fibres[now.thread];
    if (!fibre.place.stack) begin(m, fibre);
    return &fibre.place;
}

// Stops the running thread `self` and goes on with the next one, straight from stack to stack; with the scheduler where none
// can run or one has failed.
inline void hand_over(Machine& m, uint self) {
    const bool any = !m.failed && next_thread(m);
    if (any && now.thread == self) return;
    go_on(&m.fibres[self].place, any ? running(m) : &m.scheduler);
}

// Lets the running thread wait for the other lanes of its warp.
inline void wait_for_lanes(Machine& m, Warp& warp) {
    const uint self = now.thread;
    if (++warp.waiting == 32) {
        warp.waiting = 0;
        warp.set ^= 1;
        warp.ready = ~0u;
        warp.first = m.below(32);
    }
    hand_over(m, self);
}

// The same for a thread that waits at a barrier; lets those go on that waited for it.
void wait_for_threads(Machine& m) {
    const uint self = now.thread;
    m.fibres[self].state = State::Barrier;
    if (++m.waiting == m.threads) {
        m.waiting = 0;
        ++now.epoch;
        release_group(m);
    }
    hand_over(m, self);
}

// Ends the dispatch from wherever a thread is: kernels own nothing that would have to be given back.
[[noreturn]] void leave() {
    Place left;
    go_on(&left, &machine->scheduler);
    __builtin_trap();
}

// Runs a thread, and after it those that have not begun when theirs is the turn: on the same stack, which is warm.
[[noreturn]] void fibre_main() {
    Machine& m = *machine;
    for (;;) {
        m.kernel->run(m.bindings, m.constants);
        Fibre& ended = m.fibres[now.thread];
        ended.state = State::Done;
        ++m.done;
        const bool any = next_thread(m);
        Fibre& next = m.fibres[now.thread];
        if (any && !next.place.stack) {
            next.stack = ended.stack;
            continue;
        }
        m.free.push_back(ended.stack);
        go_on(&ended.place, any ? &next.place : &m.scheduler);
    }
}

void run_group() {
    Machine& m = *machine;
    m.waiting = m.done = 0;
    for (Warp& warp : m.warps) warp.waiting = warp.set = 0, warp.epoch = 0;
    forget_copies();
    forget_variables();
    known = nullptr;
    for (Fibre& fibre : m.fibres) fibre = Fibre{};
    all_ready(m);
    // Comes back when no thread can run.
    next_thread(m);
    go_on(&m.scheduler, running(m));
    if (!m.failed && m.done < m.threads) {
        for (uint i = 0; i < m.threads; ++i) {
            const Fibre& fibre = m.fibres[i];
            if (fibre.state == State::Done) continue;
            now.thread = i;
            if (fibre.state == State::Barrier) note("waits at the barrier %s:%d that other threads do not reach", fibre.file, fibre.line);
            else if (fibre.state == State::Copies) note("waits for copies that nothing starts");
            else note("waits in a lane operation that other lanes do not reach");
        }
    }
    if (!m.failed && !all_copies_awaited()) note("ends while copies are under way that nothing has awaited");
    ++now.epoch;
}

} // namespace

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    report(format, arguments);
    va_end(arguments);
    leave();
}

bool allowed_elements(Memory& memory, uint64_t at, uint64_t size, bool write) {
    const Mark mark = now.own_mark();
    const uint32_t element = memory.element;
    Mark known = 0;
    for (uint64_t i = element == 4 ? at / 4 : element == 1 ? at : at / element; i * element < at + size; ++i) {
        const Mark before = memory.writes[i];
        if (before & COPIED ? before != known && !comes_after_copies(before) : races(before, mark)) return false;
        known = before;
        if (!write) {
            if (before == 0) return false;
            // Of several readers, any one that is not the writer to come.
            if (!races(memory.reads[i], mark)) memory.reads[i] = mark;
            continue;
        }
        if (races(memory.reads[i], mark)) return false;
        memory.writes[i] = mark;
    }
    return true;
}

void fail_access(const Memory& memory, uint64_t at, uint64_t size, bool write) {
    const char* verb = write ? "write" : "read";
    const unsigned long long n = size, offset = at;
    if (at + size > memory.bytes || at + size < size)
        fail("%s: %s of %llu bytes at offset %lld of %llu", memory.name, verb, n, (long long)at,
             (unsigned long long)memory.bytes);
    if ((size & (size - 1)) == 0 && at % size) fail("%s: %s of %llu bytes at offset %llu", memory.name, verb, n, offset);
    const char* advice = "with no barrier between";
    if (memory.element) {
        const Mark mark = now.own_mark();
        uint64_t i = at / memory.element;
        // The first of them that is to blame.
        const auto is_free = [&] {
            const Mark before = memory.writes[i];
            if (before & COPIED ? !comes_after_copies(before) : races(before, mark) || (!write && before == 0)) return false;
            return !write || !races(memory.reads[i], mark);
        };
        while ((i + 1) * memory.element < at + size && is_free()) ++i;
        if (memory.writes[i] & COPIED && !comes_after_copies(memory.writes[i]))
            fail("%s: %s of offset %llu, %s", memory.name, verb, offset,
                 has_arrived(memory.writes[i]) ? "which was copied, by a thread that has not awaited it"
                                               : "while it is being copied");
        if (races(memory.writes[i], mark))
            fail("%s: %s of offset %llu, which thread %u writes %s", memory.name, verb, offset,
                 thread_of(memory.writes[i]), advice);
        if (write && races(memory.reads[i], mark))
            fail("%s: write of offset %llu, which thread %u reads %s", memory.name, offset,
                 thread_of(memory.reads[i]), advice);
        fail("%s: read of offset %llu, which nothing has written", memory.name, offset);
    }
    if (!write && !all_written(memory.written + at, size))
        fail("%s: read of offset %llu, which nothing has written", memory.name, offset);
    const uint32_t mark = now.mark();
    for (uint64_t i = at; i < at + size; ++i) {
        const Stamp& stamp = memory.stamps[i];
        if (stamp.group < now.first_group) continue;
        if (stamp.group != now.group)
            fail("%s: %s of offset %llu, which another group writes in this dispatch", memory.name, verb, offset);
        if (races(stamp.mark, mark))
            fail("%s: %s of offset %llu, which thread %u writes %s", memory.name, verb, offset,
                 thread_of(stamp.mark), advice);
    }
    fail("%s: %s of %llu bytes at offset %llu", memory.name, verb, n, offset);
}

void fail_ahead(const Memory& memory) { fail("%s: used before the dispatches before have ended", memory.name); }
void after_previous_of_thread() { ahead[now.thread] = 0; }
uint own_index() { return now.thread; }
uint lane() { return now.thread % 32; }
uint threads() { return machine->threads; }
uint group(uint axis) { return machine->group[axis]; }
uint groups(uint axis) { return machine->grid[axis]; }

void wait_for_group(const char* file, int line) {
    Fibre& fibre = machine->fibres[now.thread];
    fibre.file = file;
    fibre.line = line;
    wait_for_threads(*machine);
}

namespace {

// What a lane knows of other warps all of them know.
void share_known(uint warp) {
    for (uint other = 0; other < MOST_THREADS / 32; ++other) {
        uint32_t most = 0;
        for (uint i = 0; i < 32; ++i) most = std::max(most, known[32 * warp + i][other]);
        for (uint i = 0; i < 32; ++i) known[32 * warp + i][other] = most;
    }
}

} // namespace

// A lane goes on when all have come.
void wait_for_warp() {
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    if (warp.waiting == 31) {
        begin_warp_epoch();
        if (known) share_known(m.warp);
    }
    wait_for_lanes(m, warp);
}

void begin_warp_epoch() { now.warp_epoch = ++machine->warps[machine->warp].epoch; }

uint32_t* known_by(uint thread) {
    if (!known) {
        machine->known.assign(MOST_THREADS, {});
        known = (uint32_t(*)[MOST_THREADS / 32])machine->known.data();
    }
    return known[thread];
}

uint32_t exchange(uint32_t value, uint lane) {
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    uint32_t* values = warp.values[warp.set];
    values[now.thread % 32] = value;
    wait_for_lanes(m, warp);
    if (lane >= 32) fail("a lane operation names lane %u", lane);
    return values[lane];
}

uint32_t ballot(bool value) {
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    const uint32_t* values = warp.values[warp.set];
    warp.values[warp.set][now.thread % 32] = value;
    wait_for_lanes(m, warp);
    uint32_t bits = 0;
    for (uint i = 0; i < 32; ++i) bits |= values[i] << i;
    return bits;
}

float sum_of_lanes(float value) {
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    const uint set = warp.set;
    memcpy(warp.values[set] + now.thread % 32, &value, 4);
    // The last lane to come adds up for all.
    if (warp.waiting == 31) {
        float sums[32];
        memcpy(sums, warp.values[set], sizeof sums);
        for (uint half = 16; half > 0; half /= 2)
            for (uint i = 0; i < half; ++i) sums[i] += sums[i + half];
        warp.sums[set] = sums[0];
    }
    wait_for_lanes(m, warp);
    return warp.sums[set];
}

void multiply_accumulate(float* to, const float* a, const float* b, const float* sum) {
    const uint lane = now.thread % 32, row = lane / 4;
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    float(*matrices)[64] = warp.matrices[warp.set];
    for (uint i = 0; i < 2; ++i) {
        matrices[0][2 * lane + i] = a[i];
        matrices[1][2 * lane + i] = b[i];
    }
    float result[2] = {sum[0], sum[1]};
    wait_for_lanes(m, warp);
    for (uint i = 0; i < 2; ++i) {
        for (uint k = 0; k < 8; ++k) result[i] += matrices[0][8 * row + k] * matrices[1][8 * k + lane % 4 * 2 + i];
        to[i] = result[i];
    }
}

void multiply_bytes(int* to, const uint* a, const uint* b, uint halves) {
    const uint lane = now.thread % 32, g = lane / 4, t = lane % 4;
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    uint32_t(*shares)[6] = warp.shares[warp.set];
    for (uint i = 0; i < 2 * halves; ++i) shares[lane][i] = a[i];
    for (uint i = 0; i < halves; ++i) shares[lane][4 + i] = b[i];
    wait_for_lanes(m, warp);
    for (uint i = 0; i < 4; ++i) {
        const uint row = 4 * g, column = 4 * (2 * t + i % 2);
        for (uint half = 0; half < halves; ++half)
            for (uint quarter = 0; quarter < 4; ++quarter) {
                const uint x = shares[row + quarter][2 * half + i / 2], y = shares[column + quarter][4 + half];
                for (uint k = 0; k < 32; k += 8) to[i] += (int)(int8_t)(x >> k) * (int)(int8_t)(y >> k);
            }
    }
}

namespace {

// d = sums of products + c, once all lanes of the warp have brought rows and columns of so many elements.
void multiply_rows(Machine& m, Warp& warp, float* d, const float* c, uint count) {
    const uint lane = now.thread % 32, set = warp.set;
    float sums[4] = {c[0], c[1], c[2], c[3]};
    wait_for_lanes(m, warp);
    for (uint i = 0; i < 4; ++i) {
        const float *row = warp.rows[set][lane / 4 + i / 2 * 8], *column = warp.columns[set][lane % 4 * 2 + i % 2];
        for (uint k = 0; k < count; ++k) sums[i] += row[k] * column[k];
        d[i] = sums[i];
    }
}

} // namespace

void multiply_halves(float* d, const uint* a, const uint* b, const float* c, uint parts) {
    const uint lane = now.thread % 32, g = lane / 4, t = lane % 4;
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    float(*rows)[16] = warp.rows[warp.set], (*columns)[16] = warp.columns[warp.set];
    const auto put = [&](float* to, uint two) { to[0] = f16_to_f32((ushort)two), to[1] = f16_to_f32((ushort)(two >> 16)); };
    for (uint part = 0; part < parts; ++part) {
        put(rows[g] + 8 * part + 2 * t, a[2 * part]);
        put(rows[g + 8] + 8 * part + 2 * t, a[2 * part + 1]);
        put(columns[g] + 8 * part + 2 * t, b[part]);
    }
    multiply_rows(m, warp, d, c, 8 * parts);
}

void multiply_tf32(float* d, const uint* a, const uint* b) {
    const uint lane = now.thread % 32, g = lane / 4, t = lane % 4;
    Machine& m = *machine;
    Warp& warp = m.warps[m.warp];
    const auto value = [](uint bits) { return as_float(bits & 0xffffe000); };
    for (uint i = 0; i < 4; ++i) warp.rows[warp.set][g + i % 2 * 8][t + i / 2 * 4] = value(a[i]);
    for (uint i = 0; i < 2; ++i) warp.columns[warp.set][g][t + 4 * i] = value(b[i]);
    multiply_rows(m, warp, d, d, 8);
}

Memory* shared(const char* name, uint64_t bytes, uint32_t element) {
    const uint index = machine->fibres[now.thread].arrays++;
    if (index == machine->arrays.size()) machine->arrays.push_back(new Array());
    Array& array = *machine->arrays[index];
    if (array.memory.name != name || array.memory.bytes != bytes) {
        const size_t elements = bytes / element;
        array.data.assign(bytes, 0xcd);
        array.writes.assign(elements, 0);
        array.reads.assign(elements, 0);
        array.memory = Memory{array.data.data(), nullptr, nullptr, bytes,
                              name,              0,       element, array.writes.data(), array.reads.data()};
    }
    return &array.memory;
}

void* shared_data(const char* name, uint64_t bytes, uint32_t element) { return shared(name, bytes, element)->data; }

uint asked_bytes() { return machine->asked; }

void* asked_data(const char* name) { return shared_data(name, machine->asked, 1); }

void copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }

void sleep() {
    const uint self = now.thread;
    machine->fibres[self].state = State::Copies;
    hand_over(*machine, self);
}

void wake(uint thread) {
    Machine& m = *machine;
    Warp& warp = m.warps[thread / 32];
    m.fibres[thread].state = State::Running;
    if (!warp.ready && thread / 32 != m.warp) m.ready.push_back(thread / 32);
    warp.ready |= 1u << thread % 32;
}

namespace {

bool within(const Memory& memory, const uint8_t* address) {
    return address >= memory.data && address < memory.data + memory.bytes;
}

// Whose memory an address is, as `memory_of`, where it is not that of the last access.
__attribute__((noinline)) Memory* find_memory(Machine& m, const uint8_t* address, uint64_t size, bool write) {
    if (address >= m.stacks.get() && address < m.stacks.get() + m.stack_bytes) return nullptr;
    for (Array* array : m.arrays) {
        if (within(array->memory, address)) return m.last = &array->memory;
    }
    // It is asked each time which of them are used.
    if (Memory* const memory = variable_at(address)) return memory;
    for (Memory* buffer : m.buffers) {
        if (within(*buffer, address)) return m.last = buffer;
    }
    // The one before it says most about what went wrong.
    const Memory* before = nullptr;
    for (Memory* buffer : m.buffers) if (buffer->data <= address && (!before || buffer->data > before->data)) before = buffer;
    if (before) fail_access(*before, (uint64_t)(address - before->data), size, write);
    fail("%s of %llu bytes outside of all buffers", write ? "write" : "read", (unsigned long long)size);
}

// Whose memory an address is; null for the threads' own, and while nothing runs.
inline Memory* memory_of(const uint8_t* address, uint64_t size, bool write) {
    if (!machine || !machine->running) return nullptr;
    Machine& m = *machine;
    return m.last && within(*m.last, address) ? m.last : find_memory(m, address, size, write);
}

// An access through a plain pointer.
inline void access(const void* pointer, uint64_t size, bool write, bool aligned) {
    const uint8_t* address = (const uint8_t*)pointer;
    Memory* const memory = memory_of(address, size, write);
    if (!memory) return;
    const uint64_t at = (uint64_t)(address - memory->data);
    // Parts of a struct are aligned, all of it need not be.
    const uint64_t step = aligned ? size : at % 4 == 0 && size % 4 == 0 ? 4 : 1;
    for (uint64_t i = 0; i < size; i += step) check(*memory, at + i, step, write);
}

} // namespace

void tell(Memory& memory, uint64_t at) {
    check(memory, at, 4, true);
    __atomic_store_n((uint32_t*)(memory.data + at), 1u, __ATOMIC_RELEASE);
}

bool told(Memory& memory, uint64_t at, uint32_t limit) {
    check(memory, at, 4, false);
    for (const uint32_t begin = nanoseconds();;) {
        if (__atomic_load_n((const uint32_t*)(memory.data + at), __ATOMIC_ACQUIRE) == 1) return true;
        if (nanoseconds() - begin > limit) return false;
        std::this_thread::yield();
    }
}

uint32_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return (uint32_t)std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

Memory& memory_at(const void* address, uint64_t size, bool write) {
    Memory* const memory = memory_of((const uint8_t*)address, size, write);
    if (!memory) fail("memory of a thread's own, which other threads do not reach");
    return *memory;
}

void check_alignment(const void* address, uint64_t size) {
    if ((uintptr_t)address % size == 0) return;
    const Memory& memory = memory_at(address, size, false);
    const uint64_t at = (uint64_t)((const uint8_t*)address - memory.data);
    fail("%s: %llu bytes at once at offset %llu", memory.name, (unsigned long long)size, (unsigned long long)at);
}

uint32_t tally_at(void* counter, uint32_t number) {
    Memory& memory = memory_at(counter, sizeof number, true);
    return tally(memory, (uint64_t)((uint8_t*)counter - memory.data), number);
}

} // namespace emulator

// What compilers call for accesses to memory when they are asked to look for races (-fsanitize=thread).
#define REPORTED(size)                                                                                            \
    extern "C" void __tsan_read##size(void* p) { emulator::access(p, size, false, true); }                        \
    extern "C" void __tsan_write##size(void* p) { emulator::access(p, size, true, true); }                        \
    extern "C" void __tsan_unaligned_read##size(void* p) { emulator::access(p, size, false, false); }             \
    extern "C" void __tsan_unaligned_write##size(void* p) { emulator::access(p, size, true, false); }
REPORTED(1)
REPORTED(2)
REPORTED(4)
REPORTED(8)
REPORTED(16)
extern "C" void __tsan_read_range(void* p, size_t size) { emulator::access(p, size, false, false); }
extern "C" void __tsan_write_range(void* p, size_t size) { emulator::access(p, size, true, false); }
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t size) {
    emulator::access(from, size, false, false);
    emulator::access(to, size, true, false);
    return memcpy(to, from, size);
}
extern "C" void* __tsan_memmove(void* to, const void* from, size_t size) {
    emulator::access(from, size, false, false);
    emulator::access(to, size, true, false);
    return memmove(to, from, size);
}
extern "C" void* __tsan_memset(void* to, int value, size_t size) {
    emulator::access(to, size, true, false);
    return memset(to, value, size);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

// Runs one dispatch, whose groups are numbered from `first_group` on, those of the dispatches right before from `before` on.
// `asked` is threadgroup memory beside what the kernel declares. Returns 0, or 1 with a message of at most `message_bytes` bytes, terminated.
extern "C" int32_t moeflux_emulator_run(const emulator::Kernel* kernel, const emulator::Binding* bindings,
                                        const void* constants, const uint32_t* grid, uint32_t threads,
                                        uint32_t asked, uint32_t first_group, uint32_t before, uint64_t seed, char* message,
                                        size_t message_bytes) {
    emulator::now.first_group = first_group;
    emulator::now.before = before;
    using namespace emulator;
    thread_local Machine own;
    machine = &own;
    Machine& m = own;
    m.kernel = kernel;
    m.bindings = bindings;
    m.constants = constants;
    memcpy(m.grid, grid, sizeof m.grid);
    m.asked = asked;
    m.random = seed;
    m.failed = false;
    m.last = nullptr;
    m.buffers.clear();
    for (uint i = 0; i < kernel->buffers; ++i) {
        Memory* memory = bindings[i].memory;
        bool known = false;
        for (Memory* buffer : m.buffers) known = known || buffer == memory;
        if (!known) m.buffers.push_back(memory);
    }
    m.running = true;
    if (m.threads != threads) {
        m.threads = threads;
        m.fibres.assign(threads, Fibre{});
        m.warps.assign(threads / 32, Warp{});
    }
    if (m.stack_bytes < threads * STACK_BYTES) {
        m.stack_bytes = threads * STACK_BYTES;
        m.stacks.reset(new uint8_t[m.stack_bytes]);
    }
    m.free.clear();
    for (uint i = threads; i > 0; --i) m.free.push_back(i - 1);
    const uint64_t groups = (uint64_t)grid[0] * grid[1] * grid[2];
    // Groups in an order of their own: start + i · step, with a step that shares no factor with their number.
    uint64_t step = groups > 1 ? 1 + m.below((uint)(groups - 1)) : 1;
    auto coprime = [&](uint64_t a, uint64_t b) {
        while (b) { const uint64_t r = a % b; a = b; b = r; }
        return a == 1;
    };
    while (groups > 1 && !coprime(step, groups)) step = step % groups + 1;
    uint64_t number = groups ? m.below((uint)groups) : 0;
    for (uint64_t i = 0; i < groups && !m.failed; ++i, number = (number + step) % groups) {
        now.group = now.first_group + (uint32_t)number;
        m.group[0] = (uint)(number % grid[0]);
        m.group[1] = (uint)(number / grid[0] % grid[1]);
        m.group[2] = (uint)(number / grid[0] / grid[1]);
        for (Array* array : m.arrays) array->memory.name = nullptr;
        run_group();
    }
    for (Array* array : m.arrays) delete array;
    m.arrays.clear();
    m.running = false;
    if (!m.failed) return 0;
    snprintf(message, message_bytes, "%s", m.message.c_str());
    return 1;
}
