#ifndef SERVER_PARK_H
#define SERVER_PARK_H

// The policy of parking: when the KV cache of llama-server has no cells for a batch, a request is saved to host memory,
// its cells are removed, and it is continued later.
//
// This is preemption by swapping, as vLLM's first scheduler had it: the request that was started last is the victim, and
// requests with a common prompt are swapped as one. A victim does not wait here until enough others have ended: after a
// turn it takes the place of another one, so the longest wait grows with the requests that share the cache, and not with
// the length of their answers.
//
// This file is identical for all versions of llama.cpp, and uses none of its types.

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <locale>
#include <sstream>
#include <string>
#include <vector>

namespace server_park {

// The number of tokens that a request evaluates before it is a victim again, and that others evaluate before a parked
// request takes their place: a request of n tokens is not copied for less than n evaluated tokens.
inline uint64_t turn(int64_t n_tokens) {
    return (uint64_t) std::max<int64_t>(64, n_tokens);
}

// What a slot knows about its request.
struct seat {
    uint64_t order     = 0; // of its start: a later request has a larger one
    uint64_t evaluated = 0; // tokens of this request
    uint64_t resumed   = 0; // tokens that it had evaluated when it was resumed
    uint64_t guard     = 0; // it is no victim before it has evaluated that many

    // while it is parked
    int32_t  n_tokens = 0; // tokens that are saved
    uint64_t since    = 0; // tokens that all requests had evaluated when it was parked
    uint64_t retry    = 0; // it is not resumed before all requests have evaluated that many
    uint64_t n_parks  = 0;

    bool alone = false; // it shares no cell with its family any more

    std::vector<uint8_t> data; // the saved sequence

    void start(uint64_t order_) {
        *this = seat();
        order = order_;
    }

    // Remember a sequence whose cells are removed now.
    void park(std::vector<uint8_t> && data_, int32_t n_tokens_, uint64_t n_evaluated) {
        data     = std::move(data_);
        n_tokens = n_tokens_;
        since    = n_evaluated;
        retry    = 0;
        n_parks++;
    }

    // Free the memory of a sequence that has its cells again.
    void resume() {
        std::vector<uint8_t>().swap(data);
        resumed  = evaluated;
        guard    = evaluated + turn(n_tokens);
        n_tokens = 0;
    }
};

// A request, or a family of requests with a common prompt, which is parked and resumed as one.
struct group {
    uint64_t order = 0;

    int64_t cells = 0; // that it holds; of a parked one: that it needs to continue
    int64_t extra = 0; // that it needs only while it is resumed, because shared cells are copied first
    int64_t next  = 0; // that its next batch needs

    bool parkable = true;
    bool parked   = false;
    bool guarded  = false; // no victim while another one exists
    bool advanced = false; // it evaluated tokens after it was started or resumed

    // of a parked one
    uint64_t since = 0;
    uint64_t retry = 0;
};

// Return the cells that a family holds if its sequences share their first n_shared tokens: those of n_sharing sequences
// are the same cells.
inline int64_t cells_of_family(int64_t n_tokens_total, int64_t n_shared, int64_t n_sharing) {
    return n_tokens_total - n_shared*std::max<int64_t>(0, n_sharing - 1);
}

// Return the cells that requests hold, without the parked ones.
inline int64_t cells_held(const std::vector<group> & groups) {
    int64_t res = 0;
    for (const auto & g : groups) {
        res += g.parked ? 0 : g.cells;
    }
    return res;
}

// Return the index of the request to park, -1 if there is none: the one that was started last, which is no victim if it is
// the only one. A guarded request is parked only if every other one is guarded too.
inline int victim(const std::vector<group> & groups) {
    int  res      = -1;
    int  n_active = 0;
    for (int i = 0; i < (int) groups.size(); ++i) {
        const auto & g = groups[i];
        if (g.parked) {
            continue;
        }
        n_active++;
        if (!g.parkable) {
            continue;
        }
        if (res < 0 || g.guarded < groups[res].guarded || (g.guarded == groups[res].guarded && g.order > groups[res].order)) {
            res = i;
        }
    }
    return n_active > 1 ? res : -1;
}

// Return the index of the active request that was started last, -1 if none is active.
inline int last_started(const std::vector<group> & groups) {
    int res = -1;
    for (int i = 0; i < (int) groups.size(); ++i) {
        if (!groups[i].parked && (res < 0 || groups[i].order > groups[res].order)) {
            res = i;
        }
    }
    return res;
}

// The next change: requests to park, and the one to resume then. -1: no change.
struct change {
    int resume = -1;

