// Public cells in a class with private flags (0.3.9, b5415).
#include "cells/private.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache_unified;
PLK_PRIVATE(HasShift, Cache::has_shift);
PLK_PRIVATE(DoDefrag, Cache::do_defrag);
PLK_PRIVATE(Transposed, Cache::v_trans);
} // namespace plk

#include "cells/flat.h"

plk::cells::Look plk::cells::look(llama_context *ctx) {
    llama_kv_cache *memory = llama_get_kv_self(ctx);
    auto *cache = dynamic_cast<Cache *>(memory);
    if (cache == nullptr) {
        Look none;
        none.recurrent = dynamic_cast<llama_kv_cache_recurrent *>(memory) != nullptr;
        return none;
    }
    return {cache, cache->*plk_member(HasShift{}), cache->*plk_member(DoDefrag{}),
            cache->*plk_member(Transposed{}), false};
}
