// One private array of cells per cache (0.3.10 to 0.3.14).
#include "cells/private.h"

#include "llama-kv-cache-unified-iswa.h"
#include "llama-kv-cache-unified.h"

#include <type_traits>

namespace plk {

using Cache = llama_kv_cache_unified;
using Iswa = llama_kv_cache_unified_iswa;
PLK_PRIVATE(Cells, Cache::cells);
PLK_PRIVATE(Head, Cache::head);
PLK_PRIVATE(Layers, Cache::layers);
PLK_PRIVATE(Transposed, Cache::v_trans);

constexpr bool counts_streams = false;
inline uint32_t n_stream(const Cache &) { return 1; }
inline const auto &cells_of(Cache &cache, uint32_t) { return cache.*plk_member(Cells{}); }
inline uint32_t head_of(Cache &cache, uint32_t) { return cache.*plk_member(Head{}); }
inline const auto &layers_of(Cache &cache) { return cache.*plk_member(Layers{}); }
inline bool transposed(Cache &cache) { return cache.*plk_member(Transposed{}); }
inline bool copies(Cache &) { return false; }
bool contiguous(Cache &cache);

} // namespace plk

#include "cells/tree.h"

#include <cstdlib>

// The switch is private in some of these releases and absent in 0.3.10, where slots are one run;
// it is read from the environment when the cache is made, and kept by none of our calls.
bool plk::contiguous(Cache &) {
    const char *value = getenv("LLAMA_SET_ROWS");
    return !(value != nullptr && atoi(value) != 0 && PLK_HAS_SET_ROWS);
}
