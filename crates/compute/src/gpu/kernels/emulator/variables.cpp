// Variables that a group's threads share where the text declares them as CUDA C++ does: they are the processor's thread's own, which
// runs one group at a time.
#include "machine.h"

#include <algorithm>
#include <vector>

#if defined(__linux__)
#include <link.h>

// What dispatches ask for, of which a group has `asked_bytes`.
const uint64_t MOST_ASKED = 227 << 10;
alignas(128) thread_local uint8_t moeflux_asked[MOST_ASKED];
// What makes numbers of addresses, which are then no addresses.
const uint32_t NUMBERS = 1u << 31;

namespace emulator {

uint32_t shared_number(const void* p) { return (uint32_t)((const uint8_t*)p - moeflux_asked) + NUMBERS; }
void* at_shared_number(uint32_t number) { return moeflux_asked + (int32_t)(number - NUMBERS); }

namespace {

// Memory of which each byte knows who wrote it.
struct Variables {
    Memory memory;
    std::vector<Mark> writes, reads;

    void begin(const char* name, uint8_t* data, uint64_t bytes) {
        writes.assign(bytes, 0);
        reads.assign(bytes, 0);
        memory = Memory{data, nullptr, nullptr, bytes, name, 0, 1, writes.data(), reads.data()};
    }
};

struct All {
    Variables asked, others;
    // Bytes of `asked` that the group may have used.
    uint64_t asked_bytes;
    // Pages of `others` that the group has used, each once.
    std::vector<bool> used;
    std::vector<uint64_t> pages;
    bool is_known;
};
thread_local All all;

const uint64_t PAGE = 256;
// Bytes of an access at most.
const uint64_t MOST_AT_ONCE = 16;

// The program's variables of the running thread.
int find_program(struct dl_phdr_info* info, size_t, void*) {
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type != PT_TLS || !info->dlpi_tls_data) continue;
        all.others.begin("variables", (uint8_t*)info->dlpi_tls_data, header.p_memsz);
        const uint8_t* const asked = moeflux_asked;
        if (asked >= all.others.memory.data && asked < all.others.memory.data + header.p_memsz) return 1;
    }
    return 0;
}

void find_all() {
    all.is_known = true;
    if (!dl_iterate_phdr(find_program, nullptr)) all.others.memory.bytes = 0;
    all.asked.begin("dynamic", moeflux_asked, MOST_ASKED);
    all.used.assign(all.others.memory.bytes / PAGE + 2, false);
}

} // namespace

Memory* variable_at(const uint8_t* address) {
    if (!all.is_known) find_all();
    const uint64_t of_asked = (uint64_t)(address - moeflux_asked);
    if (of_asked < MOST_ASKED) {
        all.asked_bytes = all.asked.memory.bytes = asked_bytes();
        return &all.asked.memory;
    }
    Memory& others = all.others.memory;
    const uint64_t at = (uint64_t)(address - others.data);
    if (at >= others.bytes) return nullptr;
    for (uint64_t page = at / PAGE; page <= (at + MOST_AT_ONCE - 1) / PAGE; ++page) {
        if (all.used[page]) continue;
        all.used[page] = true;
        all.pages.push_back(page);
    }
    return &others;
}

void forget_variables() {
    if (!all.is_known) return;
    const auto clear = [](Variables& of, uint64_t first, uint64_t end) {
        end = std::min(end, of.memory.bytes);
        std::fill(of.writes.begin() + first, of.writes.begin() + end, 0);
        std::fill(of.reads.begin() + first, of.reads.begin() + end, 0);
    };
    clear(all.asked, 0, all.asked_bytes);
    all.asked_bytes = 0;
    for (const uint64_t page : all.pages) {
        clear(all.others, page * PAGE, page * PAGE + PAGE);
        all.used[page] = false;
    }
    all.pages.clear();
}

} // namespace emulator
#else
namespace emulator {
Memory* variable_at(const uint8_t*) { return nullptr; }
void forget_variables() {}
} // namespace emulator
#endif
