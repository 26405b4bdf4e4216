// The state of one sequence as every release to July 2025 begins it: the number of cells, then for
// each its position and a zero. What upstream would assert on, or believe, is checked here.
#pragma once

#include "groups.h"

namespace plk::cells {

inline int check_plain_state(const uint8_t *data, size_t length, uint32_t n_cells) {
    uint32_t count = 0;
    if (length < sizeof(count)) {
        plk::refuse(PLK_ESTATE, "a state of %zu bytes is no state", length);
        return 0;
    }
    memcpy(&count, data, sizeof(count));
    if (count == 0) {
        return 2;
    }
    if (count > n_cells || (length - sizeof(count)) / 8 < count) {
        plk::refuse(PLK_ESTATE, "the state holds %u cells in %zu bytes, the cache %u", count, length,
                    n_cells);
        return 0;
    }
    for (uint32_t i = 0; i < count; ++i) {
        int32_t cell[2];
        memcpy(cell, data + sizeof(count) + i * sizeof(cell), sizeof(cell));
        if (cell[0] < 0 || cell[1] != 0) {
            plk::refuse(PLK_ESTATE, "cell %u of the state has position %d and %d sequences", i,
                        cell[0], cell[1]);
            return 0;
        }
    }
    return 1;
}

} // namespace plk::cells
