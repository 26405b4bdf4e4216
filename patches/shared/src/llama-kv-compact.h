#ifndef LLAMA_KV_COMPACT_H
#define LLAMA_KV_COMPACT_H

// Compaction of the KV cache: the used cells of each stream move together at its start. Attention runs over all cells up
// to the highest used one, so that a sparse cache costs time without being full.

#include "llama.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// why the cells of this context have to stay where they are; NULL if they may move, even if there is nothing to move
LLAMA_API const char * llama_kv_compact_refusal(const struct llama_context * ctx);

// true if attention runs over so many cells for nothing that they are more than this part (0 to 1) of all it runs over;
// always false for small caches
LLAMA_API bool llama_kv_compact_due(const struct llama_context * ctx, float thold);

// apply what is pending (shifts, copies between streams), then compact
// return 0, -1 if refused, -2 if a graph failed; then some cells have moved, and all are right
LLAMA_API int32_t llama_kv_compact(struct llama_context * ctx);

#ifdef __cplusplus
}
#endif

#endif // LLAMA_KV_COMPACT_H
