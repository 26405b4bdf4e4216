// One kind of host memory, one device, and what was done with their buffers.
#pragma once

#include "ggml.h"

struct ggml_backend_buffer {
    char * base;
    size_t size;
    int    cleared; // how often
    bool   theirs;  // as upstream would have made it
};

struct ggml_backend_buffer_type {
    const char * name;
};

typedef ggml_backend_buffer *      ggml_backend_buffer_t;
typedef ggml_backend_buffer_type * ggml_backend_buffer_type_t;

inline ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type() {
    static ggml_backend_buffer_type type = { "host" };
    return &type;
}

inline const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft) { return buft->name; }

// false: no buffer can be made of memory that is there already
inline bool & wraps() {
    static bool answer = true;
    return answer;
}

inline ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void * base, size_t size) {
    return wraps() ? new ggml_backend_buffer{ (char *) base, size, 0, false } : nullptr;
}

inline ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(ggml_context *, ggml_backend_buffer_type_t) {
    return new ggml_backend_buffer{ nullptr, 0, 0, true };
}

inline void ggml_backend_tensor_alloc(ggml_backend_buffer_t, ggml_tensor * t, void * at) { t->data = (char *) at; }
inline void ggml_backend_view_init(ggml_tensor * t) { t->viewed = true; }
inline void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buf) { return buf->base; }
inline void ggml_backend_buffer_clear(ggml_backend_buffer_t buf, int) { buf->cleared++; }
