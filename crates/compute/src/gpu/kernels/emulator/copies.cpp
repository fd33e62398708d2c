// What copies to threadgroup memory are under way, and which threads have waited for them.
#include "copies.h"

#include <vector>

namespace emulator {
namespace {

struct Copy {
    const Memory *to, *from;
    uint64_t to_at, from_at;
    uint bytes;
};

// Copies that arrive together: those of a phase, or those that a thread waits for.
struct Batch {
    std::vector<Copy> copies;
    bool arrived;
    // Whether what nothing has written arrives as numbers that are none, which show where they are not left out.
    bool shows;
    // By thread, the mark with which it has gone on after it had waited.
    std::vector<Mark> awaited;
};

const uint NONE = ~0u;

// By warp, how many of its barriers are behind what is known of it.
struct Known {
    uint32_t of[MOST_THREADS / 32];
    void join(const uint32_t* other) {
        for (uint i = 0; i < MOST_THREADS / 32; ++i) of[i] = of[i] < other[i] ? other[i] : of[i];
    }
};

struct Bar {
    const void* address;
    // Warps of a phase, and those that have not yet said what they copy.
    uint count, missing;
    // Phases that have passed; the batches of this one and of the one before.
    uint phase, batch, before;
    uint64_t expected;
    std::vector<uint> waiting;
    // By warp, what those that wait come after: of the phases that have passed, and with this one.
    Known passed, gathered;
};

struct Copies {
    // So many of a group; those behind are kept for later ones.
    std::vector<Batch> batches;
    uint begun;
    std::vector<Bar> bars;
    // By thread, the batch of its own copies, and those that have been committed and not awaited, the oldest first.
    std::vector<uint> own;
    std::vector<std::vector<uint>> groups;
};

thread_local Copies all;

uint new_batch() {
    if (all.begun == all.batches.size()) all.batches.push_back(Batch());
    Batch& batch = all.batches[all.begun];
    batch.copies.clear();
    batch.arrived = batch.shows = false;
    batch.awaited.assign(threads(), 0);
    return all.begun++;
}

// Its word is read where it is used, so that a barrier has to be between that and what makes it ready.
Bar& bar_at(void* address) {
    Memory& memory = memory_at(address, 8, false);
    check(memory, (uint64_t)((uint8_t*)address - memory.data), 8, false);
    for (Bar& bar : all.bars)
        if (bar.address == address) return bar;
    fail("%s: a counter of copies that is not ready", memory.name);
}

// Bytes that nothing has written may be copied, and count as such where they arrive.
void check_source(Memory& memory, uint64_t at, uint bytes) {
    if (at + bytes > memory.bytes) fail_access(memory, at, bytes, false);
    for (uint64_t i = at; i < at + bytes; ++i)
        if (memory.written[i]) check(memory, i, 1, false);
}

void start(uint batch, void* to, const void* from, uint bytes, uint unit) {
    Memory& target = memory_at(to, bytes, true);
    Memory* const source = from ? &memory_at(from, bytes, false) : nullptr;
    const uint64_t to_at = (uint64_t)((uint8_t*)to - target.data);
    const uint64_t from_at = source ? (uint64_t)((const uint8_t*)from - source->data) : 0;
    if (!target.element || (source && source->element))
        fail("%s: a copy that is not one from device to threadgroup memory", target.name);
    if (to_at % unit || from_at % unit || bytes % unit)
        fail("%s: a copy of %u bytes from offset %llu to %llu, not multiples of %u", target.name, bytes,
             (unsigned long long)from_at, (unsigned long long)to_at, unit);
    if (source) check_source(*source, from_at, bytes);
    for (uint64_t i = to_at; i < to_at + bytes; i += target.element) {
        check(target, i, target.element, true);
        target.writes[i / target.element] = COPIED | batch;
    }
    memset(target.data + to_at, 0xcd, bytes);
    all.batches[batch].copies.push_back(Copy{&target, source, to_at, from_at, bytes});
}

// Brings what was copied, with the mark that elements then have.
void arrive(Batch& batch, Mark mark) {
    for (const Copy& copy : batch.copies) {
        if (copy.from) memcpy(copy.to->data + copy.to_at, copy.from->data + copy.from_at, copy.bytes);
        else memset(copy.to->data + copy.to_at, 0, copy.bytes);
        const uint element = copy.to->element;
        for (uint i = 0; i < copy.bytes; i += element) {
            const bool is_known = !copy.from || all_written(copy.from->written + copy.from_at + i, element);
            copy.to->writes[(copy.to_at + i) / element] = is_known || batch.shows ? mark : 0;
            if (!is_known && batch.shows) memset(copy.to->data + copy.to_at + i, 0xff, element);
        }
    }
    batch.arrived = true;
}

// Ends a phase all of whose warps have said what they copy.
void end_phase(Bar& bar) {
    Batch& batch = all.batches[bar.batch];
    uint64_t bytes = 0;
    for (const Copy& copy : batch.copies) bytes += copy.bytes;
    if (bytes != bar.expected)
        fail("copies of %llu bytes of which %llu are expected", (unsigned long long)bytes,
             (unsigned long long)bar.expected);
    arrive(batch, COPIED | bar.batch);
    bar.before = bar.batch;
    bar.batch = new_batch();
    bar.missing = bar.count;
    bar.expected = 0;
    bar.passed = bar.gathered;
    ++bar.phase;
}

// One of those that a phase waits for has come.
void come(Bar& bar) {
    if (bar.missing == 0)
        fail("copies of a phase more than %u, or of the next one before it has been awaited", bar.count);
    if (--bar.missing > 0) return;
    // Without copies it ends here, else when they are awaited.
    if (bar.expected == 0) end_phase(bar);
    for (const uint thread : bar.waiting) wake(thread);
    bar.waiting.clear();
}

} // namespace

void expect_copies(void* address, uint count) {
    Memory& memory = memory_at(address, 8, true);
    check(memory, (uint64_t)((uint8_t*)address - memory.data), 8, true);
    for (const Bar& bar : all.bars)
        if (bar.address == address) fail("%s: a counter of copies that is made ready twice", memory.name);
    all.bars.push_back(Bar{address, count, count, 0, new_batch(), NONE, 0, {}, {}, {}});
}

void expect_bytes(void* address, uint bytes) {
    Bar& bar = bar_at(address);
    bar.expected += bytes;
    come(bar);
}

void arrive(void* address) {
    Bar& bar = bar_at(address);
    uint32_t* const own = known_by(now.thread);
    own[now.thread / 32] = now.warp_epoch;
    bar.gathered.join(own);
    come(bar);
}

void arrive_with(void* address, uint bytes) {
    // What the thread does from here on comes later.
    begin_warp_epoch();
    bar_at(address).expected += bytes;
    arrive(address);
}

void expect_more(void* address, uint bytes) { bar_at(address).expected += bytes; }

void await_arrivals(void* address, uint parity) {
    await_copies(address, parity);
    Known known;
    uint32_t* const own = known_by(now.thread);
    memcpy(known.of, own, sizeof known.of);
    known.join(bar_at(address).passed.of);
    memcpy(own, known.of, sizeof known.of);
}

void copy_bulk(void* to, const void* from, uint bytes, void* address) {
    start(bar_at(address).batch, to, from, bytes, 16);
}

void await_copies(void* address, uint parity) {
    bar_at(address);
    for (;;) {
        Bar& bar = bar_at(address);
        if (bar.phase % 2 != parity) {
            if (bar.before != NONE) all.batches[bar.before].awaited[now.thread] = now.own_mark();
            return;
        }
        if (bar.missing == 0) {
            end_phase(bar);
            continue;
        }
        bar.waiting.push_back(now.thread);
        sleep();
    }
}

void copy_async(void* to, const void* from, uint bytes) {
    all.own.resize(threads(), NONE);
    uint& own = all.own[now.thread];
    if (own == NONE) own = new_batch();
    start(own, to, from, bytes, bytes);
}

void copy_in_group(void* to, const void* from, uint bytes) {
    copy_async(to, from, bytes);
    all.batches[all.own[now.thread]].shows = true;
}

void commit() {
    all.own.resize(threads(), NONE);
    all.groups.resize(threads());
    // Groups may be empty.
    all.groups[now.thread].push_back(all.own[now.thread]);
    all.own[now.thread] = NONE;
}

void await_groups(uint left) {
    all.groups.resize(threads());
    std::vector<uint>& groups = all.groups[now.thread];
    while (groups.size() > left) {
        if (groups.front() != NONE) arrive(all.batches[groups.front()], now.own_mark());
        groups.erase(groups.begin());
    }
}

void await_async() {
    if (now.thread >= all.own.size() || all.own[now.thread] == NONE) return;
    arrive(all.batches[all.own[now.thread]], now.own_mark());
    all.own[now.thread] = NONE;
}

void forget_copies() {
    all.begun = 0;
    all.bars.clear();
    all.own.clear();
    all.groups.clear();
}

bool all_copies_awaited() {
    for (uint i = 0; i < all.begun; ++i)
        if (!all.batches[i].arrived && !all.batches[i].copies.empty()) return false;
    return true;
}

bool has_arrived(Mark copied) { return all.batches[copied & ~COPIED].arrived; }

bool comes_after_copies(Mark copied) {
    const Batch& batch = all.batches[copied & ~COPIED];
    if (!batch.arrived) return false;
    if (now.thread < batch.awaited.size() && batch.awaited[now.thread]) return true;
    for (const Mark mark : batch.awaited)
        if (mark && !races(mark, now.own_mark())) return true;
    return false;
}

} // namespace emulator
