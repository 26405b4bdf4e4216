// Memory as a tree of objects, some of which are caches (b5590 and later). The section defines
// plk::Cache, plk::Iswa, and the access to one cache:
//
//   n_stream, cells_of, head_of, layers_of, transposed
//   copies          whether a copy between streams is pending
//   contiguous      whether a micro-batch needs contiguous cells
//   counts_streams  whether a state begins with the number of streams
//   splits_across   whether a hybrid memory splits batches without regard to streams
#pragma once

#include "cells/state.h"

#include "llama-context.h"
#if __has_include("llama-memory-hybrid.h")
#include "llama-memory-hybrid.h"
#endif
#if __has_include("llama-memory-recurrent.h")
#include "llama-memory-recurrent.h"
#else
#include "llama-kv-cache-recurrent.h" // through b5640
using llama_memory_recurrent = llama_kv_cache_recurrent;
#endif
#ifndef LLAMA_MAX_SEQ
#define LLAMA_MAX_SEQ LLAMA_MAX_PARALLEL_SEQUENCES // through b5640
#endif
#if __has_include("llama-memory-hybrid-iswa.h")
#include "llama-memory-hybrid-iswa.h"
#endif
#if __has_include("llama-kv-cache-dsa.h")
#include "llama-kv-cache-dsa.h"
#endif
#if __has_include("llama-kv-cache-dsa-iswa.h")
#include "llama-kv-cache-dsa-iswa.h"
#endif
#if __has_include("llama-kv-cache-msa.h")
#include "llama-kv-cache-msa.h"
#endif
#if __has_include("llama-kv-cache-dsv4.h")
#include "llama-kv-cache-dsv4.h"
#endif
#if __has_include("llama-memory-hybrid-idx.h")
#include "llama-memory-hybrid-idx.h"
#endif

