// Unit tests of server-kv-metrics.h: the text for /metrics before and after updates of the counters.

#include "groups.h"

#include "server-kv-metrics.h"

static bool              has_counters = true;
static llama_kv_counters counters;

bool llama_kv_counters_get(const llama_context *, llama_kv_counters * out) {
    if (has_counters) {
        *out = counters;
    }
    return has_counters;
}

static bool has(const std::string & line) {
    return ("\n" + server_kv_metrics::text()).find("\n" + line + "\n") != std::string::npos;
}

static size_t n_lines() {
    size_t n = 0;
    for (const char c : server_kv_metrics::text()) {
        n += c == '\n';
    }
    return n;
}

static void values() {
    counters = { 1, 2, 3, 4, 5, 6, 12345678901234, 8, 1000000001, 999999999, 11 };
    server_kv_metrics::update(nullptr);
    CHECK(n_lines() == 3*11);
    CHECK(has("# HELP llamacpp:kv_slot_searches_total Searches for cells, by micro-batches and by restored sequences"));
    CHECK(has("# TYPE llamacpp:kv_slot_searches_total counter") && has("# TYPE llamacpp:kv_defragmentation_scratch_bytes gauge"));
    CHECK(has("llamacpp:kv_slot_searches_total 1") && has("llamacpp:kv_slot_failures_total 2") && has("llamacpp:kv_decode_retries_total 3"));
    CHECK(has("llamacpp:kv_defragmentations_total 4") && has("llamacpp:kv_defragmentation_moves_total 5"));
    CHECK(has("llamacpp:kv_defragmentation_cells_total 6") && has("llamacpp:kv_defragmentation_graphs_total 8"));
    // large numbers are not rounded, and times are in seconds
    CHECK(has("llamacpp:kv_defragmentation_bytes_total 12345678901234"));
    CHECK(has("llamacpp:kv_defragmentation_seconds_total 1.000000001") && has("llamacpp:kv_defragmentation_plan_seconds_total 0.999999999"));
    CHECK(has("llamacpp:kv_defragmentation_scratch_bytes 11"));
}

static void absent() {
    CHECK(server_kv_metrics::text().empty());
    has_counters = false;
    server_kv_metrics::update(nullptr);
    CHECK(server_kv_metrics::text().empty());
    // a build without full-defrag and compaction reports only slot searches
    has_counters = true;
    counters     = { 7, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1 };
    server_kv_metrics::update(nullptr);
    CHECK(n_lines() == 3*2 && has("llamacpp:kv_slot_searches_total 7") && has("llamacpp:kv_slot_failures_total 0"));
    // the last values remain after a model is unloaded
    has_counters = false;
    server_kv_metrics::update(nullptr);
    CHECK(n_lines() == 3*2);
}

int main(int argc, char ** argv) { return run_group(argc, argv, { { "absent", absent }, { "values", values } }); }
