#ifndef LLAMA_KV_DEFRAG_H
#define LLAMA_KV_DEFRAG_H

// Defragmentation of a KV cache over plain arrays: plans of moves, moves in host memory, and updates of the metadata.
//
// There are two plans. Both end with the used cells at [0, n_used), and both list the moves ascending in src and dst:
//   fewest   moves each used cell at or above n_used into a hole below n_used, and no other cell. No cell is both a
//            source and a destination, so moves may run in any order, and data may move before the metadata.
//   ordered  closes the holes: every used cell keeps its rank, so that attention adds up in the order of a fresh cache
//            and logits are bit-identical. A move may overlap itself and the sources of later moves: the moves must run
//            in ascending order.
// A plan that stops after any move leaves a cache that is less compact, but correct.
//
// llama-kv-settings.h reads the environment variables for programs that do not set the options of a cache.
//
// This file uses no type of llama.cpp or ggml and is identical for all their versions. It requires C++11.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace llama_kv_defrag {

// Moves cells [src, src + len) to [dst, dst + len); dst < src.
struct move {
    uint32_t src;
    uint32_t dst;
    uint32_t len;
};

// A list of moves with its totals.
struct plan {
    std::vector<move> moves;

    uint32_t n_used  = 0; // after the moves, cells [0, n_used) are used and all others are free
    uint32_t n_cells = 0; // number of cells that move
};

enum order {
    ORDER_DEFAULT, // not selected; the same as ORDER_FEWEST
    ORDER_FEWEST,
    ORDER_KEPT,
};

enum mover {
    MOVER_AUTO,
    MOVER_HOST,   // copies in place in host memory
    MOVER_GATHER, // collects cells by index (ggml_get_rows) and writes them back; a few graph nodes per tensor
    MOVER_GRAPH,  // one copy per move and tensor, in as many compute graphs as needed
    MOVER_STAGED, // copies each tensor to the host, moves its cells there, and copies it back
};

// Options of the defragmentations of a cache, in its member defrag_options.
struct options {
    enum order order = ORDER_DEFAULT;
    enum mover mover = MOVER_AUTO;

    uint32_t n_threads = 0; // maximum number of host threads; 0: the context's number of threads
};

// Location of the cells of one tensor: cell c of row r has `cell` bytes at data + r*stride + c*cell. A tensor that
// stores the values of a cell contiguously is one row; a transposed tensor has one row per value.
struct layout {
    uint8_t * data;
    size_t    cell;
    size_t    n_rows;
    size_t    stride;
};

// Sums over the lifetime of a cache.
struct stats {
    int64_t n_retries = 0; // searches repeated after a defragmentation
    int64_t n_defrags = 0; // defragmentations that moved at least one cell
    int64_t n_moves   = 0;
    int64_t n_cells   = 0;
    int64_t n_bytes   = 0;
    int64_t n_graphs  = 0;
    int64_t n_scratch = 0; // not a sum: maximum bytes that one defragmentation used in addition to the cache
    int64_t t_ns      = 0; // wall time, including plans without moves
    int64_t t_plan_ns = 0; // part of t_ns that planning took
};

// Adds the time between its construction and destruction to a sum, in nanoseconds.
class stopwatch {
public:
    explicit stopwatch(int64_t & total) : sum(total), start(std::chrono::steady_clock::now()) {}

    ~stopwatch() {
        sum += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
    }

    stopwatch(const stopwatch &) = delete;
    stopwatch & operator=(const stopwatch &) = delete;

private:
    int64_t & sum;
    const std::chrono::steady_clock::time_point start;
};

//
// plans, in linear time; used[i] != 0: cell i is used
//

// Plan with two indexes: dst visits the holes below n_used, src the used cells at or above it.
inline plan plan_fewest(const uint8_t * used, uint32_t size) {
    plan res;

    for (uint32_t i = 0; i < size; ++i) {
        res.n_used += used[i] != 0;
    }

    uint32_t dst = 0;
    uint32_t src = res.n_used;

    while (true) {
        while (dst < res.n_used && used[dst]) {
            ++dst;
        }

        if (dst == res.n_used) {
            return res;
        }

        // holes below n_used and used cells at or above it are equal in number, so this stops inside the cache
        while (!used[src]) {
            ++src;
        }

        uint32_t len = 1;

        while (dst + len < res.n_used && !used[dst + len] && src + len < size && used[src + len]) {
            ++len;
        }

        res.moves.push_back({ src, dst, len });
        res.n_cells += len;

        src += len;
        dst += len;
    }
}