namespace plk {

// One stream of a cache.
struct Stream {
    Cache *cache = nullptr;
    uint32_t index = 0;
    bool swa = false;
};

struct Tree {
    int32_t kind = PLK_MEMORY_NONE;
    std::vector<Stream> caches; // stream 0 of each
    cells::Limits limits;
};

// Return whether the compressed rows of one sequence can be cleared; through 0.3.33, all are.
template <typename State> auto clears_one(State &state, int) -> decltype(state.clear(0, true), true) {
    return true;
}
template <typename State> bool clears_one(State &, long) { return false; }

// Return the memory of a context: llama_get_memory exists since b5640.
template <typename Context> auto memory_of(Context *ctx, int) -> decltype(llama_get_memory(ctx)) {
    return llama_get_memory(ctx);
}
template <typename Context> llama_memory_i *memory_of(Context *ctx, long) {
    return llama_get_kv_self(ctx);
}

inline Tree tree_of(llama_context *ctx) {
    Tree tree;
    llama_memory_i *memory = memory_of(ctx, 0);
    const auto both = [&](Iswa *pair) {
        tree.caches = {{pair->get_base(), 0, false}, {pair->get_swa(), 0, true}};
    };
    if (memory == nullptr) {
        return tree;
    }
    if (auto *cache = dynamic_cast<Cache *>(memory)) {
        tree.kind = PLK_MEMORY_ATTENTION;
        tree.caches = {{cache, 0, false}};
    } else if (auto *pair = dynamic_cast<Iswa *>(memory)) {
        tree.kind = PLK_MEMORY_SWA;
        both(pair);
    } else if (dynamic_cast<llama_memory_recurrent *>(memory)) {
        tree.kind = PLK_MEMORY_RECURRENT;
#if __has_include("llama-memory-hybrid.h")
    } else if (auto *hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        tree.kind = PLK_MEMORY_HYBRID;
        tree.caches = {{hybrid->get_mem_attn(), 0, false}};
#endif
#if __has_include("llama-memory-hybrid-iswa.h")
    } else if (auto *hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        tree.kind = PLK_MEMORY_HYBRID;
        both(hybrid->get_mem_attn());
#endif
#if __has_include("llama-kv-cache-dsv4.h")
    } else if (auto *memory4 = dynamic_cast<llama_kv_cache_dsv4 *>(memory)) {
        // Cells of tokens, and rows that summarize several tokens: like a state, these cannot go
        // back to an earlier token.
        tree.kind = PLK_MEMORY_HYBRID;
        tree.limits.compressed = true;
        tree.limits.positions = static_cast<int32_t>(llama_n_ctx_seq(ctx));
        tree.limits.separates_sequences = clears_one(*memory4->get_csa_state(), 0);
        both(memory4->get_raw());
#endif
    } else {
        // Caches with an indexer that has the same cells.
        tree.kind = PLK_MEMORY_OTHER;
#if __has_include("llama-kv-cache-dsa.h")
        if (auto *indexed = dynamic_cast<llama_kv_cache_dsa *>(memory)) {
            tree.caches = {{indexed->get_mla(), 0, false}};
            tree.limits.shifts = false;
        }
#endif
#if __has_include("llama-kv-cache-dsa-iswa.h")
        if (auto *indexed = dynamic_cast<llama_kv_cache_dsa_iswa *>(memory)) {
            tree.caches = {{indexed->get_dsa()->get_mla(), 0, false}, {indexed->get_swa(), 0, true}};
            tree.limits.shifts = false;
        }
#endif
#if __has_include("llama-kv-cache-msa.h")
        if (auto *indexed = dynamic_cast<llama_kv_cache_msa *>(memory)) {
            tree.caches = {{indexed->get_base(), 0, false}};
        }
#endif
    }
    return tree;
}

// Return all streams, cache after cache; the index is the `cache` argument of plk_cells_read.
inline std::vector<Stream> streams_of(llama_context *ctx) {
    std::vector<Stream> all;
    for (const Stream &first : tree_of(ctx).caches) {
        for (uint32_t s = 0; s < n_stream(*first.cache); ++s) {
            all.push_back({first.cache, s, first.swa});
        }
    }
    return all;
}

// Return the number of streams of each cache; 0 if this kind of memory has no cells, -1 if the
// cells cannot be read or the caches differ.
inline int32_t streams_in(const Tree &tree) {
    if (tree.caches.empty()) {
        return tree.kind == PLK_MEMORY_NONE || tree.kind == PLK_MEMORY_RECURRENT ? 0 : -1;
    }
    const uint32_t first = n_stream(*tree.caches.front().cache);
    const bool alike = std::all_of(tree.caches.begin(), tree.caches.end(), [&](const Stream &one) {
        return n_stream(*one.cache) == first;
    });
    return alike ? static_cast<int32_t>(first) : -1;
}

} // namespace plk

