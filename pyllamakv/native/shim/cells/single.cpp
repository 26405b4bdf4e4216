// Slots are always contiguous (between b5590 and 0.3.10).
#include "cells/single.h"

namespace plk {
inline bool contiguous(Cache &) { return true; }
} // namespace plk

#include "cells/tree.h"
