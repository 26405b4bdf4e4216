// A release that does not defragment.
#include "groups.h"

const uint64_t plk::defrag::bits = 0;

void plk::defrag::run(llama_context *, bool) {}
