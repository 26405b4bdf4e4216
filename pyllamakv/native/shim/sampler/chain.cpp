// Penalties without a vocabulary (0.3.5 and later).
#include "sampler/chain.h"

llama_sampler *plk::sampler::penalties(const llama_model *, const plk_sampler_params &params) {
    return llama_sampler_init_penalties(params.penalty_last_n, params.penalty_repeat, 0.0f, 0.0f);
}
