// Updates of a memory: pending shifts and copies.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#if defined(PLK_USE_unified) || defined(PLK_USE_self) || defined(PLK_USE_context)
#include "llama-context.h"
#endif

#ifdef PLK_USE_unified
#include "llama-kv-cache.h"
#endif

#ifdef PLK_USE_none
const bool plk::update::present = false;
#else
const bool plk::update::present = true;
#endif

#ifdef PLK_USE_self
namespace {
// Contexts without this method (b4980) reserve in the update itself.
template <typename Context> auto reserves(int) -> decltype(&Context::graph_reserve, true) { return true; }
template <typename Context> bool reserves(long) { return false; }
} // namespace
const bool plk::update::reserves_means = reserves<llama_context>(0);
#else
const bool plk::update::reserves_means = true;
#endif

void plk::update::run([[maybe_unused]] llama_context *ctx, [[maybe_unused]] bool safe) {
#ifdef PLK_USE_unified
    // A cache class with an update of its own (0.3.9, b5415). The context's update then reserves a
    // worst-case graph, which asserts if the head of the cache is too high or if embeddings are
    // pooled: only the cache is updated. The allocator grows if a later graph needs it.
    auto *cache = dynamic_cast<llama_kv_cache_unified *>(llama_get_kv_self(ctx));
    if (safe && cache != nullptr) {
        ctx->synchronize();
        cache->update(*ctx);
        return;
    }
    llama_kv_self_update(ctx);
#elif defined(PLK_USE_self)
    // March to August 2025.
    llama_kv_self_update(ctx);
#elif defined(PLK_USE_cache)
    // Through 0.3.8.
    llama_kv_cache_update(ctx);
    if (plk::cells::watch != nullptr) {
        plk::cells::watch->applied(ctx);
    }
#elif defined(PLK_USE_context)
    // September 2025 and later: there is no public call.
    ctx->synchronize();
    ctx->memory_update(false);
#endif
}
