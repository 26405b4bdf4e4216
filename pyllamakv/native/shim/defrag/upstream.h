// Upstream's own defragmentation supports only caches with one stream.
#pragma once

#include "groups.h"

namespace plk::defrag {

inline const char *one_stream(const plk_context_info &info) {
    return info.defrag ? nullptr
        : info.n_caches ? "each sequence has a stream of cells of its own"
                        : "it has no cells per token";
}

} // namespace plk::defrag
