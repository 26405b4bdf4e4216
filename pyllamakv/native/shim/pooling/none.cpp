// Releases without pooling by a classification head.
#include "groups.h"

const uint64_t plk::pooling::bits = 0;

bool plk::pooling::has_head(const llama_model *) { return false; }

int64_t plk::pooling::width(llama_context *) { return 0; }
