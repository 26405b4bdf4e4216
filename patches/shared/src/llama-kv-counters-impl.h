#ifndef LLAMA_KV_COUNTERS_IMPL_H
#define LLAMA_KV_COUNTERS_IMPL_H

// The part of llama_kv_counters_get() that is the same in all releases: sums over the caches of a context.
//
// A cache has the members n_slot_searches and n_slots_found, and with full-defrag or compaction also defrag_stats.

#include "llama-kv-counters.h"

#include <algorithm>
#include <vector>

namespace llama_kv_counting {

// Add what full-defrag or compaction counts. The second overload is for a cache without these patches.
template <typename Cache>
auto add_defrags(llama_kv_counters & res, const Cache & kv, int) -> decltype(kv.defrag_stats, void()) {
    res.decode_retries += kv.defrag_stats.n_retries;
    res.defrags        += kv.defrag_stats.n_defrags;
    res.moves          += kv.defrag_stats.n_moves;
    res.cells_moved    += kv.defrag_stats.n_cells;
    res.bytes_moved    += kv.defrag_stats.n_bytes;
    res.graphs         += kv.defrag_stats.n_graphs;
    res.ns             += kv.defrag_stats.t_ns;
    res.plan_ns        += kv.defrag_stats.t_plan_ns;
    res.scratch_bytes   = std::max<int64_t>(res.scratch_bytes, kv.defrag_stats.n_scratch);
}

template <typename Cache>
void add_defrags(llama_kv_counters & res, const Cache &, long) {
    res = { res.slot_searches, res.slot_failures, -1, -1, -1, -1, -1, -1, -1, -1, -1 };
}

// Return the counters of the caches of a context.
template <typename Cache>
llama_kv_counters sum(const std::vector<const Cache *> & caches) {
    llama_kv_counters res = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 };

    for (const auto * kv : caches) {
        res.slot_searches += kv->n_slot_searches;
        res.slot_failures += kv->n_slot_searches - kv->n_slots_found;

        add_defrags(res, *kv, 0);
    }

    return res;
}

} // namespace llama_kv_counting

#endif // LLAMA_KV_COUNTERS_IMPL_H
