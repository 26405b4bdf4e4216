// A tree whose own defragmentation is gone, with ours put in its place: the request that upstream
// still passes down, and no longer serves, does it.
#include "groups.h"

#include "llama-context.h"
#include "llama-kv-defrag.h"

const uint64_t plk::defrag::bits = PLK_CAP_DEFRAG;

void plk::defrag::run(llama_context *ctx, bool) {
    ctx->synchronize();
    ctx->memory_update(true);
}
