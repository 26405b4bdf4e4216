// What every file of the shim shares: errors, handles, and the rules for structs.
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
#include <vector>

struct plk_model {
    llama_model *model = nullptr;
    plk_model_info info{};
    bool offloaded = false; // layers may lie on other devices than the processor
    // The model and each of its contexts: llama.cpp aborts when a model goes before its contexts.
    std::atomic<int> users{1};
};

struct plk_context {
    plk_model *model = nullptr;
    llama_context *ctx = nullptr;
    plk_context_params asked{};
    bool guard = true;
    uint32_t n_batch = 0;
    uint32_t n_ubatch = 0;
    uint32_t n_seq_max = 0;
    bool causal = true;
    bool used_states = false; // a recurrent state lies where a removed sequence left it
    bool had_states = false;  // there was a recurrent state since the context was clear

    // The abort callback runs in llama.cpp's threads, plk_cancel in any.
    std::atomic<bool> cancel{false};
    bool going = false; // a cancel between two decodes of plk_run counts for the second
    std::atomic<bool> armed{false}; // a poll outside a decode must not abort a shift or a move
    std::atomic<int64_t> limit{-1};
    std::atomic<int64_t> polls{0};

    // Reused by each decode; llama_batch wants one pointer per token.
    std::vector<int32_t> counts;
    std::vector<int32_t *> rows;
    std::vector<int8_t> flags;

    // Of the last decode, if it succeeded: which places have outputs, and their first sequences.
    std::vector<int32_t> outputs;
    std::vector<int32_t> places; // place -> 1 if it has an output
    std::vector<int32_t> owners;
};

namespace plk {

namespace built {
extern const char *const variant;
extern const char *const probes;
} // namespace built

// Keep the text that plk_last_error() gives to this thread, and return `code`.
int refuse(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

// Run `work`; whatever it throws becomes a code, so that nothing crosses into C.
template <typename Work> int guarded(Work work) noexcept {
    try {
        return work();
    } catch (const std::bad_alloc &) {
        return refuse(PLK_EMEMORY, "an allocation failed");
    } catch (const std::exception &error) {
        return refuse(PLK_EEXCEPTION, "%s", error.what());
    } catch (...) {
        return refuse(PLK_EEXCEPTION, "llama.cpp threw something that is no std::exception");
    }
}

// Copy as much of the caller's struct as both sides know; the rest keeps the defaults in `mine`.
template <typename Struct> int take(const Struct *theirs, Struct &mine, const char *name) {
    if (theirs == nullptr || theirs->size < sizeof(uint32_t)) {
        return refuse(PLK_EINVAL, "%s is NULL or its size is not set", name);
    }
    memcpy(&mine, theirs, std::min<size_t>(theirs->size, sizeof(Struct)));
    mine.size = sizeof(Struct);
    return PLK_OK;
}

// Copy our answer into as much of a struct as the caller has room for.
template <typename Struct> int give(const Struct &mine, Struct *theirs, const char *name) {
    if (theirs == nullptr || theirs->size < sizeof(uint32_t)) {
        return refuse(PLK_EINVAL, "%s is NULL or its size is not set", name);
    }
    const uint32_t size = theirs->size;
    memcpy(theirs, &mine, std::min<size_t>(size, sizeof(Struct)));
    theirs->size = size;
    return PLK_OK;
}

inline int need(const plk_context *context) {
    return context ? PLK_OK : refuse(PLK_EINVAL, "the context is NULL");
}

// Install our log and start llama.cpp, once per process.
void start();

// The first error that llama.cpp logged in this thread since `forget_logged`; empty if none.
const char *logged();
void forget_logged();

// While one lives, what llama.cpp logs in this thread is dropped.
struct Muted {
    Muted();
    ~Muted();
};

// Let go of a model; the last user frees it.
void release(plk_model *model);

// Whether a context uses flash attention, as it decided: 1, 0, or -1 where nothing shows it.
int32_t flash(const plk_context &context);

// Whether a shift of this context's positions would end well.
bool can_shift(const plk_context &context);

// The cells of all caches, one after another.
struct Picture {
    std::vector<int32_t> pos;
    std::vector<uint64_t> seqs;
    size_t words = 1;
};
bool take_picture(plk_context &context, Picture &out);

// Positions stay below: no sum of two overflows, and a range that ends nowhere has them all, which
// for llama.cpp is one that ends before the largest number.
constexpr int32_t far_away = 1 << 30;
bool strays(plk_context &context); // whether any cell does not
// The positions of a sequence in all caches, each once, in their order; false where none are seen.
bool take_positions(plk_context &context, int32_t seq, std::vector<int32_t> &out);

} // namespace plk
