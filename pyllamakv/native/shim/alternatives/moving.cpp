// Options for moving cells.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_patched
// Trees with the patches full-defrag or compaction.

#include "llama-kv-settings.h"

const uint64_t plk::moving::bits = PLK_CAP_DEFRAG_OPTIONS;

namespace {
llama_kv_defrag::options options_of(const plk_context_params &asked) {
    llama_kv_defrag::options options;
    options.order = asked.defrag_plan == 1 ? llama_kv_defrag::ORDER_KEPT
        : asked.defrag_plan == 2           ? llama_kv_defrag::ORDER_FEWEST
                                           : llama_kv_defrag::ORDER_DEFAULT;
    options.mover = static_cast<llama_kv_defrag::mover>(asked.defrag_mover);
    options.n_threads = static_cast<uint32_t>(std::max(asked.defrag_threads, 0));
    return options;
}
} // namespace

void plk::moving::choose(llama_context *ctx, const plk_context_params &asked) {
    plk::cells::set_options(ctx, options_of(asked));
}

void plk::moving::describe(const plk_context_params &asked, plk_context_info &info) {
    const auto options = llama_kv_defrag::effective(options_of(asked));
    info.defrag_plan = options.order == llama_kv_defrag::ORDER_KEPT ? 1 : 2;
    info.defrag_mover = options.mover;
    info.defrag_threads =
        options.n_threads > 0 ? static_cast<int32_t>(options.n_threads) : asked.n_threads;
}

#elif defined(PLK_USE_none)
// Trees without the patches full-defrag and compaction: there are no options for moving cells.

const uint64_t plk::moving::bits = 0;

void plk::moving::choose(llama_context *, const plk_context_params &) {}

void plk::moving::describe(const plk_context_params &, plk_context_info &info) {
    info.defrag_mover = -1;
}

#endif
