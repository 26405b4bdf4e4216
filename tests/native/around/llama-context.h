// A context of which only the mapped caches are known.
#pragma once

#include "llama-kv-mmap.h"

#include <memory>
#include <vector>

struct llama_context {
    std::vector<std::weak_ptr<llama_kv_mmap::backing>> kv_mappings;
};
