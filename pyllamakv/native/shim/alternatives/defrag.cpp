// Defragmentation.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

// Releases with a defragmentation of upstream.

namespace plk::defrag {

// Upstream's own defragmentation supports only caches with one stream.
inline const char *one_stream(const plk_context_info &info) {
    return info.defrag ? nullptr
        : info.n_caches ? "each sequence has a stream of cells of its own"
                        : "it has no cells per token";
}

// Upstream uses the threshold as given; releases whose parameters cannot be read do so too.
inline float given_threshold(const plk_context &context) {
    const float found = plk::settings::read(context.ctx).defrag_thold;
    return found == plk::settings::unknown_thold ? context.asked.defrag_thold : found;
}

} // namespace plk::defrag

#ifdef PLK_USE_streams
// llama_kv_self_defrag (March to August 2025) with the patch full-defrag, for every stream.

#include "llama-kv-defrag.h"

const uint64_t plk::defrag::bits = PLK_CAP_DEFRAG;

const char *plk::defrag::refusal(llama_context *, const plk_context_info &info) {
    return info.defrag || info.n_caches ? nullptr : "it has no cells per token";
}

int plk::defrag::run(llama_context *ctx, bool safe) {
    llama_kv_self_defrag(ctx);
    plk::update::run(ctx, safe);
    return PLK_OK;
}

float plk::defrag::threshold(const plk_context &context) { return given_threshold(context); }

#elif defined(PLK_USE_self)
// llama_kv_self_defrag (March to August 2025).

const uint64_t plk::defrag::bits = PLK_CAP_DEFRAG;

const char *plk::defrag::refusal(llama_context *, const plk_context_info &info) {
    return one_stream(info);
}

int plk::defrag::run(llama_context *ctx, bool safe) {
    llama_kv_self_defrag(ctx);
    plk::update::run(ctx, safe);
    return PLK_OK;
}

float plk::defrag::threshold(const plk_context &context) { return given_threshold(context); }

#elif defined(PLK_USE_cache)
// llama_kv_cache_defrag (through 0.3.8).

const uint64_t plk::defrag::bits = PLK_CAP_DEFRAG;

const char *plk::defrag::refusal(llama_context *, const plk_context_info &info) {
    return one_stream(info);
}

int plk::defrag::run(llama_context *ctx, bool safe) {
    llama_kv_cache_defrag(ctx);
    plk::update::run(ctx, safe);
    return PLK_OK;
}

float plk::defrag::threshold(const plk_context &context) { return given_threshold(context); }

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

#elif defined(PLK_USE_none)
// Releases without defragmentation.

const uint64_t plk::defrag::bits = 0;

const char *plk::defrag::refusal(llama_context *, const plk_context_info &) {
    return "this build moves no cells";
}

int plk::defrag::run(llama_context *, bool) { return PLK_OK; }

float plk::defrag::threshold(const plk_context &) { return -1.0f; }

#endif
