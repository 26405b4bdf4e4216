#ifndef LLAMA_KV_COMPACT_CELLS_H
#define LLAMA_KV_COMPACT_CELLS_H

// Moves the metadata of cells with cp(), rm() and set() of llama_kv_cells. Upstream maintains these functions for every
// member of a cell, so a release that adds a member needs no change here.

#include "llama-kv-defrag.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

namespace llama_kv_compaction {

// The moves of a plan in the metadata of one stream of a cache.
template <typename Cells>
class cell_moves {
public:
    // Allocates the memory of all moves. Requires that no shift is pending.
    cell_moves(Cells & cells, const llama_kv_defrag::plan & p) : cells(cells), after(cells) {
        for (const auto & m : p.moves) {
            for (uint32_t k = 0; k < m.len; ++k) {
                src.push_back(m.src + k);
                dst.push_back(m.dst + k);
            }
        }

        contents = cells.cp(src);

        put(after);
    }

    // Move the first n of the plan's cells, whose data has moved. Called once.
    void commit(size_t n) {
        static_assert(std::is_nothrow_move_assignable<Cells>::value, "the data has moved: nothing may fail any more");

        if (n == src.size()) {
            cells = std::move(after);
        } else if (n > 0) {
            // a graph failed: the other cells stay where they are
            std::copy(src.begin() + n, src.end(), dst.begin() + n);

            after = Cells();

            // allocates as many nodes as it frees before
            put(cells);
        }
    }

private:
    Cells & cells;
    Cells   after;    // the cells after all moves
    Cells   contents; // the metadata of cell src[i] at i

    // cell numbers, in the order of the moves
    std::vector<uint32_t> src;
    std::vector<uint32_t> dst;

    // removes all cells first, because the destination of one may be the source of another
    void put(Cells & to) const {
        for (const uint32_t i : src) {
            to.rm(i);
        }

        to.set(dst, contents);
    }
};

} // namespace llama_kv_compaction

#endif // LLAMA_KV_COMPACT_CELLS_H
