// Pooling by a classification head (0.3.1 and later).
#include "groups.h"

const uint64_t plk::pooling::bits = LLAMA_POOLING_TYPE_RANK == PLK_POOLING_RANK ? PLK_CAP_RANK : 0;
