// Releases with an unknown interface for sampling.
#include "groups.h"

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
