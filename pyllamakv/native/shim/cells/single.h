// One private array of cells per cache; the candidate defines `contiguous`.
#pragma once

#include "cells/private.h"

#include "llama-kv-cache-unified-iswa.h"
#include "llama-kv-cache-unified.h"

namespace plk {

using Cache = llama_kv_cache_unified;
using Iswa = llama_kv_cache_unified_iswa;
PLK_PRIVATE(Cells, Cache::cells);
PLK_PRIVATE(Head, Cache::head);
PLK_PRIVATE(Layers, Cache::layers);
PLK_PRIVATE(Transposed, Cache::v_trans);

constexpr bool counts_streams = false;
constexpr bool splits_across = false;
inline uint32_t n_stream(const Cache &) { return 1; }
inline const auto &cells_of(Cache &cache, uint32_t) { return cache.*plk_member(Cells{}); }
inline uint32_t head_of(Cache &cache, uint32_t) { return cache.*plk_member(Head{}); }
inline const auto &layers_of(Cache &cache) { return cache.*plk_member(Layers{}); }
inline bool transposed(Cache &cache) { return cache.*plk_member(Transposed{}); }
inline bool copies(Cache &) { return false; }

} // namespace plk
