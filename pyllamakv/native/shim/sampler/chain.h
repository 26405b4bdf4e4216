// Sampling with a chain of samplers. The candidates differ in how they create penalties.
#pragma once

#include "groups.h"

#include <memory>

namespace plk::sampler {

const uint64_t bits = PLK_CAP_SAMPLER;

struct Sampler {
    llama_sampler *chain;
};

// Defined by the candidate.
llama_sampler *penalties(const llama_model *model, const plk_sampler_params &params);

Sampler *open(const llama_model *model, const plk_sampler_params &params) {
    auto chain = std::unique_ptr<llama_sampler, void (*)(llama_sampler *)>(
        llama_sampler_chain_init(llama_sampler_chain_default_params()), llama_sampler_free);
    const auto add = [&](llama_sampler *link) { llama_sampler_chain_add(chain.get(), link); };
    if (params.penalty_last_n > 0 && params.penalty_repeat != 1.0f) {
        add(penalties(model, params));
    }
    if (params.temperature <= 0.0f) {
        add(llama_sampler_init_greedy());
    } else {
        if (params.top_k > 0) {
            add(llama_sampler_init_top_k(params.top_k));
        }
        if (params.top_p < 1.0f) {
            add(llama_sampler_init_top_p(params.top_p, 1));
        }
        if (params.min_p > 0.0f) {
            add(llama_sampler_init_min_p(params.min_p, 1));
        }
        add(llama_sampler_init_temp(params.temperature));
        add(llama_sampler_init_dist(params.seed));
    }
    return new Sampler{chain.release()};
}

void close(Sampler *sampler) {
    llama_sampler_free(sampler->chain);
    delete sampler;
}

void reset(Sampler *sampler) { llama_sampler_reset(sampler->chain); }

int32_t sample(Sampler *sampler, llama_context *ctx, int32_t index, int32_t) {
    return llama_sampler_sample(sampler->chain, ctx, index);
}

} // namespace plk::sampler
