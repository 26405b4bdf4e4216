// Releases with a defragmentation of upstream.
#pragma once

#include "groups.h"

namespace plk::defrag {

// Upstream's own defragmentation supports only caches with one stream.
inline const char *one_stream(const plk_context_info &info) {
    return info.defrag ? nullptr
        : info.n_caches ? "each sequence has a stream of cells of its own"
                        : "it has no cells per token";
}

// Upstream uses the threshold as given; releases whose parameters cannot be read do so too.
inline float given_threshold(const plk_context &context) {
    const float found = plk::settings::read(context.ctx).defrag_thold;
    return found == plk::settings::unknown_thold ? context.asked.defrag_thold : found;
}

} // namespace plk::defrag
