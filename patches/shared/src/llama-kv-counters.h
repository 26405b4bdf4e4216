#ifndef LLAMA_KV_COUNTERS_H
#define LLAMA_KV_COUNTERS_H

// What the KV cache of a context has done since the context was made. It cannot be seen from outside otherwise.
// All of it is summed up by the cache, nothing is reset: take differences.

#include "llama.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// -1: not counted in this build
struct llama_kv_counters {
    int64_t slot_searches;  // searches for cells, by micro-batches and by restored sequences
    int64_t slot_failures;  // ... that found none
    int64_t decode_retries; // searches of decodes that were repeated after a defragmentation
    int64_t defrags;        // defragmentations that moved something
    int64_t moves;          // runs of cells moved
    int64_t cells_moved;
    int64_t bytes_moved;
    int64_t graphs;         // compute graphs launched to move cells
    int64_t ns;             // wall time of defragmentations, in nanoseconds
    int64_t plan_ns;        // ... of finding out what moves where
    int64_t scratch_bytes;  // not a sum: the most that one defragmentation needed beside the cache
};

// false, and *out as it was, if the context has no cache that counts
LLAMA_API bool llama_kv_counters_get(const struct llama_context * ctx, struct llama_kv_counters * out);

#ifdef __cplusplus
}
#endif

#endif // LLAMA_KV_COUNTERS_H
