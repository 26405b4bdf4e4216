// Sampling in C, with the sampler interface of the release.
#include "groups.h"

#include <cfloat>
#include <cmath>
#include <utility>

struct plk_sampler {
    plk::sampler::Sampler *sampler = nullptr;
    plk::grammar::Grammar *grammar = nullptr;
    int32_t n_vocab = 0;
    bool greedy = false; // the first maximum of the logits, whatever was sampled before
    std::vector<std::pair<int32_t, float>> bias;
    std::vector<llama_token_data> candidates; // reused by each call

    ~plk_sampler() {
        if (grammar != nullptr) {
            plk::grammar::close(grammar);
        }
        if (sampler != nullptr) {
            plk::sampler::close(sampler);
        }
    }
};

namespace {

constexpr int32_t max_remembered = 1 << 20; // maximum of both penalty_last_n, in tokens

int check(const plk_sampler *sampler, const plk_context *context) {
    if (sampler == nullptr || plk::need(context) != PLK_OK) {
        return plk::refuse(PLK_EINVAL, "the sampler or the context is NULL");
    }
    if (sampler->n_vocab != context->model->info.n_vocab) {
        return plk::refuse(PLK_EINVAL, "the sampler was made for another vocabulary");
    }
    return PLK_OK;
}

int check_params(const plk_sampler_params &p, const plk_model &model) {
    for (const float value :
         {p.temperature, p.top_p, p.min_p, p.penalty_repeat, p.penalty_freq, p.penalty_present,
          p.typical_p, p.top_n_sigma, p.xtc_probability, p.xtc_threshold, p.dry_multiplier,
          p.dry_base, p.dynatemp_range, p.dynatemp_exponent, p.mirostat_tau, p.mirostat_eta,
          p.adaptive_target, p.adaptive_decay}) {
        if (!std::isfinite(value)) {
            return plk::refuse(PLK_EINVAL, "a parameter of the sampler is %g, expected a number",
                               static_cast<double>(value));
        }
    }
    if (p.penalty_last_n > 0 && p.penalty_repeat <= 0.0f) {
        return plk::refuse(PLK_EINVAL, "penalty_repeat is %g, expected a positive number",
                           static_cast<double>(p.penalty_repeat));
    }
    // llama.cpp allocates the memory of all penalty_last_n tokens at once.
    for (const int32_t n : {p.penalty_last_n, p.dry_penalty_last_n}) {
        if (n > max_remembered) {
            return plk::refuse(PLK_EINVAL, "penalty_last_n is %d, expected at most %d", n,
                               max_remembered);
        }
    }
    if (p.dry_multiplier > 0.0f && p.dry_allowed_length < 1) {
        return plk::refuse(PLK_EINVAL, "dry_allowed_length is %d, expected at least 1",
                           p.dry_allowed_length);
    }
    if (p.mirostat < 0 || p.mirostat > 2) {
        return plk::refuse(PLK_EINVAL, "mirostat is %d, expected 0, 1 or 2", p.mirostat);
    }
    if (p.n_bias < 0 || (p.n_bias > 0 && (p.bias_token == nullptr || p.bias == nullptr))) {
        return plk::refuse(PLK_EINVAL, "n_bias is %d, or an array of biases is NULL", p.n_bias);
    }
    for (int32_t i = 0; i < p.n_bias; ++i) {
        const bool sound = p.bias[i] <= FLT_MAX; // false for NaN
        if (p.bias_token[i] < 0 || p.bias_token[i] >= model.info.n_vocab || !sound) {
            return plk::refuse(PLK_EINVAL, "the bias of token %d is %g: expected a token below %d, "
                               "and a number or -inf", p.bias_token[i],
                               static_cast<double>(p.bias[i]), model.info.n_vocab);
        }
    }
    const bool chained = p.penalty_freq != 0.0f || p.penalty_present != 0.0f ||
        (p.typical_p > 0.0f && p.typical_p < 1.0f) || p.dynatemp_range > 0.0f || p.mirostat ||
        p.samplers != nullptr;
    const std::pair<bool, uint64_t> needs[] = {
        {chained, PLK_CAP_SAMPLER_CHAIN},
        {p.top_n_sigma > 0.0f, PLK_CAP_TOP_N_SIGMA},
        {p.xtc_probability > 0.0f, PLK_CAP_XTC},
        {p.dry_multiplier > 0.0f, PLK_CAP_DRY},
        {p.adaptive_target > 0.0f, PLK_CAP_ADAPTIVE_P},
        {p.grammar != nullptr, PLK_CAP_GRAMMAR},
    };
    for (const auto &[wanted, bit] : needs) {
        if (wanted && !(plk_capabilities() & bit)) {
            return plk::refuse(PLK_EUNSUPPORTED, "this build lacks the sampler (capability %llu)",
                               static_cast<unsigned long long>(bit));
        }
    }
    const bool reads_text = p.grammar != nullptr || p.dry_multiplier > 0.0f;
    if (reads_text && !model.info.has_vocab) {
        return plk::refuse(PLK_EUNSUPPORTED, "a grammar and DRY need a vocabulary");
    }
    return PLK_OK;
}

// Sample from logits: add the biases, drop what a bias or the grammar excludes, run the chain.
int32_t run_chain(plk_sampler &sampler, const float *logits) {
    std::vector<llama_token_data> &all = sampler.candidates;
    all.resize(static_cast<size_t>(sampler.n_vocab));
    for (int32_t i = 0; i < sampler.n_vocab; ++i) {
        all[i] = {i, logits[i], 0.0f};
    }
    for (const auto &[token, value] : sampler.bias) {
        all[token].logit += value;
    }
    // Excluded candidates are dropped: typical_p would compute 0 * inf, and a sort of NaN is
    // undefined.
    const auto excluded = [](const llama_token_data &each) { return each.logit == -INFINITY; };
    const auto drop = [&] {
        all.erase(std::remove_if(all.begin(), all.end(), excluded), all.end());
        return all.empty();
    };
    if (drop()) {
        return plk::refuse(PLK_ENOTOKEN, "every token is excluded");
    }
    for (const llama_token_data &each : all) {
        if (!(each.logit < INFINITY)) {
            return plk::refuse(PLK_EINVAL, "the logit of token %d is %g", each.id,
                               static_cast<double>(each.logit));
        }
    }
    if (sampler.grammar != nullptr) {
        plk::grammar::apply(sampler.grammar, all);
        if (drop()) {
            return plk::refuse(PLK_ENOTOKEN, "the grammar allows none of the tokens");
        }
    }
    const int32_t token = plk::sampler::sample(sampler.sampler, all);
    if (token < 0) {
        return token;
    }
    if (sampler.grammar != nullptr) {
        plk::grammar::accept(sampler.grammar, token);
    }
    plk::sampler::accept(sampler.sampler, token);
    return token;
}

// Sample from the logits of a place of the last batch.
int32_t choose(plk_sampler &sampler, llama_context *ctx, int32_t at) {
    const float *row = llama_get_logits_ith(ctx, at);
    if (!sampler.greedy) {
        return run_chain(sampler, row);
    }
    // Same result as llama.cpp's greedy sampler, the first maximum, without its copy of all logits
    // into an array of candidates.
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
        mine.dynatemp_exponent = 1.0f;
        const int code = plk::take(params, mine, "plk_sampler_params");
        if (code != PLK_OK) {
            return code;
        }
        const int wrong = check_params(mine, *model);
        if (wrong != PLK_OK) {
            return wrong;
        }
        auto made = std::make_unique<plk_sampler>();
        made->n_vocab = model->info.n_vocab;
        for (int32_t i = 0; i < mine.n_bias; ++i) {
            made->bias.emplace_back(mine.bias_token[i], mine.bias[i]);
        }
        made->sampler = plk::sampler::open(*model, mine);
        if (made->sampler == nullptr) {
            return plk::sampler::bits ? PLK_EINVAL : PLK_EUNSUPPORTED;
        }
        if (mine.grammar != nullptr) {
            made->grammar = plk::grammar::open(model->model, mine.grammar);
            if (made->grammar == nullptr) {
                return PLK_EGRAMMAR;
            }
        }
        const bool penalizes = mine.penalty_last_n > 0 &&
            (mine.penalty_repeat != 1.0f || mine.penalty_freq != 0.0f ||
             mine.penalty_present != 0.0f);
        made->greedy = mine.temperature <= 0.0f && !penalizes && mine.dry_multiplier <= 0.0f &&
            mine.xtc_probability <= 0.0f && made->grammar == nullptr && made->bias.empty();
        *out = made.release();
        return PLK_OK;
    });
}

