// Upstream moves cells in one way, where it moves any.
#include "groups.h"

const uint64_t plk::moving::bits = 0;

void plk::moving::choose(const plk_context_params &) {}
