// Library to preload: operator new fails once, at a selected call of the thread that selected it.
// Allocations that were not freed are counted.
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
    void *const block = std::malloc(size != 0 ? size : 1);
    if (block == nullptr) {
        throw std::bad_alloc();
    }
    ++live;
    return block;
}

void operator delete(void *block) noexcept {
    if (block != nullptr) {
        --live;
        std::free(block);
    }
}

void operator delete(void *block, std::size_t) noexcept { ::operator delete(block); }

extern "C" {

// Start to count the calls of this thread; the call with index `at` fails (-1: none).
void failing_new_begin(long at) {
    fails_at = at;
    calls = 0;
}

// Stop counting and return the number of calls.
long failing_new_end() {
    const long n_calls = calls;
    calls = fails_at = -1;
    return n_calls;
}

long failing_new_live() { return live.load(); }

} // extern "C"
