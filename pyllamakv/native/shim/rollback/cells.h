// Releases that leave ghosts, or delete what they did not write, but whose cells are public: they
// are remembered before a decode and put back after a failed one. The data of cells that were
// occupied is untouched by a failed decode, so putting back what describes them is enough.
#pragma once

#include "groups.h"

#include <tuple>

namespace plk::rollback {

const uint64_t bits = 0;
const bool abortable = true;

// Defined by the candidate; NULL where the memory is no array of cells.
plk::Cache *cache_of(llama_context *ctx);

struct Cells : Saved {
    decltype(plk::Cache::cells) cells;
    uint32_t head = 0, used = 0, n = 0;
};

std::unique_ptr<Saved> save(plk_context &context) {
    const plk::Cache *cache = cache_of(context.ctx);
    if (cache == nullptr) {
        return nullptr;
    }
    auto saved = std::make_unique<Cells>();
    saved->cells = cache->cells;
    saved->head = cache->head;
    saved->used = cache->used;
    saved->n = cache->n;
    return saved;
}

// Whether cells moved: then the data moved as well, and it was a patched decode that did it, which
// undoes itself.
inline bool moved(const decltype(plk::Cache::cells) &before,
                  const decltype(plk::Cache::cells) &after) {
    for (size_t i = 0; i < before.size(); ++i) {
        const bool both = !before[i].is_empty() && !after[i].is_empty();
        if (both && (before[i].pos != after[i].pos || before[i].seq_id != after[i].seq_id)) {
            return true;
        }
    }
    return false;
}

void undo(plk_context &context, const llama_batch &, int, Saved *saved) {
    plk::Cache *cache = cache_of(context.ctx);
    auto *old = static_cast<Cells *>(saved);
    if (cache == nullptr || old == nullptr || moved(old->cells, cache->cells)) {
        return;
    }
    cache->cells = old->cells;
    cache->head = old->head;
    cache->used = old->used;
    cache->n = old->n;
}

} // namespace plk::rollback
