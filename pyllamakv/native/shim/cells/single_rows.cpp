// Slots that are one run unless LLAMA_SET_ROWS asked for others when the cache was made (0.3.12,
// 0.3.14).
#include "cells/single.h"

namespace plk {
PLK_PRIVATE(SetRows, Cache::supports_set_rows);
inline bool contiguous(Cache &cache) { return !(cache.*plk_member(SetRows{})); }
} // namespace plk

#include "cells/tree.h"
