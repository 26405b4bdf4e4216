// Contexts with a getter for their parameters (March 2025 and later).
#include "groups.h"

#include "llama-context.h"
#include "llama-cparams.h"

const bool plk::settings::flash_takes_f32 = true;

namespace {
// LLAMA_SET_ROWS=0 unifies what was asked to be separate (0.3.15 and 0.3.16). Earlier releases have
// no streams, and no such field.
template <typename Params>
auto unified(const Params &params, int) -> decltype(params.kv_unified ? 1 : 0) {
    return params.kv_unified ? 1 : 0;
}
template <typename Params> int32_t unified(const Params &, long) { return 1; }

// The parameter has no effect since upstream removed its defragmentation.
template <typename Params>
auto threshold(const Params &params, int) -> decltype(params.defrag_thold) {
    return params.defrag_thold;
}
template <typename Params> float threshold(const Params &, long) { return -1.0f; }
} // namespace

plk::settings::Settings plk::settings::read(llama_context *ctx) {
    const llama_cparams &params = ctx->get_cparams();
    return {params.flash_attn ? 1 : 0, params.causal_attn ? 1 : 0,
            static_cast<int32_t>(params.n_seq_max), unified(params, 0),
            threshold(params, 0)};
}
