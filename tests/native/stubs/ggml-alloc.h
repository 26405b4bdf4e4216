// Stub of ggml-alloc.h: the declarations are in ggml-backend.h.
#pragma once

#include "ggml-backend.h"