inline plan plan_ordered(const uint8_t * used, uint32_t size) {
    plan res;

    for (uint32_t i = 0; i < size; ) {
        uint32_t len = 0;

        while (i + len < size && used[i + len]) {
            ++len;
        }

        if (len > 0 && i > res.n_used) {
            res.moves.push_back({ i, res.n_used, len });
            res.n_cells += len;
        }

        res.n_used += len;

        i += len > 0 ? len : 1;
    }

    return res;
}

inline plan make_plan(const uint8_t * used, uint32_t size, order wanted, stats & sum) {
    const stopwatch watch(sum.t_plan_ns);

    return wanted == ORDER_KEPT ? plan_ordered(used, size) : plan_fewest(used, size);
}

// Return the number of moves that without_overlaps() returns.
inline size_t count_without_overlaps(const std::vector<move> & moves) {
    size_t res = 0;

    for (const auto & m : moves) {
        const uint32_t gap = m.src - m.dst;

        res += m.len/gap + (m.len % gap != 0);
    }

    return res;
}

// Split the moves so that none overlaps itself, for copies without a guaranteed direction.
inline std::vector<move> without_overlaps(const std::vector<move> & moves) {
    std::vector<move> res;

    for (const auto & m : moves) {
        const uint32_t gap = m.src - m.dst;

        for (uint32_t k = 0; k < m.len; k += gap) {
            res.push_back({ m.src + k, m.dst + k, std::min(gap, m.len - k) });
        }
    }

    return res;
}

//
// moves in host memory
//

// Copy to a lower address; source and destination may overlap.
// around: use non-temporal stores, which do not read the overwritten cache lines first.
inline void copy_down(uint8_t * dst, const uint8_t * src, size_t bytes, bool around) {
#ifdef __SSE2__
    if (around && (((uintptr_t) dst | (uintptr_t) src | bytes) & 15) == 0) {
        size_t i = 0;

        for (; i + 64 <= bytes; i += 64) {
            const __m128i a = _mm_load_si128((const __m128i *) (src + i));
            const __m128i b = _mm_load_si128((const __m128i *) (src + i + 16));
            const __m128i c = _mm_load_si128((const __m128i *) (src + i + 32));
            const __m128i d = _mm_load_si128((const __m128i *) (src + i + 48));

            _mm_stream_si128((__m128i *) (dst + i),      a);
            _mm_stream_si128((__m128i *) (dst + i + 16), b);
            _mm_stream_si128((__m128i *) (dst + i + 32), c);
            _mm_stream_si128((__m128i *) (dst + i + 48), d);
        }

        for (; i < bytes; i += 16) {
            _mm_stream_si128((__m128i *) (dst + i), _mm_load_si128((const __m128i *) (src + i)));
        }

        return;
    }
#else
    (void) around;
#endif

    std::memmove(dst, src, bytes);
}

// Prepares batches of moves for execution on many rows.
// Allocates memory only in the constructor.
class host_moves {
public:
    // mean run length in cells below which a list of cells moves single values of many rows faster than a list of runs
    static constexpr uint32_t LONG_RUN = 16;

    // prefetch distance, in moves
    static constexpr size_t AHEAD = 8;

    // n_batch: moves per batch, the last batch may have fewer; rows: some tensor has more than one row
    host_moves(const move * all, size_t n_all, size_t n_batch, bool rows) : transposed(rows) {
        size_t n_most = 0;

        for (size_t i = 0; i < n_all; i += n_batch) {
            const size_t n     = std::min(n_batch, n_all - i);
            const size_t total = count_cells(all + i, n);

            n_most = std::max(n_most, is_listed(total, n) ? total : 0);
        }

        cells.reserve(n_most);
    }

