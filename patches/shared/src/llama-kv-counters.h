#ifndef LLAMA_KV_COUNTERS_H
#define LLAMA_KV_COUNTERS_H

// Counters of the KV cache of a context, from the creation of the context. llama.h does not provide these numbers.
// The values are sums that are never reset: subtract two readings to measure an operation.

#include "llama.h"

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A value of -1 means that this build does not count it.
struct llama_kv_counters {
    int64_t slot_searches;  // searches for cells, by micro-batches and by restored sequences
    int64_t slot_failures;  // searches that found no cells
    int64_t decode_retries; // searches that a decode repeated after a defragmentation
    int64_t defrags;        // defragmentations that moved something
    int64_t moves;          // runs of cells moved
    int64_t cells_moved;
    int64_t bytes_moved;
    int64_t graphs;         // compute graphs launched to move cells
    int64_t ns;             // wall time of defragmentations, in nanoseconds
    int64_t plan_ns;        // part of ns that was spent on planning the moves
    int64_t scratch_bytes;  // a maximum, not a sum: memory that one defragmentation needed in addition to the cache
};

// Read the counters. Return false, and leave *out unchanged, if the context has no cache with counters.
LLAMA_API bool llama_kv_counters_get(const struct llama_context * ctx, struct llama_kv_counters * out);

#ifdef __cplusplus
}
#endif

#endif // LLAMA_KV_COUNTERS_H
