// Stubs of ggml backends and of an asynchronous scheduler, which computes nodes only when it is synchronized.
#pragma once

#include "compute.h"

#include <functional>
#include <map>

//
// backends
//

struct ggml_backend {
    const char * name;
    std::vector<ggml_backend_buffer_type_t>  memories; // supported buffer types; the first is the default
    std::function<bool(const ggml_tensor *)> can;
};

typedef ggml_backend * ggml_backend_t;

inline bool ggml_backend_supports_buft(ggml_backend_t backend, ggml_backend_buffer_type_t buft) {
    return std::count(backend->memories.begin(), backend->memories.end(), buft) > 0;
}
inline bool ggml_backend_supports_op(ggml_backend_t backend, const ggml_tensor * op) { return backend->can(op); }

//
// the scheduler
//

struct ggml_backend_sched {
    std::vector<ggml_backend_t> backends;

    int n_until_full = -1; // number of graphs that can still be allocated; -1: unlimited

    std::map<ggml_op, int> n_computed; // nodes per operation
    int n_graphs   = 0;
    int n_reserved = 0; // reserved graphs

    bool is_clean = true;  // reset since the last allocated graph
    size_t n_capacity = 0; // bytes for results: the maximum of all graphs so far
    std::set<const ggml_tensor *>                     known; // tensors of the current graph
    std::map<const ggml_tensor *, ggml_backend_t>     placed;
    std::vector<std::unique_ptr<ggml_backend_buffer>> scratch;
    std::vector<std::function<void()>>                pending;

    // returns the backend that a node was assigned to, or else the first one that supports the buffer that the node writes to
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

    void allocate(ggml_tensor * t) {
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

    // splits a graph and allocates memory for its results; returns false if that fails
    bool split(ggml_cgraph * gf) {
        GGML_ASSERT(is_clean && !gf->is_split);
        gf->is_split = true;
        size_t n_bytes = 0;
        for (const auto * list : { &gf->leafs, &gf->nodes }) {
            for (const auto * t : *list) {
                n_bytes += t->view_src || t->data ? 0 : ggml_nbytes(t);
            }
        }
        if (n_bytes > n_capacity && fault()) {
            return false;
        }
        n_capacity = std::max(n_capacity, n_bytes);
        return true;
    }

    bool compute(ggml_cgraph * gf) {
        const exempt ours;
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
    const exempt ours;
    GGML_ASSERT(sched->is_clean);
    schedulers().insert(sched);
    sched->placed[t] = backend;
}

inline void ggml_backend_sched_synchronize(ggml_backend_sched_t sched) {
    const exempt ours;
    for (const auto & work : sched->pending) {
        work();
    }
    sched->pending.clear();
    if (sched->is_clean) {
        sched->scratch.clear();
        sched->known.clear();
    }
}

// pending computations are not cancelled
inline void ggml_backend_sched_reset(ggml_backend_sched_t sched) {
    sched->placed.clear();
    sched->is_clean = true;
    if (sched->pending.empty()) {
        sched->scratch.clear();
        sched->known.clear();
    }
}

// allocates memory for a graph and those of at most its size; the graph itself is split and cannot be computed
inline bool ggml_backend_sched_reserve(ggml_backend_sched_t sched, ggml_cgraph * gf) {
    if (sched->n_until_full == 0 || !sched->split(gf)) {
        return false;
    }
    ggml_backend_sched_reset(sched);
    sched->n_reserved++;
    return true;
}

inline bool ggml_backend_sched_alloc_graph(ggml_backend_sched_t sched, ggml_cgraph * gf) {
    if (!sched->split(gf)) {
        return false;
    }
    const exempt ours;
    schedulers().insert(sched);
    if (sched->n_until_full >= 0 && sched->n_until_full-- == 0) {
        sched->n_until_full = 0;
        return false;
    }
    std::set<ggml_backend_buffer_type_t> memories;
    for (auto * list : { &gf->leafs, &gf->nodes }) {
        for (auto * t : *list) {
            if (t->data && t->buffer) {
                memories.insert(t->buffer->type); // a cache tensor
            }
            sched->allocate(t);
            sched->known.insert(t);
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

inline void check_unreferenced(const ggml_context * ctx) {
    for (const auto * sched : schedulers()) {
        GGML_ASSERT(std::none_of(sched->known.begin(), sched->known.end(), [=](const ggml_tensor * t) { return owns(ctx, t); }));
        for (const auto & each : sched->placed) {
            GGML_ASSERT(!owns(ctx, each.first));
        }
    }
}
