// Penalties that take the tokens for line feed and end of text (0.3.0 through 0.3.4).
#include "sampler/chain.h"

llama_sampler *plk::sampler::penalties(const llama_model *model, const plk_sampler_params &params) {
    return llama_sampler_init_penalties(llama_n_vocab(model), llama_token_eos(model),
                                        llama_token_nl(model), params.penalty_last_n,
                                        params.penalty_repeat, 0.0f, 0.0f, true, false);
}
