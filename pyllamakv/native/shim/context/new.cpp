// Create a context with llama_new_context_with_model (through 0.3.6).
#include "context/bits.h"

llama_context *plk::context::open(llama_model *model, llama_context_params params) {
    return llama_new_context_with_model(model, params);
}
