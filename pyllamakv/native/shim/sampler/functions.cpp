// Sampling functions over an array of candidates (through 0.2.90).
#include "groups.h"

#include <deque>
#include <random>

const uint64_t plk::sampler::bits = PLK_CAP_SAMPLER;

struct plk::sampler::Sampler {
    plk_sampler_params params;
    std::mt19937 random;
    std::deque<llama_token> last;
};

plk::sampler::Sampler *plk::sampler::open(const plk_model &, const plk_sampler_params &params) {
    return new Sampler{params, std::mt19937(params.seed), {}};
}

void plk::sampler::close(Sampler *sampler) { delete sampler; }

void plk::sampler::reset(Sampler *sampler) {
    sampler->random.seed(sampler->params.seed);
    sampler->last.clear();
}

int32_t plk::sampler::sample(Sampler *sampler, std::vector<llama_token_data> &candidates) {
    const plk_sampler_params &p = sampler->params;
    llama_token_data_array all{candidates.data(), candidates.size(), false};
    if (p.penalty_last_n > 0 && p.penalty_repeat != 1.0f) {
        const std::vector<llama_token> last(sampler->last.begin(), sampler->last.end());
        llama_sample_repetition_penalties(nullptr, &all, last.data(), last.size(), p.penalty_repeat,
                                          0.0f, 0.0f);
    }
    if (p.temperature <= 0.0f) {
        return llama_sample_token_greedy(nullptr, &all);
    }
    if (p.top_k > 0) {
        llama_sample_top_k(nullptr, &all, p.top_k, 1);
    }
    if (p.top_p < 1.0f) {
        llama_sample_top_p(nullptr, &all, p.top_p, 1);
    }
    if (p.min_p > 0.0f) {
        llama_sample_min_p(nullptr, &all, p.min_p, 1);
    }
    llama_sample_temp(nullptr, &all, p.temperature);
    llama_sample_softmax(nullptr, &all);
    std::vector<float> weights(all.size);
    for (size_t i = 0; i < all.size; ++i) {
        weights[i] = all.data[i].p;
    }
    std::discrete_distribution<size_t> choose(weights.begin(), weights.end());
    return all.data[choose(sampler->random)].id;
}

void plk::sampler::accept(Sampler *sampler, int32_t token) {
    if (sampler->params.penalty_last_n > 0) {
        sampler->last.push_back(token);
        if (sampler->last.size() > static_cast<size_t>(sampler->params.penalty_last_n)) {
            sampler->last.pop_front();
        }
    }
}
