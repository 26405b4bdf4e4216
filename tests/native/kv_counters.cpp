// Unit tests of llama-kv-counters-impl.h, with and without the counters of full-defrag or compaction.

#include "groups.h"

#include "llama-kv-counters-impl.h"

struct plain {
    int64_t n_slot_searches;
    int64_t n_slots_found;
};

struct stats {
    int64_t n_retries, n_defrags, n_moves, n_cells, n_bytes, n_graphs, n_scratch, t_ns, t_plan_ns;
};

struct patched : plain {
    stats defrag_stats;

    patched(int64_t searches, int64_t found, stats sums) : plain{ searches, found }, defrag_stats(sums) {}
};

static void sums() {
    const patched one(7, 5, { 1, 2, 3, 4, 5, 6, 70, 8, 9 }), two(10, 10, { 10, 20, 30, 40, 50, 60, 60, 80, 90 });
    const auto all = llama_kv_counting::sum<patched>({ &one, &two });
    CHECK(all.slot_searches == 17 && all.slot_failures == 2 && all.decode_retries == 11 && all.defrags == 22);
    CHECK(all.moves == 33 && all.cells_moved == 44 && all.bytes_moved == 55 && all.graphs == 66);
    CHECK(all.ns == 88 && all.plan_ns == 99);
    CHECK(all.scratch_bytes == 70); // the maximum, not the sum
}

// counters that a build lacks are -1, not a sum of -1 per cache
static void unknown() {
    const plain one{ 7, 5 }, two{ 10, 10 };
    const auto all = llama_kv_counting::sum<plain>({ &one, &two });
    CHECK(all.slot_searches == 17 && all.slot_failures == 2);
    for (const int64_t value : { all.decode_retries, all.defrags, all.moves, all.cells_moved, all.bytes_moved, all.graphs, all.ns,
                                 all.plan_ns, all.scratch_bytes }) {
        CHECK(value == -1);
    }
}

int main(int argc, char ** argv) { return run_group(argc, argv, { { "sums", sums }, { "unknown", unknown } }); }
