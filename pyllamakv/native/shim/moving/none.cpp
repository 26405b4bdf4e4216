// Trees without the patches full-defrag and compaction: there are no options for moving cells.
#include "groups.h"

const uint64_t plk::moving::bits = 0;

void plk::moving::choose(const plk_context_params &) {}

void plk::moving::describe(const plk_context_params &, plk_context_info &info) {
    info.defrag_mover = -1;
}
