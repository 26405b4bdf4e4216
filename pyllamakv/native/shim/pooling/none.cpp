// Releases without pooling by a classification head.
#include "groups.h"

const uint64_t plk::pooling::bits = 0;
