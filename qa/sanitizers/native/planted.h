// Planted faults that a sanitizer must report, inside an object of the library. PLK_PLANTED selects
// one when the library is loaded; without it, nothing happens.
#ifndef PLK_PLANTED_H
#define PLK_PLANTED_H
#include <climits>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace plk_planted {

inline __attribute__((noinline)) int heap(volatile int at) {
    volatile char *bytes = new char[8];
    bytes[at] = 1;
    const int read = bytes[at];
    delete[] const_cast<char *>(bytes);
    return read;
}

inline __attribute__((noinline)) int overflow(volatile int value) { return value + 1; }

inline __attribute__((noinline)) int shift(volatile int by) { return 1 << by; }

inline int shared_number;

inline __attribute__((noinline)) void touch() {
    for (int i = 0; i < 1000; ++i) {
        shared_number = shared_number + 1;
    }
}

inline int race() {
    std::thread one(touch);
    std::thread other(touch);
    one.join();
    other.join();
    return shared_number;
}

inline int run() {
    const char *name = std::getenv("PLK_PLANTED");
    if (name == nullptr) {
        return 0;
    }
    if (std::strcmp(name, "heap") == 0) {
        return heap(8);
    }
    if (std::strcmp(name, "overflow") == 0) {
        return overflow(INT_MAX);
    }
    if (std::strcmp(name, "shift") == 0) {
        return shift(33);
    }
    return std::strcmp(name, "race") == 0 ? race() : 0;
}

static const int ran = run();

} // namespace plk_planted
#endif
