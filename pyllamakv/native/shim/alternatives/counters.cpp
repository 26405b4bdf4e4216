// Counters of the patch kv-counters.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_counters
// Trees with the patch kv-counters.

#include "llama-kv-counters.h"

const uint64_t plk::counters::bits = PLK_CAP_COUNTERS;

bool plk::counters::read(llama_context *ctx, plk_counters &out) {
    llama_kv_counters now{};
    if (!llama_kv_counters_get(ctx, &now)) {
        return false;
    }
    out.slot_searches = now.slot_searches;
    out.slot_failures = now.slot_failures;
    out.decode_retries = now.decode_retries;
    out.defrags = now.defrags;
    out.moves = now.moves;
    out.cells_moved = now.cells_moved;
    out.bytes_moved = now.bytes_moved;
    out.graphs = now.graphs;
    out.ns = now.ns;
    out.plan_ns = now.plan_ns;
    out.scratch_bytes = now.scratch_bytes;
    return true;
}

#elif defined(PLK_USE_none)
// Trees without the patch kv-counters.

const uint64_t plk::counters::bits = 0;

bool plk::counters::read(llama_context *, plk_counters &) { return false; }

#endif
