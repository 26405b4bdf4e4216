// Sampling in C, with the sampler interface of the release.
#include "groups.h"

struct plk_sampler {
    plk::sampler::Sampler *sampler = nullptr;
    int32_t n_vocab = 0;
    bool greedy = false;
};

namespace {

constexpr int32_t max_remembered = 1 << 20; // maximum penalty_last_n, in tokens

int check(const plk_sampler *sampler, const plk_context *context) {
    if (sampler == nullptr || plk::need(context) != PLK_OK) {
        return plk::refuse(PLK_EINVAL, "the sampler or the context is NULL");
    }
    if (sampler->n_vocab != context->model->info.n_vocab) {
        return plk::refuse(PLK_EINVAL, "the sampler was made for another vocabulary");
    }
    return PLK_OK;
}

// Sample the token of a place that has logits.
int32_t choose(const plk_sampler &sampler, llama_context *ctx, int32_t at) {
    if (!sampler.greedy) {
        return plk::sampler::sample(sampler.sampler, ctx, at, sampler.n_vocab);
    }
    // Same result as llama.cpp's greedy sampler, the first maximum, without its copy of all logits
    // into an array of candidates.
    const float *row = llama_get_logits_ith(ctx, at);
    return static_cast<int32_t>(std::max_element(row, row + sampler.n_vocab) - row);
}

struct Going {
    plk_context &context;
    ~Going() { context.going = false; }
};

} // namespace

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
        // llama.cpp allocates the memory of all penalty_last_n tokens at once.
        if (mine.penalty_last_n > max_remembered) {
            return plk::refuse(PLK_EINVAL, "penalty_last_n is %d, expected at most %d",
                               mine.penalty_last_n, max_remembered);
        }
        plk::sampler::Sampler *sampler = plk::sampler::open(model->model, mine);
        if (sampler == nullptr) {
            return plk::refuse(PLK_EUNSUPPORTED, "this build cannot sample");
        }
        const bool punishes = mine.penalty_last_n > 0 && mine.penalty_repeat != 1.0f;
        *out = new plk_sampler{sampler, model->info.n_vocab, mine.temperature <= 0.0f && !punishes};
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
        const int code = check(sampler, context);
        if (code != PLK_OK) {
            return code;
        }
        // llama.cpp asserts that the row exists.
        if (plk_logits(context, index) == nullptr) {
            return PLK_EINVAL;
        }
        const int32_t at = index < 0
            ? context->outputs[context->outputs.size() + static_cast<size_t>(index)]
            : index;
        return choose(*sampler, context->ctx, at);
    });
}

int32_t plk_sample_all(plk_sampler *sampler, plk_context *context, int32_t *tokens, int32_t room) {
    return plk::guarded([&]() -> int {
        const int code = check(sampler, context);
        if (code != PLK_OK) {
            return code;
        }
        const std::vector<int32_t> &outputs = context->outputs;
        if (tokens == nullptr || room < 0 || static_cast<size_t>(room) < outputs.size()) {
            return plk::refuse(PLK_EINVAL, "there is room for %d tokens, expected %zu", room,
                               outputs.size());
        }
        if (outputs.empty() || plk_logits(context, -1) == nullptr) {
            return plk::refuse(PLK_EINVAL, "the last decode kept no logits");
        }
        for (size_t i = 0; i < outputs.size(); ++i) {
            tokens[i] = choose(*sampler, context->ctx, outputs[i]);
        }
        return static_cast<int>(outputs.size());
    });
}

int plk_run(plk_sampler *sampler, plk_context *context, int32_t n, const int32_t *seq_id,
            const int32_t *pos, int32_t *tokens, int32_t steps, int32_t stop, int32_t *done) {
    return plk::guarded([&]() -> int {
        if (done != nullptr) {
            *done = 0; // set before any check can fail
        }
        int code = check(sampler, context);
        if (code != PLK_OK) {
            return code;
        }
        if (n < 1 || steps < 1 || seq_id == nullptr || pos == nullptr || tokens == nullptr ||
            done == nullptr) {
            return plk::refuse(PLK_EINVAL, "%d sequences, %d steps or an array is missing", n,
                               steps);
        }
        std::vector<int32_t> at(pos, pos + n);
        const std::vector<int8_t> wanted(static_cast<size_t>(n), 1);
        plk_batch batch{};
        batch.size = sizeof(batch);
        batch.n_tokens = n;
        batch.pos = at.data();
        batch.seq_id = seq_id;
        batch.logits = wanted.data();
        const Going going{*context};
        while (*done < steps) {
            if (context->going && context->cancel.load()) {
                return PLK_ABORTED;
            }
            batch.token = tokens;
            code = plk_decode(context, &batch);
            if (code != PLK_OK) {
                return code;
            }
            context->going = true;
            ++*done;
            tokens += n;
            code = plk_sample_all(sampler, context, tokens, n);
            if (code < 0) {
                return code;
            }
            bool ended = false;
            for (int32_t i = 0; i < n; ++i) {
                ++at[i];
                ended = ended || (stop && plk_token_is_eog(context->model, tokens[i]) == 1);
            }
            if (ended) {
                break;
            }
        }
        return PLK_OK;
    });
}

} // extern "C"
