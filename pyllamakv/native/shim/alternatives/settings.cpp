// Settings that llama.cpp decides for a context.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_getter
// Contexts with a getter for their parameters (March 2025 and later).

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

#elif defined(PLK_USE_member)
// Contexts with parameters in a public member (0.3.7 and 0.3.8).

#include "llama-context.h"

const bool plk::settings::flash_takes_f32 = false;

plk::settings::Settings plk::settings::read(llama_context *ctx) {
    return {ctx->cparams.flash_attn ? 1 : 0, ctx->cparams.causal_attn ? 1 : 0,
            static_cast<int32_t>(ctx->cparams.n_seq_max), 1, ctx->cparams.defrag_thold};
}

#elif defined(PLK_USE_hidden)
// Contexts with private parameters (b4980).
#include "cells/private.h"

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

#elif defined(PLK_USE_none)
// Contexts whose parameters cannot be read.

const bool plk::settings::flash_takes_f32 = false;

plk::settings::Settings plk::settings::read(llama_context *) { return {}; }

#endif
