// Samplers.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_chain
// Sampling with a chain of samplers (0.3.0 and later). Releases differ in the samplers that they
// have and in the parameters of two of them. An overload whose call does not compile is ignored.
#include "words.h"

#include <memory>
#include <sstream>
#include <string>

namespace {

using Link = std::unique_ptr<llama_sampler, void (*)(llama_sampler *)>;

Link owned(llama_sampler *link) { return {link, llama_sampler_free}; }

// 0.3.36 and later take the size of the vocabulary, 0.3.7 through 0.3.35 no token, and earlier releases
// also the tokens for end of text and line feed.
template <typename Int>
auto make_penalties(Int n_vocab, const plk_model_info &, const plk_sampler_params &p, int)
    -> decltype(llama_sampler_init_penalties(n_vocab, p.penalty_last_n, p.penalty_repeat,
                                             p.penalty_freq, p.penalty_present)) {
    return llama_sampler_init_penalties(n_vocab, p.penalty_last_n, p.penalty_repeat,
                                        p.penalty_freq, p.penalty_present);
}
template <typename Int>
auto make_penalties(Int, const plk_model_info &, const plk_sampler_params &p, long)
    -> decltype(llama_sampler_init_penalties(Int(p.penalty_last_n), p.penalty_repeat,
                                             p.penalty_freq, p.penalty_present)) {
    return llama_sampler_init_penalties(Int(p.penalty_last_n), p.penalty_repeat, p.penalty_freq,
                                        p.penalty_present);
}
template <typename Int>
auto make_penalties(Int n_vocab, const plk_model_info &info, const plk_sampler_params &p, long)
    -> decltype(llama_sampler_init_penalties(n_vocab, info.token_eos, info.token_nl,
                                             p.penalty_last_n, p.penalty_repeat, p.penalty_freq,
                                             p.penalty_present, true, false)) {
    return llama_sampler_init_penalties(n_vocab, info.token_eos, info.token_nl, p.penalty_last_n,
                                        p.penalty_repeat, p.penalty_freq, p.penalty_present, true,
                                        false);
}

struct Breakers {
    std::vector<std::string> strings;
    std::vector<const char *> texts;
    explicit Breakers(const char *joined) {
        std::istringstream rest(joined == nullptr ? "" : joined);
        for (std::string each; std::getline(rest, each, '\x1f');) {
            strings.push_back(each);
        }
        for (const std::string &each : strings) {
            texts.push_back(each.c_str());
        }
    }
};

// 0.3.7 through 0.3.35 take the training context as well, for a penalty_last_n of -1.
template <typename Words>
auto make_dry(const Words *words, int32_t, const plk_sampler_params &p, Breakers &breakers, int)
    -> decltype(llama_sampler_init_dry(words, p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                       p.dry_penalty_last_n, breakers.texts.data(), size_t())) {
    return llama_sampler_init_dry(words, p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                  p.dry_penalty_last_n, breakers.texts.data(),
                                  breakers.texts.size());
}
template <typename Words>
auto make_dry(const Words *words, int32_t n_ctx, const plk_sampler_params &p, Breakers &breakers,
              int)
    -> decltype(llama_sampler_init_dry(words, n_ctx, p.dry_multiplier, p.dry_base,
                                       p.dry_allowed_length, p.dry_penalty_last_n,
                                       breakers.texts.data(), size_t())) {
    return llama_sampler_init_dry(words, n_ctx, p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                  p.dry_penalty_last_n, breakers.texts.data(),
                                  breakers.texts.size());
}
template <typename Words>
std::nullptr_t make_dry(const Words *, int32_t, const plk_sampler_params &, Breakers &, long) {
    return nullptr;
}

template <typename Float>
auto make_sigma(Float n, int) -> decltype(llama_sampler_init_top_n_sigma(n)) {
    return llama_sampler_init_top_n_sigma(n);
}
template <typename Float> std::nullptr_t make_sigma(Float, long) { return nullptr; }

template <typename Float>
auto make_xtc(Float chance, Float least, uint32_t seed, int)
    -> decltype(llama_sampler_init_xtc(chance, least, size_t(), seed)) {
    return llama_sampler_init_xtc(chance, least, 1, seed);
}
template <typename Float> std::nullptr_t make_xtc(Float, Float, uint32_t, long) { return nullptr; }

template <typename Float>
auto make_adaptive(Float target, Float decay, uint32_t seed, int)
    -> decltype(llama_sampler_init_adaptive_p(target, decay, seed)) {
    return llama_sampler_init_adaptive_p(target, decay, seed);
}
template <typename Float> std::nullptr_t make_adaptive(Float, Float, uint32_t, long) {
    return nullptr;
}

// The bit of a sampler whose overload exists.
template <typename Made> constexpr uint64_t bit(uint64_t value) {
    return std::is_same_v<Made, std::nullptr_t> ? 0 : value;
}
using Words = std::remove_pointer_t<decltype(plk::words(std::declval<const llama_model *>()))>;
using Dry = decltype(make_dry(std::declval<Words *>(), 0, std::declval<plk_sampler_params &>(),
                              std::declval<Breakers &>(), 0));

// Names of samplers in their default order, that of llama.cpp's own tools.
const char *const order = "penalties,dry,top_n_sigma,top_k,typical_p,top_p,min_p,xtc,temperature";

// Return the sampler of a name; an empty link if it is off or changes no greedy result.
Link make(const std::string &name, const plk_model &model, const plk_sampler_params &p) {
    const bool greedy = p.temperature <= 0.0f;
    llama_sampler *made = nullptr;
    if (name == "penalties") {
        const bool repeats = p.penalty_repeat != 1.0f || p.penalty_freq != 0.0f ||
            p.penalty_present != 0.0f;
        if (p.penalty_last_n > 0 && repeats) {
            made = make_penalties(model.info.n_vocab, model.info, p, 0);
        }
    } else if (name == "dry") {
        if (p.dry_multiplier > 0.0f && p.dry_penalty_last_n > 0) {
            Breakers breakers(p.dry_breakers);
            made = make_dry(plk::words(model.model), model.info.n_ctx_train, p, breakers, 0);
        }
    } else if (name == "xtc") {
        if (p.xtc_probability > 0.0f) {
            made = make_xtc(p.xtc_probability, p.xtc_threshold, p.seed, 0);
        }
    } else if (greedy) {
        made = nullptr; // the others keep the most likely token
    } else if (name == "top_n_sigma") {
        made = p.top_n_sigma > 0.0f ? make_sigma(p.top_n_sigma, 0) : nullptr;
    } else if (name == "top_k") {
        made = p.top_k > 0 ? llama_sampler_init_top_k(p.top_k) : nullptr;
    } else if (name == "typical_p") {
        const bool on = p.typical_p > 0.0f && p.typical_p < 1.0f;
        made = on ? llama_sampler_init_typical(p.typical_p, 1) : nullptr;
    } else if (name == "top_p") {
        made = p.top_p < 1.0f ? llama_sampler_init_top_p(p.top_p, 1) : nullptr;
    } else if (name == "min_p") {
        made = p.min_p > 0.0f ? llama_sampler_init_min_p(p.min_p, 1) : nullptr;
    } else if (name == "temperature") {
        made = p.dynatemp_range > 0.0f
            ? llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent)
            : llama_sampler_init_temp(p.temperature);
    }
    return owned(made);
}

