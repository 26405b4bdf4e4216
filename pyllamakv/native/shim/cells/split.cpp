// One array of cells in a struct of llama_context (0.3.6 to 0.3.8).
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache;
}

#include "cells/flat.h"

plk::cells::Look plk::cells::look(llama_context *ctx) {
    Cache &cache = ctx->kv_self;
    if (cache.recurrent) {
        Look none;
        none.recurrent = true;
        return none;
    }
    return {&cache, cache.has_shift, cache.do_defrag, cache.v_trans, false};
}
