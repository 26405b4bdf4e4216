// Updates of a memory.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_unified
// A cache class with an update of its own (0.3.9, b5415). The context's update then reserves a
// worst-case graph, which asserts if the head of the cache is too high or if embeddings are pooled:
// only the cache is updated. The allocator grows if a later graph needs it.

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

#elif defined(PLK_USE_self)
// llama_kv_self_update (March to August 2025).

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool) { llama_kv_self_update(ctx); }

#elif defined(PLK_USE_cache)
// llama_kv_cache_update (through 0.3.8).

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool) {
    llama_kv_cache_update(ctx);
    if (plk::cells::watch != nullptr) {
        plk::cells::watch->applied(ctx);
    }
}

#elif defined(PLK_USE_context)
// memory_update of the context, because there is no public call (September 2025 and later).

#include "llama-context.h"

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool) {
    ctx->synchronize();
    ctx->memory_update(false);
}

#elif defined(PLK_USE_none)
// Releases that update their memory only in a decode.

const bool plk::update::present = false;

void plk::update::run(llama_context *, bool) {}

#endif
