// One array of cells in a class whose members are all public (b4980).
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache_unified;
}

#include "cells/flat.h"

plk::cells::Look plk::cells::look(llama_context *ctx) {
    auto *cache = dynamic_cast<Cache *>(ctx->get_kv_self());
    if (cache == nullptr || cache->recurrent) {
        Look none;
        none.recurrent = cache != nullptr;
        return none;
    }
    return {cache, cache->has_shift, cache->do_defrag, cache->v_trans, false};
}
