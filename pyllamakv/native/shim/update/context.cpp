// No public call any more: the context's own (September 2025 and later).
#include "groups.h"

#include "llama-context.h"

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool) {
    ctx->synchronize();
    ctx->memory_update(false);
}
