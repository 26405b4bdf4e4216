// The public calls of March to August 2025.
#include "groups.h"

const uint64_t plk::defrag::bits = PLK_CAP_DEFRAG;

void plk::defrag::run(llama_context *ctx, bool safe) {
    llama_kv_self_defrag(ctx);
    plk::update::run(ctx, safe);
}
