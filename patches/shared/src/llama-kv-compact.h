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
// Ignores streams in which attention visits less than 2048 cells, or LLAMA_KV_DEFRAG_MIN_CELLS.
LLAMA_API bool llama_kv_compact_due(const struct llama_context * ctx, float thold);

// Return the threshold in effect: a compaction precedes a batch if llama_kv_compact_due() is true for it; never if the
// threshold is <= 0. This is defrag_thold of the context's parameters. A context with the default, -1, uses the value of
// llama_kv_compact_set_default_thold(), else that of LLAMA_KV_DEFRAG_THOLD, else -1.
LLAMA_API float llama_kv_compact_thold(const struct llama_context * ctx);

// Set the threshold of all contexts of this process that have the default, for programs that cannot set the parameter.
// A value <= 0 means never, even if LLAMA_KV_DEFRAG_THOLD is set.
LLAMA_API void llama_kv_compact_set_default_thold(float thold);

// Apply pending shifts and copies between streams, then compact.
// Return 0, -1 if refused, or -2 if a graph failed; after -2 some cells have moved, and the cache is valid.
LLAMA_API int32_t llama_kv_compact(struct llama_context * ctx);

#ifdef __cplusplus
}
#endif

#endif // LLAMA_KV_COMPACT_H
