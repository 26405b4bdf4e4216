// llama_kv_cache_update (through 0.3.8).
#include "groups.h"

const bool plk::update::present = true;

void plk::update::run(llama_context *ctx, bool) {
    llama_kv_cache_update(ctx);
    if (plk::cells::watch != nullptr) {
        plk::cells::watch->applied(ctx);
    }
}
