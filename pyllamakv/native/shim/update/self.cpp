// llama_kv_self_update (March to August 2025).
#include "groups.h"

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool) { llama_kv_self_update(ctx); }
