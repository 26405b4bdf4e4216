// Identity, capabilities, last error and struct sizes of the library.
#include "groups.h"

#include <cstdarg>
#include <cstdio>
#include <string>

namespace {
thread_local std::string last_error;

#ifdef PLK_SHARED_COUNTER
constexpr uint64_t threads = 0;
#else
constexpr uint64_t threads = PLK_CAP_THREADS;
#endif
} // namespace

int plk::refuse(int code, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    try {
        last_error = text;
    } catch (...) {
        last_error.clear();
    }
    return code;
}

extern "C" {

uint32_t plk_abi(void) { return PLK_ABI; }

const char *plk_variant(void) { return plk::built::variant; }

const char *plk_probes(void) { return plk::built::probes; }

uint64_t plk_capabilities(void) {
    // A context takes the options for moving cells through its caches (cells::set_options).
    const uint64_t moving = plk::cells::bits != 0 ? plk::moving::bits : 0;
    return plk::context::bits | plk::cells::bits | plk::defrag::bits |
           plk::rollback::bits | plk::counters::bits | moving | plk::mapping::bits |
           plk::sampler::bits | plk::grammar::bits | plk::adapters::bits | plk::pooling::bits |
           threads | PLK_CAP_STATES;
}

const char *plk_last_error(void) { return last_error.c_str(); }

int plk_init(void) {
    return plk::guarded([] {
        plk::start();
        return PLK_OK;
    });
}

int32_t plk_sizeof(const char *name) {
    struct Size {
        const char *name;
        size_t bytes;
    };
    static const Size sizes[] = {
        {"plk_model_params", sizeof(plk_model_params)},
        {"plk_model_info", sizeof(plk_model_info)},
        {"plk_context_params", sizeof(plk_context_params)},
        {"plk_context_info", sizeof(plk_context_info)},
        {"plk_batch", sizeof(plk_batch)},
        {"plk_cells_info", sizeof(plk_cells_info)},
        {"plk_defrag_report", sizeof(plk_defrag_report)},
        {"plk_counters", sizeof(plk_counters)},
        {"plk_mapping", sizeof(plk_mapping)},
        {"plk_device", sizeof(plk_device)},
        {"plk_sampler_params", sizeof(plk_sampler_params)},
    };
    for (const Size &size : sizes) {
        if (name != nullptr && strcmp(size.name, name) == 0) {
            return static_cast<int32_t>(size.bytes);
        }
    }
    return -1;
}

} // extern "C"

// The struct layout that the Python binding was generated for (64-bit pointers). A struct may grow
// at its end; any other change requires a new PLK_ABI.
static_assert(sizeof(void *) != 8 || offsetof(plk_model_params, rpc_servers) == 24, "layout");
static_assert(sizeof(void *) != 8 || sizeof(plk_model_params) == 40, "layout");
static_assert(offsetof(plk_model_info, n_params) == 64 && sizeof(plk_model_info) == 88, "layout");
static_assert(offsetof(plk_context_params, defrag_thold) == 56, "layout");
static_assert(offsetof(plk_context_params, kv_backing) == 76, "layout");
static_assert(sizeof(void *) != 8 || offsetof(plk_context_params, pooling) == 104, "layout");
static_assert(sizeof(void *) != 8 || sizeof(plk_context_params) == 112, "layout");
static_assert(offsetof(plk_context_info, defrag_thold) == 60, "layout");
static_assert(sizeof(plk_context_info) == 88 && sizeof(plk_mapping) == 72, "layout");
static_assert(sizeof(void *) != 8 || offsetof(plk_batch, logits) == 40, "layout");
static_assert(sizeof(void *) != 8 || sizeof(plk_batch) == 64, "layout");
static_assert(offsetof(plk_cells_info, bytes_k) == 48 && sizeof(plk_cells_info) == 64, "layout");
static_assert(offsetof(plk_defrag_report, bytes) == 16, "layout");
static_assert(sizeof(plk_defrag_report) == 56, "layout");
static_assert(offsetof(plk_counters, ns) == 72 && sizeof(plk_counters) == 96, "layout");
static_assert(offsetof(plk_device, name) == 24 && sizeof(plk_device) == 216, "layout");
static_assert(sizeof(void *) != 8 || offsetof(plk_sampler_params, bias_token) == 104, "layout");
static_assert(sizeof(void *) != 8 || sizeof(plk_sampler_params) == 144, "layout");
