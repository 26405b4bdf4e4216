// memory_update of the context, because there is no public call (September 2025 and later).
#include "groups.h"

#include "llama-context.h"

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool) {
    ctx->synchronize();
    ctx->memory_update(false);
}
