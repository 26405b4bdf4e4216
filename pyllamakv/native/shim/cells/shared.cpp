// Arrays of cells that two caches may share (0.3.30 and later).
#include "cells/private.h"

#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"

namespace plk {

using Cache = llama_kv_cache;
using Iswa = llama_kv_cache_iswa;
PLK_PRIVATE(Cells, Cache::v_cells_impl);
PLK_PRIVATE(Heads, Cache::v_heads);
PLK_PRIVATE(Layers, Cache::layers);
PLK_PRIVATE(Transposed, Cache::v_trans);
PLK_PRIVATE(Copies, Cache::sc_info);

constexpr bool counts_streams = true;
constexpr bool splits_across = false;
inline uint32_t n_stream(const Cache &cache) { return cache.get_n_stream(); }
inline const auto &cells_of(Cache &cache, uint32_t s) { return (*(cache.*plk_member(Cells{})))[s]; }
inline uint32_t head_of(Cache &cache, uint32_t s) { return (cache.*plk_member(Heads{}))[s]; }
inline const auto &layers_of(Cache &cache) { return cache.*plk_member(Layers{}); }
inline bool transposed(Cache &cache) { return cache.*plk_member(Transposed{}); }
inline bool copies(Cache &cache) { return !(cache.*plk_member(Copies{})).ssrc.empty(); }
inline bool contiguous(Cache &) { return false; }

} // namespace plk

#include "cells/tree.h"
