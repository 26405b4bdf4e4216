// b4980: the restore takes cell numbers for positions, and removes them from every sequence.
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache_unified;
}

#include "rollback/cells.h"

plk::Cache *plk::rollback::cache_of(llama_context *ctx) {
    auto *cache = dynamic_cast<Cache *>(ctx->get_kv_self());
    return cache != nullptr && !cache->recurrent ? cache : nullptr;
}