void plk_sampler_free(plk_sampler *sampler) {
    plk::guarded([&] {
        delete sampler;
        return PLK_OK;
    });
}

void plk_sampler_reset(plk_sampler *sampler) {
    plk::guarded([&] {
        if (sampler != nullptr) {
            plk::sampler::reset(sampler->sampler);
            if (sampler->grammar != nullptr) {
                plk::grammar::reset(sampler->grammar);
            }
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

int32_t plk_sample_logits(plk_sampler *sampler, const float *logits, int32_t n) {
    return plk::guarded([&]() -> int {
        if (sampler == nullptr || logits == nullptr || n != sampler->n_vocab) {
            return plk::refuse(PLK_EINVAL, "the sampler or the logits are NULL, or %d is not the "
                               "size of the vocabulary", n);
        }
        return run_chain(*sampler, logits); // also if greedy: it checks the logits
    });
}

int plk_sampler_accept(plk_sampler *sampler, const int32_t *tokens, int32_t n) {
    return plk::guarded([&]() -> int {
        if (sampler == nullptr || n < 0 || (n > 0 && tokens == nullptr)) {
            return plk::refuse(PLK_EINVAL, "the sampler or the tokens are NULL");
        }
        for (int32_t i = 0; i < n; ++i) {
            if (tokens[i] < 0 || tokens[i] >= sampler->n_vocab) {
                return plk::refuse(PLK_EINVAL, "token %d is not in the vocabulary", tokens[i]);
            }
        }
        for (int32_t i = 0; i < n; ++i) {
            plk::sampler::accept(sampler->sampler, tokens[i]);
        }
        return PLK_OK;
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
            if (tokens[i] < 0) {
                return tokens[i];
            }
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
