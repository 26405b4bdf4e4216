// Tensors, their lists, and buffers, as far as the patch mmap-kv asks for them. Whoever includes
// this says what the backend does, and sees what was asked of it.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

enum ggml_type { GGML_TYPE_F16, GGML_TYPE_Q8_0 };

struct ggml_tensor {
    char          name[64];
    ggml_type     type;
    size_t        n_bytes;
    ggml_tensor * view_src;
    ggml_tensor * next;
    char *        data;   // where it was put
    bool          viewed; // a view that was initialised
};

struct ggml_context {
    ggml_tensor * first;
};

inline const char * ggml_type_name(ggml_type type) { return type == GGML_TYPE_F16 ? "f16" : "q8_0"; }
inline size_t ggml_type_size(ggml_type type) { return type == GGML_TYPE_F16 ? 2 : 34; }
inline size_t ggml_nbytes(const ggml_tensor * t) { return t->n_bytes; }
inline ggml_tensor * ggml_get_first_tensor(const ggml_context * ctx) { return ctx->first; }
inline ggml_tensor * ggml_get_next_tensor(const ggml_context *, const ggml_tensor * t) { return t->next; }
