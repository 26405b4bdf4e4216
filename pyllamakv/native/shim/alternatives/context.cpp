// Creating contexts: with llama_init_from_model since 0.3.7.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "fields.h"
#include "groups.h"

// Capabilities of a context, derived from the fields of its parameters.
const uint64_t plk::context::bits =
    (PLK_HAS(kv_unified, llama_context_params) ? PLK_CAP_KV_UNIFIED | PLK_CAP_STREAMS : 0) |
    (PLK_HAS(flash_attn_type, llama_context_params) ? PLK_CAP_FLASH_AUTO : 0) |
    (PLK_HAS(swa_full, llama_context_params) ? PLK_CAP_SWA_FULL | PLK_CAP_SWA : 0);

llama_context *plk::context::open(llama_model *model, llama_context_params params) {
#ifdef PLK_USE_init
    return llama_init_from_model(model, params);
#elif defined(PLK_USE_new)
    return llama_new_context_with_model(model, params);
#endif
}
