// A cache class that updates itself (0.3.9, b5415). The context's own update reserves a graph of
// the worst case from wherever the head stands, and asserts if it stands too high.
#include "groups.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool safe) {
    auto *cache = dynamic_cast<llama_kv_cache_unified *>(llama_get_kv_self(ctx));
    const llama_cparams &params = ctx->get_cparams();
    const uint32_t reserve = std::min(params.n_ctx, params.n_ubatch);
    if (safe && cache != nullptr && std::max(cache->head, cache->used) + reserve > cache->size) {
        ctx->synchronize();
        cache->update(*ctx); // without the reserve: the allocator grows when it must
        return;
    }
    llama_kv_self_update(ctx);
}
