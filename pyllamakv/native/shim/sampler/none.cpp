// Releases with an unknown interface for sampling.
#include "groups.h"

struct plk::sampler::Sampler {};
const uint64_t plk::sampler::bits = 0;

plk::sampler::Sampler *plk::sampler::open(const llama_model *, const plk_sampler_params &) {
    return nullptr;
}
void plk::sampler::close(Sampler *) {}
void plk::sampler::reset(Sampler *) {}
int32_t plk::sampler::sample(Sampler *, llama_context *, int32_t, int32_t) {
    return PLK_EUNSUPPORTED;
}
