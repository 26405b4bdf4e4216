// Preloaded into a process: operator new fails once, at a chosen call of the thread that chose it,
// and the allocations that were not freed are counted.
#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> live{0};
thread_local long calls = -1; // -1: not counted
thread_local long fails_at = -1;
} // namespace

void *operator new(std::size_t size) {
    if (calls >= 0 && calls++ == fails_at) {
        throw std::bad_alloc();
    }
    void *const found = std::malloc(size != 0 ? size : 1);
    if (found == nullptr) {
        throw std::bad_alloc();
    }
    ++live;
    return found;
}

void operator delete(void *place) noexcept {
    if (place != nullptr) {
        --live;
        std::free(place);
    }
}

void operator delete(void *place, std::size_t) noexcept { ::operator delete(place); }

extern "C" {

// Count the calls of this thread from 0, and let one of them fail; -1: none.
void failing_new_begin(long at) {
    fails_at = at;
    calls = 0;
}

// Stop counting and return the number of calls.
long failing_new_end() {
    const long found = calls;
    calls = fails_at = -1;
    return found;
}

long failing_new_live() { return live.load(); }

} // extern "C"
