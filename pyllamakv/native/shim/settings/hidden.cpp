// Contexts with private parameters (b4980).
#include "cells/private.h"
#include "groups.h"

#include "llama-context.h"

namespace plk {
PLK_PRIVATE(Params, llama_context::cparams);
} // namespace plk

const bool plk::settings::flash_takes_f32 = false;

plk::settings::Settings plk::settings::read(llama_context *ctx) {
    const llama_cparams &params = ctx->*plk_member(Params{});
    return {params.flash_attn ? 1 : 0, params.causal_attn ? 1 : 0,
            static_cast<int32_t>(params.n_seq_max), 1, params.defrag_thold};
}
