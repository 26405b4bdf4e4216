// Everything is in ggml-backend.h.
#pragma once

#include "ggml-backend.h"
