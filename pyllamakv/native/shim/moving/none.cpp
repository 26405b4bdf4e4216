// Trees without the patches full-defrag and compaction: there are no options for moving cells.
#include "groups.h"

const uint64_t plk::moving::bits = 0;

void plk::moving::choose(const plk_context_params &) {}
