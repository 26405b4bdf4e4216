// Create a context with llama_init_from_model (0.3.7 and later).
#include "context/bits.h"

llama_context *plk::context::open(llama_model *model, llama_context_params params) {
    return llama_init_from_model(model, params);
}
