// llama_kv_self_defrag (March to August 2025).
#include "defrag/upstream.h"

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
