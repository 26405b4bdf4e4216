// The plan of the patch `full-defrag`, called by itself.

#include "llama-kv-defrag.h"

extern "C" uint64_t plan_moves(const uint8_t *used, uint32_t size) {
    return llama_kv_defrag::make_plan(used, size).moves.size();
}
