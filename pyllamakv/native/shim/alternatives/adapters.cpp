// LoRA adapters.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_list
// Adapters that are set as a list (0.3.17 and later).

const uint64_t plk::adapters::bits = PLK_CAP_ADAPTERS;

void *plk::adapters::open(llama_model *model, const char *path) {
    return llama_adapter_lora_init(model, path);
}

void plk::adapters::close(void *lora) {
    llama_adapter_lora_free(static_cast<llama_adapter_lora *>(lora));
}

bool plk::adapters::set(llama_context *ctx, const std::vector<void *> &loras,
                        const std::vector<float> &scales) {
    std::vector<llama_adapter_lora *> list;
    for (void *lora : loras) {
        list.push_back(static_cast<llama_adapter_lora *>(lora));
    }
    std::vector<float> copy = scales;
    return llama_set_adapters_lora(ctx, list.data(), list.size(), copy.data()) == 0;
}

// The size of a graph includes all adapters of the model.
size_t plk::adapters::max_nodes(llama_context *) { return 0; }

#elif defined(PLK_USE_each)
// Adapters that are set one by one, with the names since January 2025 (0.3.7 through 0.3.16).

#include "llama-context.h"
#include "llama-model.h"

const uint64_t plk::adapters::bits = PLK_CAP_ADAPTERS;

namespace {
// Return the number of streams of a context.
template <typename Params> auto streams(const Params &params, int) -> decltype(+params.kv_unified, 1u) {
    return params.kv_unified ? 1 : params.n_seq_max;
}
template <typename Params> uint32_t streams(const Params &, long) { return 1; }

// Drop the graph of the last decode. Since graphs are reused (0.3.15), llama.cpp compares the address
// of the list of adapters only, and would decode with the former ones.
template <typename Context>
auto drop_graph(Context *ctx, int) -> decltype(ctx->graph_reserve(1, 1, 1, nullptr), void()) {
    const auto memory = ctx->get_memory();
    const auto all = memory != nullptr ? memory->init_full() : nullptr;
    // The graph must have as many sequences as the cache has streams.
    const uint32_t n_seqs = streams(ctx->get_cparams(), 0);
    ctx->graph_reserve(n_seqs, n_seqs, n_seqs, all.get());
}
template <typename Context> void drop_graph(Context *, long) {}

llama_adapter_lora *typed(void *lora) { return static_cast<llama_adapter_lora *>(lora); }
} // namespace

void *plk::adapters::open(llama_model *model, const char *path) {
    return llama_adapter_lora_init(model, path);
}

void plk::adapters::close(void *lora) { llama_adapter_lora_free(typed(lora)); }

bool plk::adapters::set(llama_context *ctx, const std::vector<void *> &loras,
                        const std::vector<float> &scales) {
    llama_clear_adapter_lora(ctx);
    bool good = true;
    for (size_t i = 0; i < loras.size(); ++i) {
        good = good && llama_set_adapter_lora(ctx, typed(loras[i]), scales[i]) == 0;
    }
    drop_graph(ctx, 0);
    return good;
}

// The least of these releases: llama_context::graph_max_nodes of 0.3.15.
size_t plk::adapters::max_nodes(llama_context *ctx) {
    return std::max<size_t>(1024, 8 * llama_get_model(ctx)->tensors_by_name.size());
}

#elif defined(PLK_USE_first)
// Adapters with the first names (through 0.3.6).

const uint64_t plk::adapters::bits = PLK_CAP_ADAPTERS;

namespace {
llama_lora_adapter *typed(void *lora) { return static_cast<llama_lora_adapter *>(lora); }
} // namespace

void *plk::adapters::open(llama_model *model, const char *path) {
    return llama_lora_adapter_init(model, path);
}

void plk::adapters::close(void *lora) { llama_lora_adapter_free(typed(lora)); }

bool plk::adapters::set(llama_context *ctx, const std::vector<void *> &loras,
                        const std::vector<float> &scales) {
    llama_lora_adapter_clear(ctx);
    bool good = true;
    for (size_t i = 0; i < loras.size(); ++i) {
        good = good && llama_lora_adapter_set(ctx, typed(loras[i]), scales[i]) == 0;
    }
    return good;
}

// The least of these releases: llama_model_max_nodes of 0.2.85.
size_t plk::adapters::max_nodes(llama_context *) { return 8192; }

#elif defined(PLK_USE_none)
// Releases whose adapters have an unknown interface.

const uint64_t plk::adapters::bits = 0;

void *plk::adapters::open(llama_model *, const char *) { return nullptr; }
void plk::adapters::close(void *) {}
bool plk::adapters::set(llama_context *, const std::vector<void *> &, const std::vector<float> &) {
    return false;
}
size_t plk::adapters::max_nodes(llama_context *) { return 0; }

#endif
