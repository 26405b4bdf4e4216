// Contexts with parameters in a public member (0.3.7 and 0.3.8).
#include "groups.h"

#include "llama-context.h"

const bool plk::settings::flash_takes_f32 = false;

plk::settings::Settings plk::settings::read(llama_context *ctx) {
    return {ctx->cparams.flash_attn ? 1 : 0, ctx->cparams.causal_attn ? 1 : 0,
            static_cast<int32_t>(ctx->cparams.n_seq_max), 1, ctx->cparams.defrag_thold};
}
