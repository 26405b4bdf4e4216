// Defragmentation.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_none
// Releases without defragmentation.
const uint64_t plk::defrag::bits = 0;

const char *plk::defrag::refusal(llama_context *, const plk_context_info &) {
    return "this build moves no cells";
}

int plk::defrag::run(llama_context *, bool) { return PLK_OK; }

float plk::defrag::threshold(const plk_context &) { return -1.0f; }

#elif defined(PLK_USE_compact)
// Trees without a defragmentation of their own, with the patch compaction.
#include "llama-kv-compact.h"

const uint64_t plk::defrag::bits = PLK_CAP_DEFRAG;

const char *plk::defrag::refusal(llama_context *ctx, const plk_context_info &) {
    return llama_kv_compact_refusal(ctx);
}

int plk::defrag::run(llama_context *ctx, bool) {
    if (llama_kv_compact(ctx) < 0) {
        return plk::refuse(PLK_EEXCEPTION, "a graph that moves cells failed: the cache is less "
                                           "compact than it could be, and every cell is right");
    }
    return PLK_OK;
}

float plk::defrag::threshold(const plk_context &context) {
    return llama_kv_compact_thold(context.ctx);
}

#else
// Releases with a defragmentation of upstream: `cache` through 0.3.8, `self` from March to August
// 2025, and `streams` with the patch full-defrag, which moves the cells of every stream.
#ifdef PLK_USE_streams
#include "llama-kv-defrag.h"
#endif

const uint64_t plk::defrag::bits = PLK_CAP_DEFRAG;

const char *plk::defrag::refusal(llama_context *, const plk_context_info &info) {
#ifndef PLK_USE_streams
    // Upstream's own defragmentation supports only caches with one stream.
    if (!info.defrag && info.n_caches) {
        return "each sequence has a stream of cells of its own";
    }
#endif
    return info.defrag || info.n_caches ? nullptr : "it has no cells per token";
}

int plk::defrag::run(llama_context *ctx, bool safe) {
#ifdef PLK_USE_cache
    llama_kv_cache_defrag(ctx);
#else
    llama_kv_self_defrag(ctx);
#endif
    plk::update::run(ctx, safe);
    return PLK_OK;
}

// Upstream uses the threshold as given; releases whose parameters cannot be read do so too.
float plk::defrag::threshold(const plk_context &context) {
    const float found = plk::settings::read(context.ctx).defrag_thold;
    return found == plk::settings::unknown_thold ? context.asked.defrag_thold : found;
}
#endif
