#ifndef LLAMA_KV_MMAP_GGML_H
#define LLAMA_KV_MMAP_GGML_H

// Allocates the tensors of a KV cache in mapped memory (llama-kv-mmap.h). This file uses only ggml's public interface
// and llama.cpp's log macros, and is identical for all their versions.
//
// All tensors of a cache are in one buffer of ggml, as upstream allocates them. Each byte of it may be read and written.

#include "llama-impl.h"
#include "llama-kv-mmap.h"

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

namespace llama_kv_mmap {

// Describe a cache tensor, without its offset. n_cells: per stream. v_trans: the cache stores V transposed.
inline tensor describe(const ggml_tensor * t, uint32_t n_cells, uint32_t n_stream, bool v_trans) {
    tensor res;

    res.name    = t->name;
    res.type    = ggml_type_name(t->type);
    res.n_bytes = ggml_nbytes(t);

    // "cache_k_l7", or with a tag "cache_idx_k_l7"
    const size_t at = res.name.rfind("_l");

    res.layer  = at == std::string::npos ? -1 : std::atoi(res.name.c_str() + at + 2);
    res.is_v   = at != std::string::npos && at > 0 && res.name[at - 1] == 'v';
    res.by_row = !(res.is_v && v_trans);
    res.n_cell = res.by_row ? res.n_bytes/n_stream/n_cells : ggml_type_size(t->type);

    return res;
}

// Allocate the tensors of ctx in mapped memory and set res to the backing. Return nullptr if the options select the
// heap, or if buft is not the CPU's buffer type and the cache is not to be kept. Throws error.
inline ggml_backend_buffer_t alloc_mapped(std::shared_ptr<backing> & res, ggml_context * ctx, ggml_backend_buffer_type_t buft,
        uint32_t n_cells, uint32_t n_stream, bool v_trans) {
    const auto opts = effective();

    if (opts.kind == KIND_HEAP) {
        return nullptr;
    }

    if (buft != ggml_backend_cpu_buffer_type()) {
        if (opts.keep != KEEP_NOT) {
            current().failed = FAILURE_UNSUPPORTED;
            throw error(FAILURE_UNSUPPORTED, "the KV cache lies on a device (" + std::string(ggml_backend_buft_name(buft)) +
                ") and cannot be kept in a file: load the model with less layers there, or without offload_kqv");
        }

        return nullptr; // the caller can see this: get_tensors() lacks these layers
    }

    std::vector<ggml_tensor *> tensors;
    std::vector<tensor>        list;

    for (auto * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (!t->view_src) {
            tensors.push_back(t);
            list.push_back(describe(t, n_cells, n_stream, v_trans));
        }
    }

    if (tensors.empty()) {
        return nullptr;
    }

    res = make(std::move(list), n_cells, n_stream);

    ggml_backend_buffer_t buf = ggml_backend_cpu_buffer_from_ptr(res->get_buffer(), res->get_buffer_size());
    if (!buf) {
        return nullptr;
    }

    for (size_t i = 0; i < tensors.size(); ++i) {
        ggml_backend_tensor_alloc(buf, tensors[i], res->data() + res->get_tensors()[i].offset);
    }

    for (auto * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
        if (t->view_src) {
            ggml_backend_view_init(t);
        }
    }

    return buf;
}

// Log where the tensors of a cache in a buffer type are: in mapped memory, or nullptr as upstream allocates them. Log the
// variables with values that are not valid. If a variable is set, this is a warning: newer programs of upstream hide what
// the library logs as information.
inline void log_backing(ggml_backend_buffer_type_t buft, const backing * mapped) {
    const auto opts = effective();

    for (const auto & text : opts.ignored) {
        LLAMA_LOG_WARN("%s\n", text.c_str());
    }

    const std::string where =
        !mapped                            ? "upstream's memory" :
        mapped->get_kind() == KIND_ANON    ? "anonymous mapped memory" :
        mapped->get_kind() == KIND_TEMP    ? "a temporary file in " + opts.path :
        mapped->get_is_kept()              ? "the kept file " + mapped->get_path() : "the file " + mapped->get_path();

    if (get_variable("LLAMA_KV_BACKING").empty()) {
        LLAMA_LOG_INFO("%s: KV cache (%s) is in %s\n", __func__, ggml_backend_buft_name(buft), where.c_str());
    } else {
        LLAMA_LOG_WARN("%s: KV cache (%s) is in %s\n", __func__, ggml_backend_buft_name(buft), where.c_str());
    }
}

// Allocate the tensors of ctx, all of one cache and with buffer type buft: in mapped memory if the options of this
// thread request it, else with upstream's function. Throws error if mapped memory fails, instead of using the heap. If
// mapped memory is requested, upstream's function allocates only layers on devices, of caches that are not kept.
inline ggml_backend_buffer_t alloc(std::shared_ptr<backing> & res, ggml_context * ctx, ggml_backend_buffer_type_t buft,
        uint32_t n_cells, uint32_t n_stream, bool v_trans) {
    ggml_backend_buffer_t buf = alloc_mapped(res, ctx, buft, n_cells, n_stream, v_trans);

    log_backing(buft, buf ? res.get() : nullptr);

    return buf ? buf : ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft);
}

