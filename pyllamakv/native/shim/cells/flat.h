// Caches that are one array of cells, each with a set of sequences (up to July 2025). The section
// defines `look`, which returns the location of the array.
#pragma once

#include "cells/state.h"

namespace plk::cells {

// Result of the section's `look`. `cache` is NULL if the memory is not such an array.
struct Look {
    plk::Cache *cache = nullptr;
    bool has_shift = false;
    bool do_defrag = false;
    bool v_trans = false;
    bool recurrent = false;
};
Look look(llama_context *ctx);

namespace flat {

inline uint64_t bytes_of(const std::vector<ggml_tensor *> &layers) {
    uint64_t bytes = 0;
    for (const ggml_tensor *tensor : layers) {
        bytes += tensor != nullptr ? ggml_nbytes(tensor) : 0;
    }
    return bytes;
}

inline bool on_host(const std::vector<ggml_tensor *> &layers) {
    return std::all_of(layers.begin(), layers.end(), [](const ggml_tensor *tensor) {
        return tensor == nullptr || ggml_backend_buffer_is_host(tensor->buffer);
    });
}

} // namespace flat

const uint64_t bits = PLK_CAP_CELLS;

Watch *const watch = nullptr;
const bool rounds_up = false;

bool needs_order(llama_context *) { return false; }

void describe(llama_context *ctx, plk_context_info &info) {
    const Look at = look(ctx);
    if (at.cache == nullptr) {
        info.memory = at.recurrent ? PLK_MEMORY_RECURRENT : PLK_MEMORY_OTHER;
        info.can_remove_partly = at.recurrent ? 0 : -1;
        info.n_streams = at.recurrent ? 0 : 1;
        return;
    }
    info.memory = PLK_MEMORY_ATTENTION;
    info.n_caches = 1;
    info.n_streams = 1;
    info.can_remove_partly = 1;
    info.contiguous_slots = 1;
    info.defrag = 1;
    info.v_transposed = at.v_trans ? 1 : 0;
}

int32_t count(llama_context *ctx) { return look(ctx).cache ? 1 : 0; }

int info(llama_context *ctx, int32_t, plk_cells_info &out) {
    const Look at = look(ctx);
    out.n_cells = static_cast<int32_t>(at.cache->size);
    out.used = static_cast<int32_t>(at.cache->used);
    out.head = static_cast<int32_t>(at.cache->head);
    out.has_shift = at.has_shift ? 1 : 0;
    out.n_layer = static_cast<int32_t>(at.cache->k_l.size());
    out.type_k = at.cache->k_l.empty() || !at.cache->k_l[0] ? -1 : at.cache->k_l[0]->type;
    out.type_v = at.cache->v_l.empty() || !at.cache->v_l[0] ? -1 : at.cache->v_l[0]->type;
    out.v_transposed = at.v_trans ? 1 : 0;
    out.host = flat::on_host(at.cache->k_l) && flat::on_host(at.cache->v_l) ? 1 : 0;
    out.bytes_k = flat::bytes_of(at.cache->k_l);
    out.bytes_v = flat::bytes_of(at.cache->v_l);
    return PLK_OK;
}

int read(llama_context *ctx, int32_t, int32_t, int32_t *pos, int32_t *shift, uint64_t *seqs,
         int32_t words) {
    const plk::Cache &cache = *look(ctx).cache;
    std::fill(seqs, seqs + size_t(cache.size) * words, 0);
    for (uint32_t i = 0; i < cache.size; ++i) {
        const auto &cell = cache.cells[i];
        const bool occupied = cell.pos >= 0 && !cell.seq_id.empty();
        pos[i] = occupied ? cell.pos : -1;
        shift[i] = occupied ? cell.delta : 0; // the delta of a free cell is stale
        for (const llama_seq_id seq : cell.seq_id) {
            if (occupied && seq >= 0 && seq < 64 * words) {
                seqs[size_t(i) * words + seq / 64] |= uint64_t(1) << (seq % 64);
            }
        }
    }
    return static_cast<int>(cache.size);
}

int pending(llama_context *ctx) {
    const Look at = look(ctx);
    return at.has_shift || at.do_defrag ? 1 : 0;
}

bool can_copy(llama_context *, int32_t, int32_t, int32_t, int32_t) { return true; }

Limits limits(llama_context *) { return {}; }

void set_options(llama_context *ctx, const llama_kv_defrag::options &options) {
    if (plk::Cache *cache = look(ctx).cache) {
        set_options_of(*cache, options, 0);
    }
}

void repair(llama_context *) {}

bool shifts_quantized(llama_context *) { return true; }

bool saves_sequences(llama_context *) { return true; }

int check_state(llama_context *ctx, const uint8_t *data, size_t length) {
    const Look at = look(ctx);
    if (at.cache == nullptr) {
        return check_states(data, length);
    }
    const auto n_values = static_cast<uint32_t>(at.cache->v_l.size());
    StateReader reader{data, length, at.cache->size, 1, false, 0, n_values};
    return reader.result(reader.cache());
}

} // namespace plk::cells
