// Stub of llama_context: with STUB_MEMORY its memory and the update of it, otherwise its mapped caches.
#pragma once

#ifdef STUB_MEMORY

#include "ggml-backend.h"
#include "llama-kv-cache.h"

#include <functional>

enum ggml_status { GGML_STATUS_FAILED = -1, GGML_STATUS_SUCCESS = 0 };

struct llama_cparams {
    int n_threads = 1;
};

struct llm_graph_result {
    int64_t max_nodes = 4096;

    int64_t get_max_nodes() const { return max_nodes; }
};

struct llama_context {
    llama_memory_i * memory = nullptr;

    bool  compact_requested = false;
    float defrag_thold      = -1.0f;

    std::function<void()> update; // called by memory_update()
    llama_cparams         cparams;
    llm_graph_result      reserved;
    ggml_backend_sched    sched;
    int                   n_reserved = 0;

    ~llama_context() { schedulers().erase(&sched); }

    llama_memory_i *      get_memory()         const { return memory; }
    const llama_cparams & get_cparams()        const { return cparams; }
    ggml_backend_sched_t  get_sched()                { return &sched; }
    llm_graph_result *    get_gf_res_reserve()       { return &reserved; }

    ggml_status graph_compute(ggml_cgraph * gf, bool) { return sched.compute(gf) ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED; }

    void memory_update(bool) { update(); }
    void sched_reserve()     { n_reserved++; }
};

#else

#include "llama-kv-mmap.h"

#include <memory>
#include <vector>

struct llama_context {
    std::vector<std::weak_ptr<llama_kv_mmap::backing>> kv_mappings;
};

#endif
