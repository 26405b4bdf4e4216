// operator new and pthread_create() that inject the faults of faults.h. Include in one source file per program.
#pragma once

#include "faults.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

#include <dlfcn.h>
#include <pthread.h>

// number of started threads
static std::atomic<uint32_t> n_started(0);

// only allocations of the main thread are counted: the order of those in other threads is not deterministic
static const pthread_t main_thread = pthread_self();

void * operator new(std::size_t size) {
    void * res = pthread_equal(pthread_self(), main_thread) && fault() ? nullptr : std::malloc(size ? size : 1);
    if (!res) {
        throw std::bad_alloc();
    }
    return res;
}

void operator delete(void * p) noexcept { std::free(p); }
void operator delete(void * p, std::size_t) noexcept { std::free(p); }

extern "C" int pthread_create(pthread_t * thread, const pthread_attr_t * attr, void * (*f)(void *), void * x) {
    using type = int (*)(pthread_t *, const pthread_attr_t *, void * (*)(void *), void *);
    if (fault()) {
        return EAGAIN;
    }
    ++n_started;
    return ((type) dlsym(RTLD_NEXT, "pthread_create"))(thread, attr, f, x);
}
