// Public cells in a class of their own (0.3.9, b5415).
#include "cells/private.h"
#include "cells/state_plain.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

const uint64_t plk::cells::bits = PLK_CAP_CELLS;

namespace plk {
using Cache = llama_kv_cache_unified;
PLK_PRIVATE(HasShift, Cache::has_shift);
PLK_PRIVATE(DoDefrag, Cache::do_defrag);
PLK_PRIVATE(Transposed, Cache::v_trans);
PLK_PRIVATE(Pending, Cache::pending);
} // namespace plk

namespace {

using plk::Cache;

Cache *cache_of(llama_context *ctx) { return dynamic_cast<Cache *>(llama_get_kv_self(ctx)); }

uint64_t bytes_of(const std::vector<ggml_tensor *> &layers) {
    uint64_t bytes = 0;
    for (const ggml_tensor *tensor : layers) {
        bytes += tensor != nullptr ? ggml_nbytes(tensor) : 0;
    }
    return bytes;
}

bool on_host(const std::vector<ggml_tensor *> &layers) {
    return std::all_of(layers.begin(), layers.end(), [](const ggml_tensor *tensor) {
        return tensor == nullptr || ggml_backend_buffer_is_host(tensor->buffer);
    });
}

} // namespace

void plk::cells::describe(llama_context *ctx, plk_context_info &info) {
    const Cache *cache = cache_of(ctx);
    if (cache == nullptr) {
        const bool recurrent = dynamic_cast<llama_kv_cache_recurrent *>(llama_get_kv_self(ctx));
        info.memory = recurrent ? PLK_MEMORY_RECURRENT : PLK_MEMORY_OTHER;
        info.can_remove_partly = recurrent ? 0 : -1;
        return;
    }
    info.memory = PLK_MEMORY_ATTENTION;
    info.n_caches = 1;
    info.can_remove_partly = 1;
    info.contiguous_slots = 1;
    info.defrag = 1;
    info.v_transposed = cache->*plk_member(Transposed{}) ? 1 : 0;
}

int32_t plk::cells::count(llama_context *ctx) { return cache_of(ctx) ? 1 : 0; }

int plk::cells::info(llama_context *ctx, int32_t, plk_cells_info &out) {
    const Cache &cache = *cache_of(ctx);
    out.n_cells = static_cast<int32_t>(cache.size);
    out.used = static_cast<int32_t>(cache.used);
    out.head = static_cast<int32_t>(cache.head);
    out.has_shift = cache.*plk_member(HasShift{}) ? 1 : 0;
    out.n_layer = static_cast<int32_t>(cache.k_l.size());
    out.type_k = cache.k_l.empty() || !cache.k_l[0] ? -1 : cache.k_l[0]->type;
    out.type_v = cache.v_l.empty() || !cache.v_l[0] ? -1 : cache.v_l[0]->type;
    out.v_transposed = cache.*plk_member(Transposed{}) ? 1 : 0;
    out.host = on_host(cache.k_l) && on_host(cache.v_l) ? 1 : 0;
    out.bytes_k = bytes_of(cache.k_l);
    out.bytes_v = bytes_of(cache.v_l);
    return PLK_OK;
}

int plk::cells::read(llama_context *ctx, int32_t, int32_t, int32_t *pos, int32_t *shift,
                     uint64_t *seqs, int32_t words) {
    const Cache &cache = *cache_of(ctx);
    std::fill(seqs, seqs + size_t(cache.size) * words, 0);
    for (uint32_t i = 0; i < cache.size; ++i) {
        const auto &cell = cache.cells[i];
        const bool occupied = cell.pos >= 0 && !cell.seq_id.empty();
        pos[i] = occupied ? cell.pos : -1;
        shift[i] = occupied ? cell.delta : 0; // a freed cell keeps its delta; it means nothing
        for (const llama_seq_id seq : cell.seq_id) {
            if (occupied && seq >= 0 && seq < 64 * words) {
                seqs[size_t(i) * words + seq / 64] |= uint64_t(1) << (seq % 64);
            }
        }
    }
    return static_cast<int>(cache.size);
}

int plk::cells::pending(llama_context *ctx) {
    const Cache *cache = cache_of(ctx);
    return cache && (cache->*plk_member(HasShift{}) || cache->*plk_member(DoDefrag{})) ? 1 : 0;
}

bool plk::cells::can_copy(llama_context *, int32_t, int32_t, int32_t, int32_t) { return true; }

void plk::cells::settle(llama_context *ctx) {
    // A restore keeps its ranges, and the next failure would wipe whatever lies there by then.
    Cache *cache = cache_of(ctx);
    if (cache && !(cache->*plk_member(Pending{})).ranges.empty()) {
        cache->commit();
    }
}

int plk::cells::check_state(llama_context *ctx, const uint8_t *data, size_t length) {
    const Cache *cache = cache_of(ctx);
    return cache ? check_plain_state(data, length, cache->size) : 1;
}