    // Set the batch that apply() executes.
    void start(const move * first, size_t count) {
        moves   = first;
        n_moves = count;
        n_cells = count_cells(first, count);

        cells.clear();

        if (is_listed(n_cells, n_moves)) {
            for (size_t i = 0; i < n_moves; ++i) {
                for (uint32_t k = 0; k < moves[i].len; ++k) {
                    cells.push_back({ moves[i].src + k, moves[i].dst + k });
                }
            }
        }
    }

    // Return the number of cells that the batch moves.
    size_t get_n_cells() const {
        return n_cells;
    }

    size_t n_scratch() const {
        return cells.capacity()*sizeof(step);
    }

    // Move the cells of rows [r0, r1) of a tensor. around: see copy_down.
    void apply(const layout & l, size_t r0, size_t r1, bool around) const {
        if (!cells.empty()) {
            switch (l.cell) {
                case 1: return apply_values<uint8_t> (l, r0, r1);
                case 2: return apply_values<uint16_t>(l, r0, r1);
                case 4: return apply_values<uint32_t>(l, r0, r1);
            }
        }

        for (size_t r = r0; r < r1; ++r) {
            uint8_t * row = l.data + r*l.stride;

            for (size_t i = 0; i < n_moves; ++i) {
#ifdef __SSE2__
                // the hardware does not prefetch scattered sources; T1, because the use is several moves away
                if (i + AHEAD < n_moves && l.cell >= 64) {
                    for (size_t k = 0; k < l.cell; k += 64) {
                        _mm_prefetch((const char *) row + moves[i + AHEAD].src*l.cell + k, _MM_HINT_T1);
                    }
                }
#endif
                copy_down(row + moves[i].dst*l.cell, row + moves[i].src*l.cell, moves[i].len*l.cell, around && l.cell >= 64);
            }
        }

#ifdef __SSE2__
        _mm_sfence();
#endif
    }

private:
    struct step {
        uint32_t src;
        uint32_t dst;
    };

    static size_t count_cells(const move * first, size_t count) {
        size_t res = 0;

        for (size_t i = 0; i < count; ++i) {
            res += first[i].len;
        }

        return res;
    }

    bool is_listed(size_t total, size_t count) const {
        return transposed && total < LONG_RUN*count;
    }

    // Move single values of two rows at a time, which halves the reads of the list. Rows are often a power of two bytes
    // apart: more rows at a time would compete for the same cache lines.
    template <typename value_t>
    void apply_values(const layout & l, size_t r0, size_t r1) const {
        size_t r = r0;

        for (; r + 1 < r1; r += 2) {
            uint8_t * row0 = l.data + r*l.stride;
            uint8_t * row1 = row0 + l.stride;

            for (const auto & c : cells) {
                value_t v0;
                value_t v1;

                std::memcpy(&v0, row0 + c.src*sizeof(value_t), sizeof(value_t));
                std::memcpy(&v1, row1 + c.src*sizeof(value_t), sizeof(value_t));
                std::memcpy(row0 + c.dst*sizeof(value_t), &v0, sizeof(value_t));
                std::memcpy(row1 + c.dst*sizeof(value_t), &v1, sizeof(value_t));
            }
        }

        if (r < r1) {
            uint8_t * row = l.data + r*l.stride;

            for (const auto & c : cells) {
                std::memcpy(row + c.dst*sizeof(value_t), row + c.src*sizeof(value_t), sizeof(value_t));
            }
        }
    }

    const bool transposed;

    const move * moves = nullptr;
    size_t n_moves = 0;
    size_t n_cells = 0;

    std::vector<step> cells; // empty if the runs are long
};

// Moves the data of cells of tensors in host memory.
// Allocates memory only in the constructor, except for threads: if a thread cannot be started, run() uses fewer.
class host_mover {
public:
    // n_alone: bytes up to which one thread moves them and uses normal stores, which keep them in the CPU's caches
    host_mover(const std::vector<layout> & layouts, uint32_t n_threads, size_t n_alone = 4*1024*1024) : n_small(n_alone) {
        // rows of a transposed tensor per work item
        const size_t n_block = 64;

        for (const auto & l : layouts) {
            for (size_t r = 0; r < l.n_rows; r += n_block) {
                todo.push_back({ l, r, std::min(r + n_block, l.n_rows) });
            }

            n_bytes_cell += l.cell*l.n_rows;
        }

        n_workers = std::min((size_t) n_threads, todo.size());
    }