// Return cache.has_cell_ext() of the releases that declare it, else false.
template <typename Cache>
auto has_cell_ext(const Cache & cache, int) -> decltype(cache.has_cell_ext()) {
    return cache.has_cell_ext();
}

template <typename Cache>
bool has_cell_ext(const Cache &, long) {
    return false;
}

// Throw error if a cache is kept whose cells have more than a file contains: 2D positions (M-RoPE), or what upstream calls
// cell extensions, such as the tokens of n-gram embeddings. A resumed cache would lack them.
template <typename Cache>
void check_cells(const backing & mapped, const Cache & cache, bool is_2d) {
    if (mapped.get_is_kept() && (is_2d || has_cell_ext(cache, 0))) {
        current().failed = FAILURE_UNSUPPORTED;
        throw error(FAILURE_UNSUPPORTED, "cells of this model have more than positions and sequences (2D positions, or tokens "
            "for n-gram embeddings): their KV cache cannot be kept in a file");
    }
}

// Set a buffer of the cache to zero. New mapped memory is zero already; writing zeros would commit every page.
inline void clear(const std::shared_ptr<backing> & mapped, ggml_backend_buffer_t buf) {
    if (mapped && ggml_backend_buffer_get_base(buf) == mapped->get_buffer()) {
        mapped->clear();
    } else {
        ggml_backend_buffer_clear(buf, 0);
    }
}

// Read all cells of a stream that are structs with a position and a set of sequences, in the form of
// backing::cells_read. Sequences from 64*n_words upwards are omitted.
template <typename Cells>
void read_sets(const Cells & cells, int32_t * pos, uint64_t * seqs, uint32_t n_words) {
    std::fill(seqs, seqs + cells.size()*n_words, 0);

    for (size_t i = 0; i < cells.size(); ++i) {
        pos[i] = cells[i].seq_id.empty() ? -1 : cells[i].pos;

        for (const auto seq : cells[i].seq_id) {
            if (seq >= 0 && (uint32_t) seq < 64*n_words) {
                seqs[i*n_words + seq/64] |= 1ull << seq % 64;
            }
        }
    }
}

// Write all cells of a stream from the form of backing::cells_write. Requires that all cells are free. Return the
// number of used cells.
template <typename Cells>
uint32_t write_sets(Cells & cells, const int32_t * pos, const uint64_t * seqs, uint32_t n_words) {
    uint32_t res = 0;

    for (size_t i = 0; i < cells.size(); ++i) {
        for (uint32_t seq = 0; pos[i] >= 0 && seq < 64*n_words; ++seq) {
            if (seqs[i*n_words + seq/64] >> seq % 64 & 1) {
                cells[i].seq_id.insert((int32_t) seq);
            }
        }

        if (!cells[i].seq_id.empty()) {
            cells[i].pos = pos[i];
            ++res;
        }
    }

    return res;
}

// Read all cells of a stream through the accessors of a cell class, in the form of backing::cells_read.
template <typename Cells>
void read_cells(const Cells & cells, int32_t * pos, uint64_t * seqs, uint32_t n_words) {
    std::fill(seqs, seqs + (size_t) cells.size()*n_words, 0);

    for (uint32_t i = 0; i < cells.size(); ++i) {
        pos[i] = cells.is_empty(i) ? -1 : cells.pos_get(i);

        for (uint32_t seq = 0; pos[i] >= 0 && seq < 64*n_words; ++seq) {
            if (cells.seq_has(i, (int32_t) seq)) {
                seqs[(size_t) i*n_words + seq/64] |= 1ull << seq % 64;
            }
        }
    }
}

// Write all cells of a stream through the accessors of a cell class. Requires that all cells are free.
template <typename Cells>
void write_cells(Cells & cells, const int32_t * pos, const uint64_t * seqs, uint32_t n_words) {
    for (uint32_t i = 0; i < cells.size(); ++i) {
        bool is_set = false;

        for (uint32_t seq = 0; pos[i] >= 0 && seq < 64*n_words; ++seq) {
            if (seqs[(size_t) i*n_words + seq/64] >> seq % 64 & 1) {
                if (!is_set) {
                    cells.pos_set(i, pos[i]);
                    is_set = true;
                }

                cells.seq_add(i, (int32_t) seq);
            }
        }
    }
}

} // namespace llama_kv_mmap

#endif // LLAMA_KV_MMAP_GGML_H
