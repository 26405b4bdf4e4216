// Trees without a defragmentation of their own, with the patch compaction.
#include "groups.h"

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