// Return the sampler that selects a token.
Link make_last(const plk_model &model, const plk_sampler_params &p) {
    if (p.temperature <= 0.0f) {
        return owned(llama_sampler_init_greedy());
    }
    if (p.mirostat == 1) {
        // 100 candidates estimate the exponent, as in llama.cpp's own tools.
        return owned(llama_sampler_init_mirostat(model.info.n_vocab, p.seed, p.mirostat_tau,
                                                 p.mirostat_eta, 100));
    }
    if (p.mirostat == 2) {
        return owned(llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta));
    }
    if (p.adaptive_target > 0.0f) {
        return owned(make_adaptive(p.adaptive_target, p.adaptive_decay, p.seed, 0));
    }
    return owned(llama_sampler_init_dist(p.seed));
}

} // namespace

namespace plk::sampler {

const uint64_t bits = PLK_CAP_SAMPLER | PLK_CAP_SAMPLER_CHAIN | bit<Dry>(PLK_CAP_DRY) |
    bit<decltype(make_sigma(0.0f, 0))>(PLK_CAP_TOP_N_SIGMA) |
    bit<decltype(make_xtc(0.0f, 0.0f, 0, 0))>(PLK_CAP_XTC) |
    bit<decltype(make_adaptive(0.0f, 0.0f, 0, 0))>(PLK_CAP_ADAPTIVE_P);

struct Sampler {
    Link chain;
};

// Add a link to a chain. llama.cpp takes it over only if the list of the chain can grow.
static void add(const Link &chain, Link link) {
    if (link) {
        llama_sampler_chain_add(chain.get(), link.get());
        (void) link.release();
    }
}

Sampler *open(const plk_model &model, const plk_sampler_params &params) {
    Link chain = owned(llama_sampler_chain_init(llama_sampler_chain_default_params()));
    const std::string names = params.samplers == nullptr ? order : params.samplers;
    for (size_t at = 0, end = 0; at < names.size(); at = end + 1) {
        end = std::min(names.find(',', at), names.size());
        const std::string name = names.substr(at, end - at);
        if (("," + std::string(order) + ",").find("," + name + ",") == std::string::npos) {
            refuse(PLK_EINVAL, "there is no sampler '%.40s', expected %s", name.c_str(), order);
            return nullptr;
        }
        add(chain, make(name, model, params));
    }
    add(chain, make_last(model, params));
    return new Sampler{std::move(chain)};
}

void close(Sampler *sampler) { delete sampler; }

void reset(Sampler *sampler) { llama_sampler_reset(sampler->chain.get()); }

int32_t sample(Sampler *sampler, std::vector<llama_token_data> &candidates) {
    llama_token_data_array all{candidates.data(), candidates.size(), -1, false};
    llama_sampler_apply(sampler->chain.get(), &all);
    if (all.selected < 0 || static_cast<size_t>(all.selected) >= all.size) {
        return refuse(PLK_ENOTOKEN, "the samplers selected none of %zu tokens", all.size);
    }
    return all.data[all.selected].id;
}

void accept(Sampler *sampler, int32_t token) {
    llama_sampler_accept(sampler->chain.get(), token);
}

} // namespace plk::sampler

#elif defined(PLK_USE_functions)
// Sampling functions over an array of candidates (through 0.2.90).

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

#elif defined(PLK_USE_none)
// Releases with an unknown interface for sampling.

struct plk::sampler::Sampler {};
const uint64_t plk::sampler::bits = 0;

plk::sampler::Sampler *plk::sampler::open(const plk_model &, const plk_sampler_params &) {
    refuse(PLK_EUNSUPPORTED, "this build cannot sample");
    return nullptr;
}
void plk::sampler::close(Sampler *) {}
void plk::sampler::reset(Sampler *) {}
int32_t plk::sampler::sample(Sampler *, std::vector<llama_token_data> &) {
    return PLK_EUNSUPPORTED;
}
void plk::sampler::accept(Sampler *, int32_t) {}

#endif
