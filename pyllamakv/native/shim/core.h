// Declarations that all files of the shim share: errors, handles, and the copying of structs.
#pragma once

#include "plk.h"

#include "ggml.h"
#include "llama.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <vector>

// A destructor frees what its object has, also if an exception ends the creation halfway.

struct plk_model {
    llama_model *model = nullptr;
    plk_model_info info{};
    bool offloaded = false; // layers may be on devices other than the CPU
    // References by the handle and by each context: llama.cpp aborts if a model is freed before a
    // context that uses it.
    std::atomic<int> users{1};

    ~plk_model();
};

struct plk_adapter {
    plk_model *model = nullptr;
    void *lora = nullptr; // its type differs by release
    int32_t n_pairs = 0;
    std::atomic<int> users{1}; // the handle, and each context that uses it

    ~plk_adapter();
};

struct plk_context {
    plk_model *model = nullptr;
    llama_context *ctx = nullptr;
    plk_context_params asked{};
    bool guard = true;
    uint32_t n_batch = 0;
    uint32_t n_ubatch = 0;
    uint32_t n_seq_max = 0;
    int32_t positions = 0; // exclusive maximum
    bool separate = false; // each sequence has a stream of cells of its own
    bool causal = true;
    int32_t pooling = PLK_POOLING_MODEL; // in effect; PLK_POOLING_MODEL without embeddings
    int32_t graph_nodes = 0; // of the largest graph without adapters, if llama.cpp logged it
    std::vector<plk_adapter *> adapters;
    std::vector<float> scales;
    bool used_states = false; // a removed sequence may have left its recurrent state in the memory
    bool had_states = false;  // the memory had a recurrent state since the last clear
    // The assertion of llama.cpp that ended a call on this context. What that call left is unknown.
    std::string assertion;

    // Atomic: the abort callback runs in llama.cpp's threads, plk_cancel in any thread.
    std::atomic<bool> cancel{false};
    bool going = false; // plk_run is between two decodes: the next one must not reset `cancel`
    std::atomic<bool> armed{false}; // false outside a decode: polls must not abort a shift or move
    std::atomic<int64_t> limit{-1};
    std::atomic<int64_t> polls{0};
    std::atomic<int64_t> check_at{0}; // when the check of plk_interrupts is due, in nanoseconds
    std::atomic<bool> checking{false};

    // Buffers that each decode reuses; llama_batch requires one pointer per token.
    std::vector<int32_t> counts;
    std::vector<int32_t *> rows;
    std::vector<int8_t> flags;

    // Results of the last decode, empty if it failed: the places that have outputs, and the first
    // sequence of each place.
    std::vector<int32_t> outputs;
    std::vector<int32_t> places; // place -> 1 if it has an output
    std::vector<int32_t> owners;

    ~plk_context();
};

