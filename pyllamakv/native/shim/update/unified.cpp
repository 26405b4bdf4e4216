// A cache class with an update of its own (0.3.9, b5415). The context's update reserves a
// worst-case graph at the current head, and asserts if the head is too high.
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
        cache->update(*ctx); // without the reservation: the allocator grows if required
        return;
    }
    llama_kv_self_update(ctx);
}
