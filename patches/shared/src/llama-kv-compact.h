#ifndef LLAMA_KV_COMPACT_H
#define LLAMA_KV_COMPACT_H

// Compaction of the KV cache: moves the used cells of each stream to its start. Attention runs over all cells up to the
// highest used one, so a sparse cache is slow even if few cells are used.

#include "llama.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Return the reason why the cells of this context cannot move; NULL if they can, even if there is nothing to move.
LLAMA_API const char * llama_kv_compact_refusal(const struct llama_context * ctx);

// Return true if the fraction (0 to 1) of cells that attention visits unnecessarily exceeds `thold` in some stream.
// Ignores streams in which attention visits less than 2048 cells.
LLAMA_API bool llama_kv_compact_due(const struct llama_context * ctx, float thold);

// Apply pending shifts and copies between streams, then compact.
// Return 0, -1 if refused, or -2 if a graph failed; after -2 some cells have moved, and the cache is valid.
LLAMA_API int32_t llama_kv_compact(struct llama_context * ctx);

#ifdef __cplusplus
}
#endif

#endif // LLAMA_KV_COMPACT_H
