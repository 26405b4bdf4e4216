// Stub of ggml.h: tensors, operations and graphs, as far as the patches use them. Functions check the preconditions that
// ggml documents, including those that some releases do not check.
#pragma once

#include "faults.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#define GGML_ASSERT(condition)                                              \
    do {                                                                    \
        if (!(condition)) {                                                 \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
            std::fflush(stdout);                                            \
            std::abort();                                                   \
        }                                                                   \
    } while (0)

enum ggml_type { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_I32, GGML_TYPE_I64 };

enum ggml_op {
    GGML_OP_NONE, GGML_OP_VIEW, GGML_OP_TRANSPOSE, GGML_OP_CONT, GGML_OP_CPY, GGML_OP_GET_ROWS, GGML_OP_SET_ROWS,
};

struct ggml_backend_buffer;

struct ggml_tensor {
    char          name[64];
    ggml_type     type;
    ggml_op       op;
    int64_t       ne[4];
    size_t        nb[4];
    ggml_tensor * src[3];
    ggml_tensor * view_src;
    size_t        view_offs;
    void *        data;
    bool          is_input;
    ggml_tensor * next;
    ggml_backend_buffer * buffer;
};

struct ggml_cgraph {
    std::vector<ggml_tensor *> nodes;
    std::vector<ggml_tensor *> leafs;
    size_t                     size;
    bool                       is_split; // changed by a scheduler
};

struct ggml_context {
    ggml_tensor *           first;
    size_t                  n_free; // bytes left for tensors and graphs
    std::deque<ggml_tensor> tensors;
    std::deque<ggml_cgraph> graphs;
};

struct ggml_type_traits {
    const char * name;
    size_t       size;  // bytes per block
    int64_t      block; // elements per block
};

inline const ggml_type_traits & traits(ggml_type type) {
    static const ggml_type_traits all[] = {
        { "f32", 4, 1 }, { "f16", 2, 1 }, { "q8_0", 34, 32 }, { "i32", 4, 1 }, { "i64", 8, 1 },
    };
    return all[type];
}

inline const char * ggml_type_name(ggml_type type) { return traits(type).name; }
inline size_t  ggml_type_size(ggml_type type) { return traits(type).size; }
inline int64_t ggml_blck_size(ggml_type type) { return traits(type).block; }

inline size_t ggml_row_size(ggml_type type, int64_t ne) {
    GGML_ASSERT(ne % ggml_blck_size(type) == 0);
    return ggml_type_size(type)*ne/ggml_blck_size(type);
}

inline int64_t ggml_nelements(const ggml_tensor * t) { return t->ne[0]*t->ne[1]*t->ne[2]*t->ne[3]; }

// bytes from the first to the last one, including gaps
inline size_t ggml_nbytes(const ggml_tensor * t) {
    if (ggml_nelements(t) == 0) {
        return 0;
    }
    // the blocks of a row are contiguous
    const bool blocks = ggml_blck_size(t->type) > 1;
    size_t res = blocks ? ggml_row_size(t->type, t->ne[0]) : ggml_type_size(t->type);
    for (int i = blocks; i < 4; ++i) {
        res += (t->ne[i] - 1)*t->nb[i];
    }
    return res;
}

inline ggml_tensor * ggml_get_first_tensor(const ggml_context * ctx) { return ctx->first; }
inline ggml_tensor * ggml_get_next_tensor(const ggml_context *, const ggml_tensor * t) { return t->next; }

// sets type, shape and strides of a contiguous tensor
inline void lay_out(ggml_tensor & t, ggml_type type, int64_t ne0, int64_t ne1 = 1, int64_t ne2 = 1, int64_t ne3 = 1) {
    const int64_t ne[4] = { ne0, ne1, ne2, ne3 };
    t.type  = type;
    t.nb[0] = ggml_type_size(type);
    for (int i = 0; i < 4; ++i) {
        t.ne[i] = ne[i];
        if (i < 3) {
            t.nb[i + 1] = i == 0 ? ggml_row_size(type, ne0) : t.nb[i]*ne[i];
        }
    }
}

//
// contexts
//

struct ggml_init_params {
    size_t mem_size;
    void * mem_buffer;
    bool   no_alloc;
};

inline size_t ggml_tensor_overhead() { return 368; }
inline size_t ggml_graph_overhead_custom(size_t size, bool) { return 80 + 16*size; }

// contexts that were not freed
inline std::vector<ggml_context *> & contexts() {
    static std::vector<ggml_context *> all;
    return all;
}

inline ggml_context * ggml_init(ggml_init_params params) {
    GGML_ASSERT(!params.mem_buffer && params.no_alloc);
    if (fault()) {
        return nullptr;
    }
    const exempt ours;
    contexts().push_back(new ggml_context{ nullptr, params.mem_size, {}, {} });
    return contexts().back();
}

inline bool owns(const ggml_context * ctx, const ggml_tensor * t) {
    return std::any_of(ctx->tensors.begin(), ctx->tensors.end(), [=](const ggml_tensor & each) { return &each == t; });
}

// fails if a scheduler refers to a tensor of the context; defined in ggml-backend.h
inline void check_unreferenced(const ggml_context * ctx);

inline void ggml_free(ggml_context * ctx) {
    check_unreferenced(ctx);
    contexts().erase(std::find(contexts().begin(), contexts().end(), ctx));
    delete ctx;
}

inline void reserve(ggml_context * ctx, size_t bytes) {
    GGML_ASSERT(bytes <= ctx->n_free);
    ctx->n_free -= bytes;
}

