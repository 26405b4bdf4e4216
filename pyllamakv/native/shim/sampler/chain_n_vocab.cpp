// Penalties that take the size of the vocabulary (0.3.36).
#include "sampler/chain.h"

llama_sampler *plk::sampler::penalties(const llama_model *model, const plk_sampler_params &params) {
    const int32_t n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    return llama_sampler_init_penalties(n_vocab, params.penalty_last_n, params.penalty_repeat, 0.0f,
                                        0.0f);
}
