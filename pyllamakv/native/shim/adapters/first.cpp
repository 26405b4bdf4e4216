// Adapters with the first names (through 0.3.6).
#include "groups.h"

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
