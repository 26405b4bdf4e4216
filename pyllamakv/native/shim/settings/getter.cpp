// A context that hands out its parameters (March 2025 and later).
#include "groups.h"

#include "llama-context.h"
#include "llama-cparams.h"

const bool plk::settings::flash_takes_f32 = true;

plk::settings::Settings plk::settings::read(llama_context *ctx) {
    const llama_cparams &params = ctx->get_cparams();
    return {params.flash_attn ? 1 : 0, params.causal_attn ? 1 : 0};
}
