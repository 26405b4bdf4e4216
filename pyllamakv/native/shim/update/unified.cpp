// A cache class with an update of its own (0.3.9, b5415). The context's update then reserves a
// worst-case graph, which asserts if the head of the cache is too high or if embeddings are pooled:
// only the cache is updated. The allocator grows if a later graph needs it.
#include "groups.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool safe) {
    auto *cache = dynamic_cast<llama_kv_cache_unified *>(llama_get_kv_self(ctx));
    if (safe && cache != nullptr) {
        ctx->synchronize();
        cache->update(*ctx);
        return;
    }
    llama_kv_self_update(ctx);
}
