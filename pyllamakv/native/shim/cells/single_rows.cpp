// Slots are contiguous unless LLAMA_SET_ROWS enabled scattered slots when the cache was created
// (0.3.12, 0.3.14).
#include "cells/single.h"

namespace plk {
PLK_PRIVATE(SetRows, Cache::supports_set_rows);
inline bool contiguous(Cache &cache) { return !(cache.*plk_member(SetRows{})); }
} // namespace plk

#include "cells/tree.h"
