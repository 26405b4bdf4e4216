// Stub of ggml-backend.h: host and device buffers. A device buffer reports an address that must not be dereferenced.
#pragma once

#include "ggml.h"

#include <cstring>
#include <memory>

struct ggml_backend_buffer_type {
    const char * name;
    bool         is_host;
};

typedef ggml_backend_buffer_type * ggml_backend_buffer_type_t;

struct ggml_backend_buffer {
    char * base;
    size_t size;
    int    n_cleared;
    bool   is_upstream; // made by ggml_backend_alloc_ctx_tensors_from_buft()

    ggml_backend_buffer_type_t type;
    std::vector<char>          memory; // its bytes
};

typedef ggml_backend_buffer * ggml_backend_buffer_t;

inline ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type() {
    static ggml_backend_buffer_type type = { "host", true };
    return &type;
}

inline const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft) { return buft->name; }

// false: ggml_backend_cpu_buffer_from_ptr() fails
inline bool & wraps() {
    static bool answer = true;
    return answer;
}

inline ggml_backend_buffer_t ggml_backend_cpu_buffer_from_ptr(void * base, size_t size) {
    return wraps() ? new ggml_backend_buffer{ (char *) base, size, 0, false, ggml_backend_cpu_buffer_type(), {} } : nullptr;
}

inline ggml_backend_buffer_t ggml_backend_alloc_ctx_tensors_from_buft(ggml_context *, ggml_backend_buffer_type_t buft) {
    return new ggml_backend_buffer{ nullptr, 0, 0, true, buft, {} };
}

// returns a buffer with its own memory; the base address of a device buffer is not the one of this memory
inline std::unique_ptr<ggml_backend_buffer> make_buffer(ggml_backend_buffer_type_t type, size_t size, char filled) {
    static size_t fake_address = 1 << 12; // the lowest pages are never mapped
    std::unique_ptr<ggml_backend_buffer> res(new ggml_backend_buffer{ nullptr, size, 0, false, type, std::vector<char>(size, filled) });
    res->base = type->is_host ? res->memory.data() : (char *) (fake_address += 1 << 4);
    return res;
}

inline bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buf) { return buf->type->is_host; }
inline ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t buf) { return buf->type; }
inline void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buf) { return buf->base; }
inline void ggml_backend_buffer_clear(ggml_backend_buffer_t buf, int value) {
    if (buf->base && buf->type && buf->type->is_host) {
        std::memset(buf->base, value, buf->size);
    }
    buf->n_cleared++;
}

inline void ggml_backend_tensor_alloc(ggml_backend_buffer_t buf, ggml_tensor * t, void * at) {
    t->buffer = buf;
    t->data   = at;
}

inline void ggml_backend_view_init(ggml_tensor * t) {
    t->buffer = t->view_src->buffer;
    t->data   = (char *) t->view_src->data + t->view_offs;
}

// returns the bytes of a tensor in host or device memory
inline char * bytes(const ggml_tensor * t, size_t offset = 0, size_t size = 0) {
    auto * buf = t->buffer;
    const size_t at = (char *) t->data - buf->base + offset;
    GGML_ASSERT(at + size <= buf->size);
    return buf->memory.data() + at;
}

// numbers of calls of ggml_backend_tensor_get() and ggml_backend_tensor_set()
struct traffic_counts {
    int n_get;
    int n_set;
};

inline traffic_counts & traffic() {
    static traffic_counts counts = { 0, 0 };
    return counts;
}

inline void ggml_backend_tensor_get(const ggml_tensor * t, void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset + size <= ggml_nbytes(t));
    std::memcpy(data, bytes(t, offset, size), size);
    traffic().n_get++;
}

inline void ggml_backend_tensor_set(ggml_tensor * t, const void * data, size_t offset, size_t size) {
    GGML_ASSERT(offset + size <= ggml_nbytes(t));
    std::memcpy(bytes(t, offset, size), data, size);
    traffic().n_set++;
}
