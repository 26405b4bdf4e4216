#ifndef LLAMA_KV_SETTINGS_H
#define LLAMA_KV_SETTINGS_H

// Environment variables of the defragmentation and the compaction, for programs that have no other way to set them:
//   LLAMA_KV_DEFRAG_THOLD=0...1               the defrag_thold of contexts that leave the default; 0: never
//   LLAMA_KV_DEFRAG_MIN_CELLS=N               smallest number of visited cells for which a compaction is worth its time
//   LLAMA_KV_DEFRAG_PLAN=fewest|ordered       see llama-kv-defrag.h
//   LLAMA_KV_DEFRAG_MOVER=auto|host|gather|graph|staged
//   LLAMA_KV_DEFRAG_THREADS=N                 maximum number of host threads
//
// A value that the program sets has precedence over a variable, and a variable over the default. The first use reads
// all variables, once per process. A value that is not valid is logged and ignored. An empty value is no value.
//
// This file is identical for all versions of llama.cpp. It requires C++11.

#include "llama.h"
#include "llama-impl.h"
#include "llama-kv-defrag.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <locale>
#include <sstream>

namespace llama_kv_settings {

// The values of the variables.
struct settings {
    float    thold     = -1.0f; // negative: not set
    uint32_t min_cells = 2048;  // compaction of a smaller cache saves too little time

    llama_kv_defrag::options defrag;
};

// Return the value of a variable; nullptr if it is not set or empty.
inline const char * get_value(const char * name) {
    const char * res = std::getenv(name);

    return res && *res ? res : nullptr;
}

inline void report(const char * name, const char * value, const char * expected) {
    LLAMA_LOG_WARN("%s is '%.100s', which is ignored; expected %s\n", name, value, expected);
}

// Set res to the number of a variable. Without a value, or with one outside of [lowest, highest], res is unchanged.
template <typename number_t>
void read_number(const char * name, number_t lowest, number_t highest, const char * expected, number_t & res) {
    const char * value = get_value(name);

    if (!value) {
        return;
    }

    // a decimal point regardless of the program's locale, no hexadecimal digits, no signs
    std::istringstream text(value);
    text.imbue(std::locale::classic());

    double found = 0.0;

    const bool read = std::strspn(value, "0123456789.") == std::strlen(value) && text >> found && text.eof();

    // a whole number stays the same as number_t
    if (read && found >= lowest && found <= highest && (std::is_floating_point<number_t>::value || number_t(found) == found)) {
        res = number_t(found);
    } else {
        report(name, value, expected);
    }
}

// A word of a variable with the value that it selects.
template <typename choice_t>
struct word {
    const char * text;
    choice_t     choice;
};

// Set res to the choice that a variable names. Without a value, or with an unknown one, res is unchanged.
template <typename choice_t, size_t n>
void read_word(const char * name, const word<choice_t> (&known)[n], const char * expected, choice_t & res) {
    const char * value = get_value(name);

    if (!value) {
        return;
    }

    for (const auto & each : known) {
        if (std::strcmp(value, each.text) == 0) {
            res = each.choice;

            return;
        }
    }

    report(name, value, expected);
}

// Read all variables, and log the values that are not valid.
inline settings read() {
    static const word<llama_kv_defrag::order> orders[] = {
        { "fewest",  llama_kv_defrag::ORDER_FEWEST },
        { "ordered", llama_kv_defrag::ORDER_KEPT },
    };

    static const word<llama_kv_defrag::mover> movers[] = {
        { "auto",   llama_kv_defrag::MOVER_AUTO },
        { "host",   llama_kv_defrag::MOVER_HOST },
        { "gather", llama_kv_defrag::MOVER_GATHER },
        { "graph",  llama_kv_defrag::MOVER_GRAPH },
        { "staged", llama_kv_defrag::MOVER_STAGED },
    };

    const uint32_t n_max = std::numeric_limits<int32_t>::max();

    settings res;

    res.defrag.order = llama_kv_defrag::ORDER_FEWEST;

    read_number("LLAMA_KV_DEFRAG_THOLD",     0.0f, 1.0f,  "a number from 0 to 1",               res.thold);
    read_number("LLAMA_KV_DEFRAG_MIN_CELLS", 1u,   n_max, "a positive number of cells",         res.min_cells);
    read_number("LLAMA_KV_DEFRAG_THREADS",   1u,   512u,  "a number of threads from 1 to 512",  res.defrag.n_threads);

    read_word("LLAMA_KV_DEFRAG_PLAN",  orders, "fewest or ordered",                     res.defrag.order);
    read_word("LLAMA_KV_DEFRAG_MOVER", movers, "auto, host, gather, graph or staged",   res.defrag.mover);

    return res;
}

// Return the values of the variables at the first call.
inline const settings & get() {
    static const settings res = read();

    return res;
}

} // namespace llama_kv_settings

namespace llama_kv_defrag {

// Return the options of a cache that are set, else those of the variables, else the defaults.
inline options effective(const options & given) {
    options res = llama_kv_settings::get().defrag;

    res.order     = given.order     != ORDER_DEFAULT ? given.order     : res.order;
    res.mover     = given.mover     != MOVER_AUTO    ? given.mover     : res.mover;
    res.n_threads = given.n_threads != 0             ? given.n_threads : res.n_threads;

    return res;
}

// Set the options of the cache of a context. Defined through 0.3.5, where no header declares the cache.
LLAMA_API void set_options(llama_context * ctx, const options & given);

} // namespace llama_kv_defrag

#endif // LLAMA_KV_SETTINGS_H
