#ifndef LLAMA_KV_MMAP_API_H
#define LLAMA_KV_MMAP_API_H

// A KV cache in mapped memory, seen from outside. A context has as many mappings as it has caches in host memory: none if it
// was made on the heap, two with sliding windows. How a context gets them: current() in llama-kv-mmap.h, or LLAMA_KV_BACKING.

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
    bool     kept;        // flush has an effect
    bool     resumed;     // the file held a cache, which goes on
    uint64_t generation;  // how often the file was flushed
    uint64_t n_reserved;  // bytes of address space, in whole pages
    uint64_t n_committed; // ... that are resident in this process now
    uint64_t n_file;      // bytes on disk
};

struct llama_kv_mmap_tensor {
    int32_t  layer;
    bool     is_v;
    uint64_t n_reserved;
    uint64_t n_committed; // as of the last llama_kv_mmap_get
};

LLAMA_API int32_t llama_kv_mmap_count(const struct llama_context * ctx);

// false if there is no such mapping
LLAMA_API bool llama_kv_mmap_get       (const struct llama_context * ctx, int32_t i, struct llama_kv_mmap_info * out);
LLAMA_API bool llama_kv_mmap_get_tensor(const struct llama_context * ctx, int32_t i, int32_t j, struct llama_kv_mmap_tensor * out);

// give the memory behind the last used cell of each stream back, return how many bytes that was
LLAMA_API uint64_t llama_kv_mmap_trim(const struct llama_context * ctx);

// write all kept mappings to their files, with the positions and sequences of the cells; nothing may be pending, see
// llama_kv_self_update and its successors. tokens: one per cell of all streams of all mappings, to be read back, or NULL
// false: the reason is in the log
LLAMA_API bool llama_kv_mmap_flush(const struct llama_context * ctx, const int32_t * tokens, size_t n_tokens);

// the tokens that were given to the last flush, n_cells*n_stream of them; NULL if the mapping is not kept
LLAMA_API const int32_t * llama_kv_mmap_tokens(const struct llama_context * ctx, int32_t i);

#ifdef __cplusplus
}
#endif

#endif // LLAMA_KV_MMAP_API_H
