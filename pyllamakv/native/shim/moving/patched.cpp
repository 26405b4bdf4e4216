// Trees with the patches full-defrag or compaction, which read options of this thread.
#include "groups.h"

#include "llama-kv-defrag.h"

const uint64_t plk::moving::bits = PLK_CAP_DEFRAG_OPTIONS;

void plk::moving::choose(const plk_context_params &asked) {
    auto &options = llama_kv_defrag::current();
    options.order =
        asked.defrag_plan == 1 ? llama_kv_defrag::ORDER_KEPT : llama_kv_defrag::ORDER_FEWEST;
    options.mover = static_cast<llama_kv_defrag::mover>(asked.defrag_mover);
    options.n_threads = static_cast<uint32_t>(std::max(asked.defrag_threads, 0));
}
