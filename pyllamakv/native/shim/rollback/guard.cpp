// llama_decode undoes every failure (0.3.9, b5415), but keeps the ranges that it undid: the next
// failure would remove the cells that occupy these ranges then.
#include "cells/private.h"
#include "groups.h"

#include "llama-kv-cache.h"

namespace plk {
PLK_PRIVATE(Pending, llama_kv_cache_unified::pending);
} // namespace plk

const uint64_t plk::rollback::bits = PLK_CAP_ROLLBACK;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &context, const llama_batch &, int, Saved *) {
    auto *cache = dynamic_cast<llama_kv_cache_unified *>(llama_get_kv_self(context.ctx));
    if (cache != nullptr && !(cache->*plk_member(Pending{})).ranges.empty()) {
        cache->commit();
    }
}
