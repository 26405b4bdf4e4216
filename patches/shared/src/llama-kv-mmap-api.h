#ifndef LLAMA_KV_MMAP_API_H
#define LLAMA_KV_MMAP_API_H

// C interface to KV caches in mapped memory. A context has one mapping per cache in host memory: none if the caches
// were allocated on the heap, two with sliding windows. To request mapped memory, set current() in llama-kv-mmap.h or
// the environment variable LLAMA_KV_BACKING.

#include "llama.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct llama_kv_mmap_info {
    int32_t  kind;        // 1: anonymous memory, 2: an unlinked file, 3: a named file
    int32_t  n_tensors;
    uint32_t n_cells;     // per stream
    uint32_t n_stream;
    bool     kept;        // flush saves the cache
    bool     resumed;     // the content was read from the file
    uint64_t generation;  // number of flushes of the file
    uint64_t n_reserved;  // bytes of address space of the tensors, in whole pages
    uint64_t n_committed; // bytes of them that are resident in this process now
    uint64_t n_file;      // bytes allocated on disk
};

struct llama_kv_mmap_tensor {
    int32_t  layer;
    bool     is_v;
    uint64_t n_reserved;
    uint64_t n_committed; // at the time of the last llama_kv_mmap_get or llama_kv_mmap_trim
};

// Return the number of mappings of a context.
LLAMA_API int32_t llama_kv_mmap_count(const struct llama_context * ctx);

// Read mapping i, or its tensor j. Return false, and leave *out unchanged, if it does not exist.
LLAMA_API bool llama_kv_mmap_get       (const struct llama_context * ctx, int32_t i, struct llama_kv_mmap_info * out);
LLAMA_API bool llama_kv_mmap_get_tensor(const struct llama_context * ctx, int32_t i, int32_t j, struct llama_kv_mmap_tensor * out);

// Release the memory after the last used cell of each stream. Return the resident bytes released. Requires that nothing
// is pending.
LLAMA_API uint64_t llama_kv_mmap_trim(const struct llama_context * ctx);

// Write all mappings to their files, with the positions and sequences of the cells. Nothing may be pending: call
// llama_kv_self_update or its successor first. tokens: one per cell of all streams of all mappings, stored for
// llama_kv_mmap_tokens, or NULL. Return false on an error, which is logged; a mapping that is not kept is an error.
LLAMA_API bool llama_kv_mmap_flush(const struct llama_context * ctx, const int32_t * tokens, size_t n_tokens);

// Return the tokens of the last flush, n_cells*n_stream of them, owned by the context; NULL if the mapping is not kept.
LLAMA_API const int32_t * llama_kv_mmap_tokens(const struct llama_context * ctx, int32_t i);

#ifdef __cplusplus
}
#endif

#endif // LLAMA_KV_MMAP_API_H
