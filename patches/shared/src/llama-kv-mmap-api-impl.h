// Implementation of llama-kv-mmap-api.h. Only llama-context.cpp includes this file.

#include "llama-kv-mmap-api.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-mmap.h"

static std::shared_ptr<llama_kv_mmap::backing> llama_kv_mmap_at(const llama_context * ctx, int32_t i) {
    const auto & all = ctx->kv_mappings;

    return i >= 0 && (size_t) i < all.size() ? all[i].lock() : nullptr;
}

int32_t llama_kv_mmap_count(const llama_context * ctx) {
    return (int32_t) ctx->kv_mappings.size();
}

bool llama_kv_mmap_get(const llama_context * ctx, int32_t i, llama_kv_mmap_info * out) {
    const auto one = llama_kv_mmap_at(ctx, i);
    if (!one) {
        return false;
    }

    out->kind        = one->get_kind();
    out->n_tensors   = (int32_t) one->get_tensors().size();
    out->n_cells     = one->get_n_cells();
    out->n_stream    = one->get_n_stream();
    out->kept        = one->get_is_kept();
    out->resumed     = one->get_is_resumed();
    out->generation  = one->get_generation();
    out->n_reserved  = one->reserved();
    out->n_committed = one->committed();
    out->n_file      = one->get_file_bytes();

    return true;
}

bool llama_kv_mmap_get_tensor(const llama_context * ctx, int32_t i, int32_t j, llama_kv_mmap_tensor * out) {
    const auto one = llama_kv_mmap_at(ctx, i);
    if (!one || j < 0 || (size_t) j >= one->get_tensors().size()) {
        return false;
    }

    const auto & t = one->get_tensors()[j];

    out->layer       = t.layer;
    out->is_v        = t.is_v;
    out->n_reserved  = t.n_reserved;
    out->n_committed = t.n_committed;

    return true;
}

uint64_t llama_kv_mmap_trim(const llama_context * ctx) {
    uint64_t res = 0;

    for (int32_t i = 0; i < llama_kv_mmap_count(ctx); ++i) {
        const auto one = llama_kv_mmap_at(ctx, i);

        res += one ? one->trim() : 0;
    }

    return res;
}

bool llama_kv_mmap_flush(const llama_context * ctx, const int32_t * tokens, size_t n_tokens) {
    size_t n = 0;

    for (const auto & each : ctx->kv_mappings) {
        const auto one = each.lock();

        n += one ? (size_t) one->get_n_cells()*one->get_n_stream() : 0;
    }

    if (tokens && n_tokens != n) {
        LLAMA_LOG_ERROR("%s: there are %zu cells, not %zu\n", __func__, n, n_tokens);
        return false;
    }

    try {
        for (const auto & each : ctx->kv_mappings) {
            if (const auto one = each.lock()) {
                one->flush(tokens);

                tokens = tokens ? tokens + (size_t) one->get_n_cells()*one->get_n_stream() : nullptr;
            }
        }
    } catch (const std::exception & e) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, e.what());
        return false;
    }

    return true;
}

const int32_t * llama_kv_mmap_tokens(const llama_context * ctx, int32_t i) {
    const auto one = llama_kv_mmap_at(ctx, i);

    return one && one->get_is_kept() ? one->get_tokens() : nullptr;
}
