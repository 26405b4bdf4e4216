// Capabilities of a context, derived from the fields of its parameters.
#pragma once

#include "fields.h"
#include "groups.h"

const uint64_t plk::context::bits =
    (PLK_HAS(kv_unified, llama_context_params) ? PLK_CAP_KV_UNIFIED | PLK_CAP_STREAMS : 0) |
    (PLK_HAS(flash_attn_type, llama_context_params) ? PLK_CAP_FLASH_AUTO : 0) |
    (PLK_HAS(swa_full, llama_context_params) ? PLK_CAP_SWA_FULL | PLK_CAP_SWA : 0);
