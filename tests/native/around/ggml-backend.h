// Memory of hosts and devices, and a scheduler that computes on both. What lies on a device has an
// address that nobody may read at; what is computed is not done before somebody waits for it.
#pragma once

#include "ggml.h"

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>

struct ggml_backend_buffer_type {
    const char * name;
    bool         is_host;
};

typedef ggml_backend_buffer_type * ggml_backend_buffer_type_t;

struct ggml_backend_buffer {
    char * base;
    size_t size;
    int    cleared; // how often
    bool   theirs;  // as upstream would have made it

    ggml_backend_buffer_type_t type;
    std::vector<char>          memory; // where it really is
};

typedef ggml_backend_buffer * ggml_backend_buffer_t;

inline ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type() {
    static ggml_backend_buffer_type type = { "host", true };
    return &type;
}

inline const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft) { return buft->name; }

// false: no buffer can be made of memory that is there already
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

// a buffer with memory, of which a device shows no address
inline std::unique_ptr<ggml_backend_buffer> make_buffer(ggml_backend_buffer_type_t type, size_t size, char filled) {
    static size_t away = 1 << 12; // the first pages belong to nobody
    std::unique_ptr<ggml_backend_buffer> res(new ggml_backend_buffer{ nullptr, size, 0, false, type, std::vector<char>(size, filled) });
    res->base = type->is_host ? res->memory.data() : (char *) (away += 1 << 4);
    return res;
}

inline bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buf) { return buf->type->is_host; }
inline ggml_backend_buffer_type_t ggml_backend_buffer_get_type(ggml_backend_buffer_t buf) { return buf->type; }
inline void * ggml_backend_buffer_get_base(ggml_backend_buffer_t buf) { return buf->base; }
inline void ggml_backend_buffer_clear(ggml_backend_buffer_t buf, int) { buf->cleared++; }

inline void ggml_backend_tensor_alloc(ggml_backend_buffer_t buf, ggml_tensor * t, void * at) {
    t->buffer = buf;
    t->data   = at;
}

inline void ggml_backend_view_init(ggml_tensor * t) {
    t->buffer = t->view_src->buffer;
    t->data   = (char *) t->view_src->data + t->view_offs;
}

// the bytes of a tensor, wherever they are
inline char * bytes(const ggml_tensor * t, size_t offset = 0, size_t size = 0) {
    auto * buf = t->buffer;
    const size_t at = (char *) t->data - buf->base + offset;
    GGML_ASSERT(at + size <= buf->size);
    return buf->memory.data() + at;
}

// how often tensors were read and written from outside of graphs
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

//
// backends
//

struct ggml_backend {
    const char * name;
    std::vector<ggml_backend_buffer_type_t>  memories; // the first is its own
    std::function<bool(const ggml_tensor *)> can;
};

typedef ggml_backend * ggml_backend_t;

inline bool ggml_backend_supports_buft(ggml_backend_t backend, ggml_backend_buffer_type_t buft) {
    return std::count(backend->memories.begin(), backend->memories.end(), buft) > 0;
}
inline bool ggml_backend_supports_op(ggml_backend_t backend, const ggml_tensor * op) { return backend->can(op); }

inline void copy_elements(const ggml_tensor * to, const ggml_tensor * from) {
    const size_t  size = ggml_type_size(to->type);
    const int64_t n    = ggml_nelements(to)/ggml_blck_size(to->type);
    int64_t at[2][2] = {}; // of blocks: column and row in `to` and in `from`
    const auto step = [](const ggml_tensor * t, int64_t * i) {
        if (++i[0] == t->ne[0]/ggml_blck_size(t->type)) {
            i[0] = 0;
            i[1]++;
        }
    };
    for (const auto * t : { to, from }) {
        GGML_ASSERT(t->ne[2] == 1 && t->ne[3] == 1);
        bytes(t, 0, ggml_nbytes(t));
    }
    char *       dst = bytes(to);
    const char * src = bytes(from);
    for (int64_t i = 0; i < n; ++i) {
        std::memcpy(dst + at[0][0]*to->nb[0] + at[0][1]*to->nb[1], src + at[1][0]*from->nb[0] + at[1][1]*from->nb[1], size);
        step(to, at[0]);
        step(from, at[1]);
    }
}

// row `to` of one tensor becomes row `from` of another
inline void copy_row(const ggml_tensor * a, int64_t to, const ggml_tensor * b, int64_t from) {
    GGML_ASSERT(to >= 0 && to < a->ne[1] && from >= 0 && from < b->ne[1] && a->ne[0] == b->ne[0]);
    const size_t size = ggml_row_size(a->type, a->ne[0]);
    std::memcpy(bytes(a, to*a->nb[1], size), bytes(b, from*b->nb[1], size), size);
}

// a copy knows no direction
inline bool overlap(const ggml_tensor * a, const ggml_tensor * b) {
    if (a->buffer != b->buffer) {
        return false;
    }
    const auto touched = [](const ggml_tensor * t) {
        std::set<const char *> res;
        for (int64_t row = 0; row < t->ne[1]; ++row) {
            for (int64_t i = 0; i < t->ne[0]/ggml_blck_size(t->type); ++i) {
                res.insert(bytes(t) + row*t->nb[1] + i*t->nb[0]);
            }
        }
        return res;
    };
    const auto one = touched(a), other = touched(b);
    return std::any_of(one.begin(), one.end(), [&](const char * at) { return other.count(at) > 0; });
}

