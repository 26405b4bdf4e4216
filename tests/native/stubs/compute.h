// Stub of graph execution: computes the nodes of a graph in order.
#pragma once

#include "buffers.h"

#include <set>

inline void copy_elements(const ggml_tensor * to, const ggml_tensor * from) {
    const size_t  size = ggml_type_size(to->type);
    const int64_t n    = ggml_nelements(to)/ggml_blck_size(to->type);
    int64_t at[2][2] = {}; // column (in blocks) and row, in `to` and in `from`
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

// copies row `from` of tensor b to row `to` of tensor a
inline void copy_row(const ggml_tensor * a, int64_t to, const ggml_tensor * b, int64_t from) {
    GGML_ASSERT(to >= 0 && to < a->ne[1] && from >= 0 && from < b->ne[1] && a->ne[0] == b->ne[0]);
    const size_t size = ggml_row_size(a->type, a->ne[0]);
    std::memcpy(bytes(a, to*a->nb[1], size), bytes(b, from*b->nb[1], size), size);
}

// true if two tensors share bytes, which ggml_cpy() does not support
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
    const auto blocks_a = touched(a), blocks_b = touched(b);
    return std::any_of(blocks_a.begin(), blocks_a.end(), [&](const char * at) { return blocks_b.count(at) > 0; });
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
