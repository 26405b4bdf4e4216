// Adapters that are set as a list (0.3.17 and later).
#include "groups.h"

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
