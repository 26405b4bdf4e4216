// Trees without the patch kv-counters.
#include "groups.h"

const uint64_t plk::counters::bits = 0;

bool plk::counters::read(llama_context *, plk_counters &) { return false; }
