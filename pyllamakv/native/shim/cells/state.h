// Validation of the state of one sequence before llama.cpp reads it: a number of cells, the
// position and sequences of each, then keys and values by layer. llama.cpp asserts on some invalid
// states and accepts others.
#pragma once

#include "groups.h"

namespace plk::cells {

// Set the options for moving the cells of a cache. A tree without full-defrag and compaction has
// none.
template <typename Any, typename Options>
auto set_options_of(Any &cache, const Options &options, int)
    -> decltype(cache.defrag_options = options, void()) {
    cache.defrag_options = options;
}
template <typename Any, typename Options> void set_options_of(Any &, const Options &, long) {}

struct StateReader {
    const uint8_t *data;
    size_t length;
    uint32_t n_cells;   // cells of the cache per stream
    uint32_t n_stream;  // number of streams that the state must have
    bool streams;       // whether the state begins with the number of streams
    uint32_t ids;       // sequence ids per cell: 0, in later releases 1
    uint32_t n_values;  // number of layers that have values; other layers write none
    bool rotations = false; // whether the sizes of two rotations follow the number of layers
    size_t at = 0;
    uint64_t found = 0; // number of cells read

    bool bad(const char *what) {
        plk::refuse(PLK_ESTATE, "the state is damaged or not of this model and release: %s", what);
        return false;
    }

    template <typename Number> bool take(Number &out) {
        if (length - at < sizeof(out)) {
            return bad("it ends too early");
        }
        memcpy(&out, data + at, sizeof(out));
        at += sizeof(out);
        return true;
    }

    bool skip(uint64_t bytes) {
        if (length - at < bytes) {
            return bad("it ends too early");
        }
        at += bytes;
        return true;
    }

    bool cells(uint32_t count) {
        for (uint32_t i = 0; i < count; ++i) {
            int32_t pos = 0;
            uint32_t n_seq = 0;
            if (!take(pos) || !take(n_seq)) {
                return false;
            }
            if (pos < 0 || pos >= far_away || n_seq != ids) {
                return bad("a cell has no position that may be, or too many sequences");
            }
            if (!skip(n_seq * sizeof(int32_t))) {
                return false;
            }
        }
        return true;
    }

    bool rows(uint32_t count, uint32_t n_layer) {
        for (uint32_t layer = 0; layer < n_layer; ++layer) {
            int32_t type = 0;
            uint64_t row = 0;
            if (!take(type) || !take(row) || row > (uint64_t(1) << 32) || !skip(row * count)) {
                return bad("its rows do not add up");
            }
        }
        return true;
    }

    bool columns(uint32_t count, uint32_t n_layer) {
        for (uint32_t layer = 0; layer < n_layer; ++layer) {
            int32_t type = 0;
            uint32_t element = 0, width = 0;
            if (!take(type) || !take(element) || !take(width) || element > 64 ||
                !skip(uint64_t(element) * width * count)) {
                return bad("its columns do not add up");
            }
        }
        return true;
    }

    bool part() {
        uint32_t count = 0, v_trans = 0, n_layer = 0;
        if (!take(count)) {
            return false;
        }
        found += count;
        if (count == 0 && streams) {
            return true; // an empty stream has no further data
        }
        if (count > n_cells) {
            return bad("it has more cells than the cache");
        }
        return cells(count) && take(v_trans) && take(n_layer) &&
               skip(rotations ? 2 * sizeof(uint32_t) : 0) && rows(count, n_layer) &&
               (v_trans ? columns(count, n_values) : rows(count, n_values));
    }

    // Read the part of one cache; return false after refuse().
    bool cache() {
        uint32_t parts = 1;
        if (streams && !take(parts)) {
            return false;
        }
        if (parts != n_stream) {
            return bad("it has another number of streams");
        }
        for (uint32_t i = 0; i < parts; ++i) {
            if (!part()) {
                return false;
            }
        }
        return true;
    }

    // Return the result of cells::check_state.
    int result(bool good) const { return !good ? 0 : found == 0 ? 2 : 1; }
};

// Check a recurrent state, or the recurrent part of one: it begins with the number of its cells.
// llama.cpp dereferences NULL for none, and allocates as many as the number states. Return as
// check_state does.
inline int check_states(const uint8_t *data, size_t length) {
    constexpr uint32_t most = 256; // sequences of a context
    uint32_t count = 1;
    if (length < sizeof(count)) {
        return plk::refuse(0, "the state is damaged: it ends too early");
    }
    memcpy(&count, data, sizeof(count));
    if (count > most) {
        return plk::refuse(0, "the state is damaged: it has %u recurrent states", count);
    }
    return count > 0 ? 1 : 2;
}

} // namespace plk::cells
