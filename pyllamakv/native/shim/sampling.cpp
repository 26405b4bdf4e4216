// Sampling in C, over whichever sampler this release has.
#include "groups.h"

struct plk_sampler {
    plk::sampler::Sampler *sampler = nullptr;
    int32_t n_vocab = 0;
};

extern "C" {

int plk_sampler_new(const plk_model *model, const plk_sampler_params *params, plk_sampler **out) {
    return plk::guarded([&]() -> int {
        if (model == nullptr || out == nullptr) {
            return plk::refuse(PLK_EINVAL, "model or out is NULL");
        }
        *out = nullptr;
        plk_sampler_params mine{};
        mine.top_p = mine.penalty_repeat = 1.0f;
        const int code = plk::take(params, mine, "plk_sampler_params");
        if (code != PLK_OK) {
            return code;
        }
        if (mine.penalty_last_n > 0 && mine.penalty_repeat <= 0.0f) {
            return plk::refuse(PLK_EINVAL, "penalty_repeat is %g, expected a positive number",
                               static_cast<double>(mine.penalty_repeat));
        }
        plk::sampler::Sampler *sampler = plk::sampler::open(model->model, mine);
        if (sampler == nullptr) {
            return plk::refuse(PLK_EUNSUPPORTED, "this build cannot sample");
        }
        *out = new plk_sampler{sampler, model->info.n_vocab};
        return PLK_OK;
    });
}

void plk_sampler_free(plk_sampler *sampler) {
    plk::guarded([&] {
        if (sampler != nullptr) {
            plk::sampler::close(sampler->sampler);
            delete sampler;
        }
        return PLK_OK;
    });
}

void plk_sampler_reset(plk_sampler *sampler) {
    plk::guarded([&] {
        if (sampler != nullptr) {
            plk::sampler::reset(sampler->sampler);
        }
        return PLK_OK;
    });
}

int32_t plk_sample(plk_sampler *sampler, plk_context *context, int32_t index) {
    return plk::guarded([&]() -> int {
        if (sampler == nullptr || plk::need(context) != PLK_OK) {
            return plk::refuse(PLK_EINVAL, "the sampler or the context is NULL");
        }
        if (sampler->n_vocab != context->model->info.n_vocab) {
            return plk::refuse(PLK_EINVAL, "the sampler was made for another vocabulary");
        }
        // llama.cpp asserts that the row exists.
        if (plk_logits(context, index) == nullptr) {
            return PLK_EINVAL;
        }
        const int32_t at = index < 0
            ? context->outputs[context->outputs.size() + static_cast<size_t>(index)]
            : index;
        return plk::sampler::sample(sampler->sampler, context->ctx, at, sampler->n_vocab);
    });
}

} // extern "C"
