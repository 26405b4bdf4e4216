#ifndef SERVER_KV_METRICS_H
#define SERVER_KV_METRICS_H

// The counters of src/llama-kv-counters.h in the text format of Prometheus, for the endpoint /metrics of llama-server.
//
// This file is identical for all versions of llama.cpp.

#include "../../src/llama-kv-counters.h"

#include <iomanip>
#include <locale>
#include <mutex>
#include <sstream>
#include <string>

namespace server_kv_metrics {

// The last values that were read, of one context per process.
struct last_values {
    std::mutex mutex; // /metrics may be rendered in another thread

    bool              known = false;
    llama_kv_counters counters;
};

inline last_values & last() {
    static last_values res;

    return res;
}

// Read the counters of a context. A decode changes them: none may run in another thread.
inline void update(const llama_context * ctx) {
    llama_kv_counters counters;

    if (llama_kv_counters_get(ctx, &counters)) {
        std::lock_guard<std::mutex> lock(last().mutex);

        last().known    = true;
        last().counters = counters;
    }
}

// A metric, and the counter that it shows.
struct metric {
    const char * name;
    const char * type;
    const char * help;

    int64_t llama_kv_counters::* value;

    bool is_time; // the counter is in nanoseconds, the metric in seconds
};

// Return the last values as Prometheus reads them; an empty text if none were read. Omits what the build does not count.
inline std::string text() {
    typedef llama_kv_counters c;

    static const metric metrics[] = {
        { "slot_searches_total",               "counter", "Searches for cells, by micro-batches and by restored sequences", &c::slot_searches,  false },
        { "slot_failures_total",               "counter", "Searches that found no cells",                                   &c::slot_failures,  false },
        { "decode_retries_total",              "counter", "Searches that a decode repeated after a defragmentation",        &c::decode_retries, false },
        { "defragmentations_total",            "counter", "Defragmentations that moved cells",                              &c::defrags,        false },
        { "defragmentation_moves_total",       "counter", "Runs of cells that defragmentations moved",                      &c::moves,          false },
        { "defragmentation_cells_total",       "counter", "Cells that defragmentations moved",                              &c::cells_moved,    false },
        { "defragmentation_bytes_total",       "counter", "Bytes that defragmentations moved",                              &c::bytes_moved,    false },
        { "defragmentation_graphs_total",      "counter", "Compute graphs that moved cells",                                &c::graphs,         false },
        { "defragmentation_seconds_total",     "counter", "Time that defragmentations took",                                &c::ns,             true  },
        { "defragmentation_plan_seconds_total", "counter", "Part of this time that was spent on planning",                  &c::plan_ns,        true  },
        { "defragmentation_scratch_bytes",     "gauge",   "Maximum memory that one defragmentation used beside the cache",  &c::scratch_bytes,  false },
    };

    std::lock_guard<std::mutex> lock(last().mutex);

    std::ostringstream res;
    res.imbue(std::locale::classic());

    for (const auto & m : metrics) {
        const int64_t value = last().known ? last().counters.*m.value : -1;

        if (value < 0) {
            continue;
        }

        const std::string name = std::string("llamacpp:kv_") + m.name;

        res << "# HELP " << name << " " << m.help << "\n"
            << "# TYPE " << name << " " << m.type << "\n"
            << name << " ";

        if (m.is_time) {
            res << value/1000000000 << "." << std::setw(9) << std::setfill('0') << value % 1000000000;
        } else {
            res << value;
        }

        res << "\n";
    }

    return res.str();
}

} // namespace server_kv_metrics

#endif // SERVER_KV_METRICS_H