    std::vector<int> park;
};

// Decide whether a parked request continues, before a batch is built.
//
// The one that waits longest is the next one. It continues if its cells and the next batch fit, or if no other request is
// active, or, after its turn, in the place of those that were started last.
inline change next_change(const std::vector<group> & groups, int64_t n_cells, uint64_t n_evaluated) {
    change res;

    int first = -1;
    for (int i = 0; i < (int) groups.size(); ++i) {
        const auto & g = groups[i];
        if (!g.parked) {
            continue;
        }
        if (first < 0 || g.since < groups[first].since || (g.since == groups[first].since && g.order < groups[first].order)) {
            first = i;
        }
    }
    if (first < 0) {
        return res;
    }

    const auto & g = groups[first];

    int64_t need     = g.cells + std::max(g.extra, g.next);
    int     n_active = 0;
    for (const auto & other : groups) {
        if (!other.parked) {
            need += other.cells + other.next;
            n_active++;
        }
    }

    if (n_active == 0) {
        res.resume = first;
        return res;
    }
    if (n_evaluated < g.retry) {
        return res;
    }
    if (need <= n_cells) {
        res.resume = first;
        return res;
    }
    if (n_evaluated - g.since < turn(g.cells)) {
        return res;
    }

    std::vector<int> others;
    for (int i = 0; i < (int) groups.size(); ++i) {
        if (!groups[i].parked && !groups[i].guarded && groups[i].parkable) {
            others.push_back(i);
        }
    }
    std::sort(others.begin(), others.end(), [&](int a, int b) { return groups[a].order > groups[b].order; });

    std::vector<int> park;
    for (const int i : others) {
        park.push_back(i);
        need -= groups[i].cells + groups[i].next;
        if (need <= n_cells) {
            res.resume = first;
            res.park   = park;
            break;
        }
    }

    return res;
}

// Remove the entries of a slot from a batch, from index off on, and move the indices of the other slots with their entries.
// Return how many were removed. The entries of the slot before off are evaluated.
template <typename Batch, typename Slots>
int32_t remove_entries(Batch & batch, Slots & slots, int id_slot, int32_t off) {
    auto & tokens = batch.tokens;

    std::vector<int32_t> moved(tokens.size(), -1);

    int32_t n = off;
    for (int32_t i = off; i < (int32_t) tokens.size(); ++i) {
        if (tokens[i].id_slot != id_slot) {
            moved[i] = n;
            if (i != n) {
                tokens[n] = std::move(tokens[i]);
            }
            n++;
        }
    }

    const int32_t res = (int32_t) tokens.size() - n;
    tokens.erase(tokens.begin() + n, tokens.end());

    for (auto & slot : slots) {
        if (slot.i_batch >= off && slot.i_batch < (int32_t) moved.size()) {
            slot.i_batch = moved[slot.i_batch];
        }
    }

    return res;
}

// Return the limit of saved sequences in bytes, from the text of LLAMA_SERVER_PARK_MIB (NULL or empty: not set) or else the
// number of --cache-ram, where negative numbers are no limit. Texts other than a number of at most 12 digits are an error.
inline size_t limit(const char * text, int32_t cache_ram_mib, std::string & error) {
    const size_t mib = 1024*1024;

    const size_t usual = cache_ram_mib < 0 ? SIZE_MAX : cache_ram_mib*mib;
    const std::string word = text ? text : "";
    if (word.empty()) {
        return usual;
    }
    if (word.size() > 12 || word.find_first_not_of("0123456789") != std::string::npos) {
        error = "LLAMA_SERVER_PARK_MIB is '" + word + "', which is ignored; expected a number of MiB, 0 or more";
        return usual;
    }

    return (size_t) std::stoull(word)*mib;
}

// Sums since the start of the process, and the present state; /metrics may be rendered in another thread.
struct counts {
    std::atomic<uint64_t> parks  {0};
    std::atomic<uint64_t> resumes{0};
    std::atomic<uint64_t> failed {0};
    std::atomic<uint64_t> slots  {0};
    std::atomic<uint64_t> bytes  {0};
};

inline counts & totals() {
    static counts res;

    return res;
}

// Return the counts as Prometheus reads them.
inline std::string text() {
    const struct {
        const char * name;
        const char * type;
        const char * help;

        uint64_t value;
    } metrics[] = {
        { "parks_total",        "counter", "Requests that were saved to host memory because the KV cache had no cells", totals().parks   },
        { "resumes_total",      "counter", "Parked requests that were continued",                                       totals().resumes },
        { "park_failures_total", "counter", "Requests that failed because the KV cache had no cells",                   totals().failed  },
        { "parked_slots",       "gauge",   "Requests that are parked",                                                  totals().slots   },
        { "parked_bytes",       "gauge",   "Memory of the parked requests",                                             totals().bytes   },
    };

    std::ostringstream res;
    res.imbue(std::locale::classic());

    for (const auto & m : metrics) {
        res << "# HELP llamacpp:" << m.name << " " << m.help << "\n"
            << "# TYPE llamacpp:" << m.name << " " << m.type << "\n"
            << "llamacpp:" << m.name << " " << m.value << "\n";
    }

    return res.str();
}

} // namespace server_park

#endif // SERVER_PARK_H
