// 0.3.6 through 0.3.8: a batch without a slot leaves its first micro-batches, and an aborted batch
// removes positions of every sequence.
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache;
}

#include "rollback/cells.h"

plk::Cache *plk::rollback::cache_of(llama_context *ctx) {
    return ctx->kv_self.recurrent ? nullptr : &ctx->kv_self;
}
