// b4980: upstream's restore uses cell indices as positions, and removes these from every sequence.
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
