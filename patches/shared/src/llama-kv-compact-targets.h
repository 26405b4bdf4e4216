#ifndef LLAMA_KV_COMPACT_TARGETS_H
#define LLAMA_KV_COMPACT_TARGETS_H

// The caches of each class of memory, for llama-kv-compact-impl.h. A class that this file does not name is refused:
// llama_memory_hybrid_idx and llama_kv_cache_dsv4, for example, keep cell indexes in their pools and compressed states.

#include "llama-kv-compact-impl.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid.h"

#if __has_include("llama-memory-hybrid-iswa.h")
#include "llama-memory-hybrid-iswa.h"
#define LLAMA_KV_COMPACT_HYBRID_ISWA
#endif

#if __has_include("llama-kv-cache-dsa.h")
#include "llama-kv-cache-dsa.h"
#define LLAMA_KV_COMPACT_DSA
#endif

#if __has_include("llama-kv-cache-dsa-iswa.h")
#include "llama-kv-cache-dsa-iswa.h"
#define LLAMA_KV_COMPACT_DSA_ISWA
#endif

#if __has_include("llama-kv-cache-msa.h")
#include "llama-kv-cache-msa.h"
#define LLAMA_KV_COMPACT_MSA
#endif

namespace llama_kv_compaction {

static bool get_targets(const llama_memory_i * memory, std::vector<target> & res) {
    if (const auto * one = as<llama_kv_cache>(memory)) {
        res.push_back({ const_cast<llama_kv_cache *>(one), nullptr });

        return true;
    }

    if (const auto * one = as<llama_kv_cache_iswa>(memory)) {
        res.push_back({ one->get_base(), nullptr });
        res.push_back({ one->get_swa(),  nullptr });

        return true;
    }

    if (const auto * one = as<llama_memory_hybrid>(memory)) {
        return get_targets(one->get_mem_attn(), res);
    }

#ifdef LLAMA_KV_COMPACT_HYBRID_ISWA
    if (const auto * one = as<llama_memory_hybrid_iswa>(memory)) {
        return get_targets(one->get_mem_attn(), res);
    }
#endif

#ifdef LLAMA_KV_COMPACT_DSA
    if (const auto * one = as<llama_kv_cache_dsa>(memory)) {
        res.push_back({ one->get_mla(), one->get_lid() });

        return true;
    }
#endif

#ifdef LLAMA_KV_COMPACT_DSA_ISWA
    if (const auto * one = as<llama_kv_cache_dsa_iswa>(memory)) {
        res.push_back({ one->get_dsa()->get_mla(), one->get_dsa()->get_lid() });
        res.push_back({ one->get_swa(), nullptr });

        return true;
    }
#endif

#ifdef LLAMA_KV_COMPACT_MSA
    if (const auto * one = as<llama_kv_cache_msa>(memory)) {
        res.push_back({ one->get_base(), one->get_idx() });

        return true;
    }
#endif

    return false;
}

} // namespace llama_kv_compaction

void llama_kv_cache::get_compact_tensors(uint32_t strm, std::vector<llama_kv_defrag::cell_tensor> & res) const {
    for (const auto & layer : layers) {
        llama_kv_defrag::add_cells(res, layer.k, false,   get_size(), strm, n_stream);
        llama_kv_defrag::add_cells(res, layer.v, v_trans, get_size(), strm, n_stream);
    }
}

#endif // LLAMA_KV_COMPACT_TARGETS_H