namespace plk::cells {

// Return whether the cache writes additional data per cell into a state.
template <typename Any> auto extended(const Any &cache, int) -> decltype(cache.has_cell_ext()) {
    return cache.has_cell_ext();
}
template <typename Any> bool extended(const Any &, long) { return false; }

// Return whether a shift of quantized keys is safe. In releases that may rotate keys before
// quantization, a shift always uses the rotation matrix and dereferences a null pointer if the
// cache has none (0.3.20 through 0.3.36).
template <typename Any>
auto rotates(const Any &cache, int) -> decltype(cache.build_input_k_rot(nullptr), bool()) {
    const std::unique_ptr<ggml_context, void (*)(ggml_context *)> scratch(
        ggml_init({4 * ggml_tensor_overhead(), nullptr, true}), ggml_free);
    return scratch && cache.build_input_k_rot(scratch.get()) != nullptr;
}
template <typename Any> bool rotates(const Any &, long) { return true; }

const uint64_t bits = PLK_CAP_CELLS;

Watch *const watch = nullptr;
const bool rounds_up = !counts_streams; // the trees without streams

void describe(llama_context *ctx, plk_context_info &info) {
    const Tree tree = tree_of(ctx);
    info.memory = tree.kind;
    info.n_caches = static_cast<int32_t>(streams_of(ctx).size());
    info.n_streams = streams_in(tree);
    // -1 for a sliding window: its cells may be gone.
    info.can_remove_partly = tree.kind == PLK_MEMORY_ATTENTION                             ? 1
        : tree.kind == PLK_MEMORY_RECURRENT || tree.kind == PLK_MEMORY_HYBRID ? 0
                                                                              : -1;
    info.defrag = !tree.caches.empty();
    for (const Stream &stream : tree.caches) {
        info.contiguous_slots = std::max(info.contiguous_slots, contiguous(*stream.cache) ? 1 : 0);
        info.n_swa = stream.swa ? llama_model_n_swa(llama_get_model(ctx)) : info.n_swa;
        info.v_transposed = transposed(*stream.cache) ? 1 : 0;
        // llama.cpp's own defragmentation asserts that there is one stream; a patch may not.
        info.defrag = info.defrag && n_stream(*stream.cache) == 1;
    }
}

bool needs_order(llama_context *ctx) {
    const Tree tree = splits_across ? tree_of(ctx) : Tree{};
    return tree.kind == PLK_MEMORY_HYBRID && streams_in(tree) != 1;
}

int32_t count(llama_context *ctx) { return static_cast<int32_t>(streams_of(ctx).size()); }

int info(llama_context *ctx, int32_t number, plk_cells_info &out) {
    const Stream at = streams_of(ctx)[static_cast<size_t>(number)];
    const auto &cells = cells_of(*at.cache, at.index);
    out.stream = static_cast<int32_t>(at.index);
    out.swa = at.swa ? 1 : 0;
    out.n_cells = static_cast<int32_t>(cells.size());
    out.used = static_cast<int32_t>(cells.get_used());
    out.head = static_cast<int32_t>(head_of(*at.cache, at.index));
    out.has_shift = cells.get_has_shift() ? 1 : 0;
    out.v_transposed = transposed(*at.cache) ? 1 : 0;
    out.type_k = out.type_v = -1;
    out.host = 1;
    for (const auto &layer : layers_of(*at.cache)) {
        out.n_layer += 1;
        for (const bool is_k : {true, false}) {
            const ggml_tensor *tensor = is_k ? layer.k : layer.v;
            if (tensor == nullptr) {
                continue;
            }
            (is_k ? out.type_k : out.type_v) = tensor->type;
            (is_k ? out.bytes_k : out.bytes_v) += ggml_nbytes(tensor) / n_stream(*at.cache);
            out.host = out.host && ggml_backend_buffer_is_host(tensor->buffer);
        }
    }
    return PLK_OK;
}

int read(llama_context *ctx, int32_t number, int32_t, int32_t *pos, int32_t *shift, uint64_t *seqs,
         int32_t words) {
    const Stream at = streams_of(ctx)[static_cast<size_t>(number)];
    const auto &cells = cells_of(*at.cache, at.index);
    const auto n_seq = std::min<int32_t>(64 * words, static_cast<int32_t>(LLAMA_MAX_SEQ));
    std::fill(seqs, seqs + size_t(cells.size()) * words, 0);
    for (uint32_t i = 0; i < cells.size(); ++i) {
        const bool occupied = !cells.is_empty(i);
        pos[i] = occupied ? cells.pos_get(i) : -1;
        shift[i] = occupied ? cells.get_shift(i) : 0;
        for (int32_t seq = 0; occupied && seq < n_seq; ++seq) {
            if (cells.seq_has(i, seq)) {
                seqs[size_t(i) * words + seq / 64] |= uint64_t(1) << (seq % 64);
            }
        }
    }
    return static_cast<int>(cells.size());
}

int pending(llama_context *ctx) {
    for (const Stream &stream : streams_of(ctx)) {
        if (cells_of(*stream.cache, stream.index).get_has_shift() || copies(*stream.cache)) {
            return 1;
        }
    }
    return 0;
}

bool can_copy(llama_context *ctx, int32_t from, int32_t to, int32_t p0, int32_t p1) {
    for (const Stream &stream : tree_of(ctx).caches) {
        if (from != to && n_stream(*stream.cache) > 1 && (p0 > 0 || p1 >= 0)) {
            return false;
        }
    }
    return true;
}

Limits limits(llama_context *ctx) { return tree_of(ctx).limits; }

void set_options(llama_context *ctx, const llama_kv_defrag::options &options) {
    for (const Stream &stream : tree_of(ctx).caches) {
        set_options_of(*stream.cache, options, 0);
    }
}

// Return the cells of a stream, for a change.
inline auto &changeable(const Stream &stream) {
    const auto &cells = cells_of(*stream.cache, stream.index);
    return const_cast<std::remove_cv_t<std::remove_reference_t<decltype(cells)>> &>(cells);
}

// Copy what cells store about their tokens, in releases in which they do.
template <typename Cells>
auto copy_extras(const Cells &from, Cells &to, int) -> decltype(to.ext_set(0, from.ext_get(0))) {
    for (uint32_t i = 0; i < std::min(from.size(), to.size()); ++i) {
        if (!from.is_empty(i) && !to.is_empty(i)) {
            to.ext_set(i, from.ext_get(i));
        }
    }
}
template <typename Cells> void copy_extras(const Cells &, Cells &, long) {}

void repair(llama_context *ctx) {
    for (const Stream &stream : streams_of(ctx)) {
        // A cache without layers has no keys to shift, and llama.cpp aborts when it sets the input
        // of the empty graph.
        if (layers_of(*stream.cache).empty() && changeable(stream).get_has_shift()) {
            changeable(stream).reset_shift();
        }
#if __has_include("llama-memory-hybrid-idx.h")
        // b11549 restores the row and column of a token in the cache, but in its indexer only if the
        // model has n-gram embeddings. Both have the same cells.
        auto *hybrid = dynamic_cast<llama_memory_hybrid_idx *>(llama_get_memory(ctx));
        if (hybrid != nullptr && hybrid->get_mem_idx() != nullptr) {
            copy_extras(changeable(stream),
                        changeable({hybrid->get_mem_idx(), stream.index, false}), 0);
        }
#endif
    }
}

bool shifts_quantized(llama_context *ctx) {
    const Tree tree = tree_of(ctx);
    return std::all_of(tree.caches.begin(), tree.caches.end(),
                       [](const Stream &stream) { return rotates(*stream.cache, 0); });
}

// Through 0.3.14, before streams, a state treats all layers of a hybrid model as recurrent.
bool saves_sequences(llama_context *ctx) {
    return counts_streams || tree_of(ctx).kind != PLK_MEMORY_HYBRID;
}

int check_state(llama_context *ctx, const uint8_t *data, size_t length) {
    const Tree tree = tree_of(ctx);
    // Some kinds write data before the cells, or cells of several caches: only llama.cpp validates
    // these.
    const bool states = tree.kind == PLK_MEMORY_RECURRENT || tree.kind == PLK_MEMORY_HYBRID;
    if ((tree.kind != PLK_MEMORY_ATTENTION && tree.kind != PLK_MEMORY_SWA && !states) ||
        tree.limits.compressed) {
        return 1;
    }
    const auto rope = static_cast<int>(llama_model_rope_type(llama_get_model(ctx)));
    if (rope >= 0 && (rope & 8)) {
        return 1; // the state also has multi-dimensional positions per cell
    }
    StateReader reader{data, length, 0, 1, counts_streams, 1, 0};
    reader.rotations = LLAMA_STATE_SEQ_VERSION >= 4; // b11549
#ifdef LLAMA_STATE_SEQ_FLAGS_ON_DEVICE
    reader.at = 2 * sizeof(uint32_t); // skip the magic number and the id of the saved sequence
    if (length < reader.at) {
        return reader.result(reader.bad("it ends too early"));
    }
#endif
    for (const Stream &stream : tree.caches) {
        if (extended(*stream.cache, 0)) {
            return 1;
        }
        reader.n_values = 0;
        for (const auto &layer : layers_of(*stream.cache)) {
            reader.n_values += layer.v != nullptr;
        }
        reader.n_cells = static_cast<uint32_t>(cells_of(*stream.cache, 0).size());
        reader.n_stream = n_stream(*stream.cache);
        const uint64_t before = reader.found;
        if (!reader.cache()) {
            return states ? 1 : reader.result(false);
        }
        if (!counts_streams && reader.found == before && before > 0) {
            return reader.result(reader.bad("a part of it is empty"));
        }
    }
    // The cells are followed by the states.
    if (states) {
        const int kind = check_states(data + reader.at, length - reader.at);
        return kind == 2 && reader.found > 0 ? 1 : kind;
    }
    return reader.result(true);
}

} // namespace plk::cells