namespace plk {

namespace built {
extern const char *const variant;
extern const char *const probes;
} // namespace built

// Set the text that plk_last_error() returns in this thread, and return `code`.
int refuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// A failed assertion of llama.cpp, thrown instead of ending the process (assertions.cpp).
struct AssertionFailed : std::exception {
    const char *what() const noexcept override;
};

// While one exists, an assertion that fails in this thread throws AssertionFailed, except in a
// computation, for which other threads may wait.
struct AssertionTrap {
    AssertionTrap();
    ~AssertionTrap();
    AssertionTrap(const AssertionTrap &) = delete;
    AssertionTrap &operator=(const AssertionTrap &) = delete;
};

// Call a function of the caller during a computation: it may call this library for other contexts.
int32_t call_out(int32_t (*function)(void));

// Begin a decode: its polls call the check of plk_interrupts when it is due, if this is its thread.
void expect_interrupts(plk_context &context);

// Name the context that this thread's call is for: an assertion makes it unusable.
void serve(const plk_context *context);
// Return `code`, or PLK_EEXCEPTION with the last error set if an assertion failed in the call of
// this thread: llama.cpp catches some exceptions.
int settle(int code);

// Run `work` and convert any exception into a status, so that none reaches C.
template <typename Work> int guarded(Work work) noexcept {
    try {
        const AssertionTrap trap;
        return settle(work());
    } catch (const AssertionFailed &) {
        return settle(PLK_EEXCEPTION);
    } catch (const std::bad_alloc &) {
        return refuse(PLK_EMEMORY, "an allocation failed");
    } catch (const std::exception &error) {
        return refuse(PLK_EEXCEPTION, "%s", error.what());
    } catch (...) {
        return refuse(PLK_EEXCEPTION, "llama.cpp threw something that is no std::exception");
    }
}

// Copy the fields of the caller's struct that both sides have; the others keep their defaults.
template <typename Struct> int take(const Struct *theirs, Struct &mine, const char *name) {
    if (theirs == nullptr || theirs->size < sizeof(uint32_t)) {
        return refuse(PLK_EINVAL, "%s is NULL or its size is not set", name);
    }
    memcpy(&mine, theirs, std::min<size_t>(theirs->size, sizeof(Struct)));
    mine.size = sizeof(Struct);
    return PLK_OK;
}

// Copy `mine` into the caller's struct, up to the caller's size.
template <typename Struct> int give(const Struct &mine, Struct *theirs, const char *name) {
    if (theirs == nullptr || theirs->size < sizeof(uint32_t)) {
        return refuse(PLK_EINVAL, "%s is NULL or its size is not set", name);
    }
    const uint32_t size = theirs->size;
    memcpy(theirs, &mine, std::min<size_t>(size, sizeof(Struct)));
    theirs->size = size;
    return PLK_OK;
}

// Check the context of a call. Return PLK_OK or a PLK_E code.
inline int need(const plk_context *context) {
    if (context == nullptr) {
        return refuse(PLK_EINVAL, "the context is NULL");
    }
    if (!context->assertion.empty()) {
        return refuse(PLK_EEXCEPTION,
                      "an earlier call on this context failed an assertion of llama.cpp (%s): its "
                      "cells are unknown; free the context and create another one",
                      context->assertion.c_str());
    }
    if (context->checking.load(std::memory_order_relaxed)) {
        return refuse(PLK_EINVAL, "the context is in use by the decode that this call interrupts");
    }
    serve(context);
    return PLK_OK;
}

// Install the log callback and initialize llama.cpp, once per process.
void start();

// Return the first error that llama.cpp logged in this thread since `forget_logged`; "" if none.
const char *logged();
void forget_logged();
void remember_logged(const char *text);
// Return the largest number of nodes of a graph that llama.cpp logged since `forget_logged`, or 0.
int32_t logged_nodes();

// Drops what llama.cpp logs in this thread during its lifetime.
struct Muted {
    Muted();
    ~Muted();
};

// Release a reference to a model or an adapter; the last release frees it.
void release(plk_model *model);
void release(plk_adapter *adapter);

// Return whether a context uses flash attention: 1, 0, or -1 if unknown.
int32_t flash(const plk_context &context);

// Return whether this context's positions can be shifted without a failure.
bool can_shift(const plk_context &context);

// The cells of all caches, cache after cache.
struct Picture {
    std::vector<int32_t> pos;
    std::vector<uint64_t> seqs;
    size_t words = 1;
};
bool take_picture(plk_context &context, Picture &out);

// Exclusive maximum of positions. A sum of two positions cannot overflow, and a range without an
// end, which llama.cpp ends at INT32_MAX, includes all of them.
constexpr int32_t far_away = 1 << 30;
// Return whether any cell has a position of far_away or more.
bool strays(plk_context &context);
// Append the distinct positions of a sequence in all caches, ascending; return false if the cells
// cannot be read.
bool take_positions(plk_context &context, int32_t seq, std::vector<int32_t> &out);

} // namespace plk