inline ggml_tensor * add_tensor(ggml_context * ctx, const ggml_tensor & t) {
    const exempt ours;
    reserve(ctx, ggml_tensor_overhead());
    ctx->tensors.push_back(t);
    return &ctx->tensors.back();
}

//
// operations
//

inline ggml_tensor * ggml_new_tensor_1d(ggml_context * ctx, ggml_type type, int64_t ne0) {
    ggml_tensor t = {};
    lay_out(t, type, ne0);
    return add_tensor(ctx, t);
}

inline void ggml_set_input(ggml_tensor * t) { t->is_input = true; }

inline ggml_tensor * ggml_view_tensor(ggml_context * ctx, ggml_tensor * a) {
    ggml_tensor t = {};
    std::copy_n(a->ne, 4, t.ne);
    std::copy_n(a->nb, 4, t.nb);
    t.type      = a->type;
    t.view_src  = a->view_src ? a->view_src : a;
    t.view_offs = a->view_offs;
    t.data      = a->data;
    return add_tensor(ctx, t);
}

inline ggml_tensor * ggml_view_2d(ggml_context * ctx, ggml_tensor * a, int64_t ne0, int64_t ne1, size_t nb1, size_t offs) {
    auto * t = ggml_view_tensor(ctx, a);
    lay_out(*t, a->type, ne0, ne1);
    t->op     = GGML_OP_VIEW;
    t->src[0] = a;
    t->nb[1]  = nb1;
    t->nb[2]  = t->nb[3] = nb1*ne1;
    t->view_offs += offs;
    t->data = t->data ? (char *) t->data + offs : nullptr;
    return t;
}

inline ggml_tensor * ggml_transpose(ggml_context * ctx, ggml_tensor * a) {
    auto * t = ggml_view_tensor(ctx, a);
    t->op     = GGML_OP_TRANSPOSE;
    t->src[0] = a;
    std::swap(t->ne[0], t->ne[1]);
    std::swap(t->nb[0], t->nb[1]);
    return t;
}

inline ggml_tensor * ggml_cont(ggml_context * ctx, ggml_tensor * a) {
    ggml_tensor t = {};
    lay_out(t, a->type, a->ne[0], a->ne[1], a->ne[2], a->ne[3]);
    t.op     = GGML_OP_CONT;
    t.src[0] = a;
    return add_tensor(ctx, t);
}

inline ggml_tensor * ggml_cpy(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b) {
    GGML_ASSERT(ggml_nelements(a) == ggml_nelements(b) && a->type == b->type);
    auto * t = ggml_view_tensor(ctx, b);
    t->op     = GGML_OP_CPY;
    t->src[0] = a;
    t->src[1] = b;
    return t;
}

inline ggml_tensor * ggml_get_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b) {
    GGML_ASSERT(a->ne[2] == b->ne[1] && a->ne[3] == b->ne[2] && b->ne[3] == 1);
    GGML_ASSERT(a->type == GGML_TYPE_F32 && b->type == GGML_TYPE_I32);
    ggml_tensor t = {};
    lay_out(t, GGML_TYPE_F32, a->ne[0], b->ne[0]);
    t.op     = GGML_OP_GET_ROWS;
    t.src[0] = a;
    t.src[1] = b;
    return add_tensor(ctx, t);
}

inline ggml_tensor * ggml_set_rows(ggml_context * ctx, ggml_tensor * a, ggml_tensor * b, ggml_tensor * c) {
    GGML_ASSERT(a->ne[0] == b->ne[0] && a->ne[2] == b->ne[2] && a->ne[3] == b->ne[3] && b->ne[1] == c->ne[0]);
    GGML_ASSERT(a->type == GGML_TYPE_F32 && b->type == GGML_TYPE_F32 && c->type == GGML_TYPE_I64);
    auto * t = ggml_view_tensor(ctx, a);
    t->op     = GGML_OP_SET_ROWS;
    t->src[0] = b;
    t->src[1] = c;
    t->src[2] = a;
    return t;
}

//
// graphs
//

inline ggml_cgraph * ggml_new_graph_custom(ggml_context * ctx, size_t size, bool) {
    const exempt ours;
    reserve(ctx, ggml_graph_overhead_custom(size, false));
    ctx->graphs.push_back({ {}, {}, size, false });
    return &ctx->graphs.back();
}

inline void check_view(const ggml_tensor * t) {
    const auto * of = t->view_src;
    GGML_ASSERT(t->data == (of->data ? (char *) of->data + t->view_offs : nullptr));
    GGML_ASSERT(t->view_offs + ggml_nbytes(t) <= ggml_nbytes(of));
    if (t->op == GGML_OP_VIEW) {
        GGML_ASSERT(t->nb[2] == t->nb[1]*t->ne[1] && t->nb[3] == t->nb[2]*t->ne[2]);
    }
}

inline void ggml_build_forward_expand(ggml_cgraph * gf, ggml_tensor * t) {
    const exempt ours;
    const auto known = [=](const std::vector<ggml_tensor *> & list) { return std::find(list.begin(), list.end(), t) != list.end(); };
    if (known(gf->nodes) || known(gf->leafs)) {
        return;
    }
    if (t->view_src) {
        check_view(t);
    }
    for (auto * src : t->src) {
        if (src) {
            GGML_ASSERT(t->op != GGML_OP_NONE);
            ggml_build_forward_expand(gf, src);
        }
    }
    auto & list = t->op == GGML_OP_NONE ? gf->leafs : gf->nodes;
    GGML_ASSERT(list.size() < gf->size);
    list.push_back(t);
}
