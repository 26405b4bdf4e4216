// llama_kv_self_defrag (March to August 2025) with the patch full-defrag, for every stream.
#include "defrag/upstream.h"

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