    // Execute the current batch on all tensors.
    void run(const host_moves & ready) noexcept {
        const size_t n_bytes = n_bytes_cell*ready.get_n_cells();

        std::atomic<size_t> next(0);

        const auto work = [&]() {
            for (size_t i = next++; i < todo.size(); i = next++) {
                ready.apply(todo[i].l, todo[i].r0, todo[i].r1, n_bytes > n_small);
            }
        };

        try {
            for (size_t n = std::min(n_workers, 1 + n_bytes/(n_small + 1)); n > 1; --n) {
                others.emplace_back(work);
            }
        } catch (const std::exception &) {
            // a thread could not be started: continue with fewer threads
        }

        work();

        for (auto & other : others) {
            other.join();
        }

        others.clear();
    }

private:
    struct part {
        layout l;
        size_t r0;
        size_t r1;
    };

    const size_t n_small;

    size_t n_bytes_cell = 0; // bytes of a cell in all tensors
    size_t n_workers    = 0;

    std::vector<part>        todo;
    std::vector<std::thread> others;
};

//
// compute graphs
//

// Return the number of moves that fit into one graph, at least 1. A move of one tensor takes three nodes, two views and
// a copy; the tensor takes one node per graph.
inline size_t moves_per_graph(size_t max_nodes, size_t n_tensors) {
    if (n_tensors == 0 || max_nodes < 4*n_tensors) {
        return 1;
    }

    return (max_nodes - n_tensors)/(3*n_tensors);
}

// Move the metadata of the cells: position, sequences and pending shift. Free cells get a default value.
template <typename cell_t>
inline void move_cells(cell_t * cells, const move * moves, size_t n_moves) {
    static_assert(std::is_nothrow_move_assignable<cell_t>::value, "the data has moved: nothing may fail any more");

    for (size_t i = 0; i < n_moves; ++i) {
        for (uint32_t k = 0; k < moves[i].len; ++k) {
            cell_t & src = cells[moves[i].src + k];

            cells[moves[i].dst + k] = std::move(src);

            src = cell_t();
        }
    }
}

// Reserve the memory of remap() before anything moves. Return the second buffer that remap() requires.
template <typename range_t>
inline std::vector<range_t> reserve_remap(std::vector<range_t> & ranges) {
    size_t n_cells = 0; // a range of n cells splits into at most n parts

    for (const auto & range : ranges) {
        n_cells += range.c1 - range.c0;
    }

    std::vector<range_t> spare;

    spare.reserve(n_cells);
    ranges.reserve(n_cells);

    return spare;
}

// Update the ranges [c0, c1) of cells after the moves, which ascend in src; a range may split into several.
// Allocates no memory after reserve_remap().
template <typename range_t>
inline void remap(std::vector<range_t> & ranges, std::vector<range_t> & spare, const move * moves, size_t n_moves) {
    auto & res = spare;

    res.clear();

    const auto add = [&res](uint32_t c0, uint32_t c1) {
        if (c0 == c1) {
            return;
        }
        if (!res.empty() && res.back().c1 == c0) {
            res.back().c1 = c1;
            return;
        }
        range_t range;
        range.c0 = c0;
        range.c1 = c1;
        res.push_back(range);
    };

    for (const auto & range : ranges) {
        uint32_t c = range.c0;

        const move * m = std::partition_point(moves, moves + n_moves, [c](const move & left) {
            return left.src + left.len <= c;
        });

        for (; m != moves + n_moves && m->src < range.c1; ++m) {
            const uint32_t c0 = std::max(c, m->src);
            const uint32_t c1 = std::min(range.c1, m->src + m->len);

            add(c, c0);
            add(m->dst + (c0 - m->src), m->dst + (c1 - m->src));

            c = c1;
        }

        add(c, range.c1);
    }

    ranges.swap(spare);
}

} // namespace llama_kv_defrag

#endif // LLAMA_KV_DEFRAG_H