inline void compute_node(const ggml_tensor * t) {
    switch (t->op) {
        case GGML_OP_CONT: copy_elements(t, t->src[0]); break;
        case GGML_OP_CPY:
            GGML_ASSERT(!overlap(t->src[0], t->src[1]));
            copy_elements(t, t->src[0]);
            break;
        case GGML_OP_GET_ROWS:
            for (int64_t i = 0; i < t->ne[1]; ++i) {
                int32_t row;
                std::memcpy(&row, bytes(t->src[1], i*sizeof(row), sizeof(row)), sizeof(row));
                copy_row(t, i, t->src[0], row);
            }
            break;
        case GGML_OP_SET_ROWS:
            for (int64_t i = 0; i < t->src[0]->ne[1]; ++i) {
                int64_t row;
                std::memcpy(&row, bytes(t->src[1], i*sizeof(row), sizeof(row)), sizeof(row));
                copy_row(t, row, t->src[0], i);
            }
            break;
        default: break;
    }
}

//
// the scheduler
//

struct ggml_backend_sched {
    std::vector<ggml_backend_t> backends;

    int n_until_full = -1; // graphs that can still be allocated; -1: all

    std::map<ggml_op, int> n_computed; // nodes
    int n_graphs = 0;

    bool is_clean = true; // nothing is known of earlier graphs
    std::map<const ggml_tensor *, ggml_backend_t>     placed;
    std::vector<std::unique_ptr<ggml_backend_buffer>> scratch;
    std::vector<std::function<void()>>                pending;

    // the backend of the memory that a node writes to or, in scratch, of what it was placed on
    ggml_backend_t backend_of(const ggml_tensor * t) const {
        const auto found = placed.find(t);
        if (found != placed.end()) {
            return found->second;
        }
        const auto * at = t->view_src ? t->view_src : t;
        for (auto * backend : backends) {
            if (at->buffer && ggml_backend_supports_buft(backend, at->buffer->type) && ggml_backend_supports_op(backend, t)) {
                return backend;
            }
        }
        return nullptr;
    }

    void give_memory(ggml_tensor * t) {
        if (t->view_src) {
            ggml_backend_view_init(t);
        } else if (!t->data) {
            GGML_ASSERT(t->op != GGML_OP_NONE || t->is_input);
            auto * backend = backend_of(t);
            auto * type    = backend ? backend->memories[0] : ggml_backend_cpu_buffer_type();
            scratch.push_back(make_buffer(type, ggml_nbytes(t), 0x5a));
            ggml_backend_tensor_alloc(scratch.back().get(), t, scratch.back()->base);
        }
    }

    bool compute(ggml_cgraph * gf) {
        for (const auto * t : gf->nodes) {
            n_computed[t->op]++;
            pending.push_back([=] { compute_node(t); });
        }
        n_graphs++;
        return true;
    }
};

typedef ggml_backend_sched * ggml_backend_sched_t;

inline std::set<ggml_backend_sched_t> & schedulers() {
    static std::set<ggml_backend_sched_t> all;
    return all;
}

inline int ggml_backend_sched_get_n_backends(ggml_backend_sched_t sched) { return (int) sched->backends.size(); }

inline ggml_backend_t ggml_backend_sched_get_backend(ggml_backend_sched_t sched, int i) {
    GGML_ASSERT(i >= 0 && i < ggml_backend_sched_get_n_backends(sched));
    return sched->backends[i];
}

inline void ggml_backend_sched_set_tensor_backend(ggml_backend_sched_t sched, ggml_tensor * t, ggml_backend_t backend) {
    GGML_ASSERT(sched->is_clean);
    schedulers().insert(sched);
    sched->placed[t] = backend;
}

inline void ggml_backend_sched_synchronize(ggml_backend_sched_t sched) {
    for (const auto & work : sched->pending) {
        work();
    }
    sched->pending.clear();
    if (sched->is_clean) {
        sched->scratch.clear();
    }
}

// what is still computed goes on
inline void ggml_backend_sched_reset(ggml_backend_sched_t sched) {
    sched->placed.clear();
    sched->is_clean = true;
    if (sched->pending.empty()) {
        sched->scratch.clear();
    }
}

inline bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * gf) {
    schedulers().insert(sched);
    GGML_ASSERT(sched->is_clean);
    if (sched->n_until_full >= 0 && sched->n_until_full-- == 0) {
        sched->n_until_full = 0;
        return false;
    }
    std::set<ggml_backend_buffer_type_t> memories;
    for (auto * list : { &gf->leafs, &gf->nodes }) {
        for (auto * t : *list) {
            if (t->data && t->buffer) {
                memories.insert(t->buffer->type); // of a cache
            }
            sched->give_memory(t);
        }
    }
    GGML_ASSERT(memories.size() <= 1);
    for (const auto * t : gf->nodes) {
        if (t->op == GGML_OP_VIEW || t->op == GGML_OP_TRANSPOSE) {
            continue;
        }
        auto * backend = sched->backend_of(t);
        GGML_ASSERT(backend && ggml_backend_supports_op(backend, t));
        GGML_ASSERT(memories.empty() || ggml_backend_supports_buft(backend, *memories.begin()));
    }
    sched->is_clean = false;
    return true;
}

inline void forget_nothing_of(const ggml_context * ctx) {
    for (const auto * sched : schedulers()) {
        GGML_ASSERT(sched->pending.empty() && sched->is_clean);
        for (const auto & each : sched->placed) {
            GGML_ASSERT(!is_of(ctx, each.first));
        }
    }
}
