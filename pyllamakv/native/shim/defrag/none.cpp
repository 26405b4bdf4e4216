// Releases without defragmentation.
#include "groups.h"

const uint64_t plk::defrag::bits = 0;

const char *plk::defrag::refusal(llama_context *, const plk_context_info &) {
    return "this build moves no cells";
}

int plk::defrag::run(llama_context *, bool) { return PLK_OK; }

float plk::defrag::threshold(const plk_context &) { return -1.0f; }
