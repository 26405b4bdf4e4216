#ifndef LLAMA_KV_DEFRAG_H
#define LLAMA_KV_DEFRAG_H

// Defragmentation of a KV cache over plain arrays: what moves where, the moves in host memory, and what follows from them.
//
// There are two plans. Both end with the used cells at [0, n_used), and both list their moves ascending in src and in dst:
//   fewest   moves every used cell from n_used on into a hole below n_used, and no other. No cell is both a source and a
//            destination, so any order of the moves is right, and data may move long before the cells are told.
//   ordered  closes the holes: every used cell keeps its rank, so that attention adds up in the order of a fresh cache and
//            logits are the same to the last bit. A move may overlap itself and what later moves read: ascending order
//            is right, and no other.
// A plan that is carried out up to some move leaves a cache that is less compact, but correct.
//
// Overrides in the environment, for tests and for programs that cannot call current():
//   LLAMA_KV_DEFRAG_PLAN=fewest|ordered
//   LLAMA_KV_DEFRAG_MOVER=host|gather|graph|staged   see enum mover; what cannot be done is as if it were not set
//   LLAMA_KV_DEFRAG_THREADS=N
//
// This file knows no type of llama.cpp or ggml and is the same for every version of them. C++11 suffices.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
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

// cells [src, src + len) go to [dst, dst + len); dst is below src
struct move {
    uint32_t src;
    uint32_t dst;
    uint32_t len;
};

// the moves, and what they amount to
struct plan {
    std::vector<move> moves;

    uint32_t n_used  = 0; // after the moves: cells [0, n_used) are used, all others are free
    uint32_t n_cells = 0; // cells that move
};

enum order {
    ORDER_FEWEST,
    ORDER_KEPT,
};

enum mover {
    MOVER_AUTO,
    MOVER_HOST,   // copies in place, in host memory
    MOVER_GATHER, // collects cells by number and writes them in one piece, in one compute graph for all tensors
    MOVER_GRAPH,  // a copy per move and tensor, in as many compute graphs as it takes
    MOVER_STAGED, // copies each tensor to the host, moves there, copies it back
};

// what the caller of a defragmentation wants of it
struct options {
    enum order order = ORDER_FEWEST;
    enum mover mover = MOVER_AUTO;

    uint32_t n_threads = 0; // at most so many; 0: as many as the context computes with
};

// the options of this thread
inline options & current() {
    static thread_local options res;

    return res;
}

// the options of this thread, as the environment overrides them
inline options effective() {
    options res = current();

    const auto is = [](const char * value, const char * name) { return value && std::strcmp(value, name) == 0; };

    const char * order   = std::getenv("LLAMA_KV_DEFRAG_PLAN");
    const char * mover   = std::getenv("LLAMA_KV_DEFRAG_MOVER");
    const char * threads = std::getenv("LLAMA_KV_DEFRAG_THREADS");

    res.order = is(order, "fewest") ? ORDER_FEWEST : is(order, "ordered") ? ORDER_KEPT : res.order;

    res.mover =
        is(mover, "host")   ? MOVER_HOST   :
        is(mover, "gather") ? MOVER_GATHER :
        is(mover, "graph")  ? MOVER_GRAPH  :
        is(mover, "staged") ? MOVER_STAGED : res.mover;

    if (threads && std::atoi(threads) > 0) {
        res.n_threads = std::atoi(threads);
    }

    return res;
}

// where one tensor keeps its cells: cell c of row r is the `cell` bytes at data + r*stride + c*cell
// a tensor with one row of values per cell is one row here; a transposed one has a row per value
struct layout {
    uint8_t * data;
    size_t    cell;
    size_t    n_rows;
    size_t    stride;
};

// sums over the life of a cache
struct stats {
    int64_t n_retries = 0; // searches repeated after a defragmentation
    int64_t n_defrags = 0; // defragmentations that moved at least one cell
    int64_t n_moves   = 0;
    int64_t n_cells   = 0;
    int64_t n_bytes   = 0;
    int64_t n_graphs  = 0;
    int64_t n_scratch = 0; // not a sum: the most bytes that one defragmentation needed beside the cache
    int64_t t_ns      = 0; // wall time, plans that found nothing to move included
    int64_t t_plan_ns = 0; // ... of it to find out what moves where
};

// adds the time of its own life to a sum
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
// plans, in linear time; used[i] != 0: cell i holds something
//

// one finger walks the holes, the other the cells that must leave
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

        // there are as many used cells from n_used on as holes before it, so this stops inside the cache
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

// number of moves that without_overlaps() returns
inline size_t count_without_overlaps(const std::vector<move> & moves) {
    size_t res = 0;

    for (const auto & m : moves) {
        const uint32_t gap = m.src - m.dst;

        res += m.len/gap + (m.len % gap != 0);
    }

    return res;
}

// the same moves, none of which overlaps itself: for copies that know no direction
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

// copy to lower addresses, where the two may overlap
// around: written around the caches, which spares reading what is overwritten
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

// the moves of one defragmentation, made ready to be carried out on many rows, one batch after another
// memory is allocated in the constructor only
class host_moves {
public:
    // single values of many rows move faster by a list of cells than by a list of runs, until the runs get long
    static constexpr uint32_t LONG_RUN = 16;

    // moves between the one that is carried out and the one whose rows are fetched
    static constexpr size_t AHEAD = 8;

    // the batches are n_batch moves each, but for the last one; rows: a tensor has more than one
    host_moves(const move * all, size_t n_all, size_t n_batch, bool rows) : transposed(rows) {
        size_t n_most = 0;

        for (size_t i = 0; i < n_all; i += n_batch) {
            const size_t n     = std::min(n_batch, n_all - i);
            const size_t total = count_cells(all + i, n);

            n_most = std::max(n_most, is_listed(total, n) ? total : 0);
        }

        cells.reserve(n_most);
    }

    // the batch that apply() carries out
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

    // of the batch
    size_t get_n_cells() const {
        return n_cells;
    }

    size_t n_scratch() const {
        return cells.capacity()*sizeof(step);
    }

    // rows [r0, r1) of a tensor; around: see copy_down
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
                // what lies far apart is not fetched in advance otherwise; not so close as for use at once
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

    // two rows at a time share the reading of the list; rows lie a power of two apart, so that more of them would take
    // the same lines of the cache from each other
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

    std::vector<step> cells; // empty if runs are long
};

// moves the data of the cells of tensors in host memory
// memory is allocated in the constructor only, but for threads: where they cannot be started, fewer do the work
class host_mover {
public:
    // n_alone: bytes that are moved before a second thread runs; less of them stay in the caches of the processor
    host_mover(const std::vector<layout> & layouts, uint32_t n_threads, size_t n_alone = 4*1024*1024) : n_small(n_alone) {
        // rows of a transposed tensor that one thread takes at a time
        const size_t n_block = 64;

        for (const auto & l : layouts) {
            for (size_t r = 0; r < l.n_rows; r += n_block) {
                todo.push_back({ l, r, std::min(r + n_block, l.n_rows) });
            }

            n_bytes_cell += l.cell*l.n_rows;
        }

        n_workers = std::min((size_t) n_threads, todo.size());
    }

    // all tensors, by the batch that is ready
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
            // no thread, or no memory for one: then fewer do it
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

    size_t n_bytes_cell = 0; // of a cell, in all tensors
    size_t n_workers    = 0;

    std::vector<part>        todo;
    std::vector<std::thread> others;
};

//
// compute graphs
//

// a move of one tensor takes three nodes: two views and a copy; the tensor itself takes one per graph
inline size_t moves_per_graph(size_t max_nodes, size_t n_tensors) {
    if (n_tensors == 0 || max_nodes < 4*n_tensors) {
        return 1;
    }

    return (max_nodes - n_tensors)/(3*n_tensors);
}

// move what is known about the cells; all of it travels: position, sequences, a shift that is still to be applied
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

// make room for remap() before anything moves; returns what it needs beside the ranges
template <typename range_t>
inline std::vector<range_t> reserve_remap(std::vector<range_t> & ranges) {
    size_t n_cells = 0; // no range breaks into more parts than it has cells, whatever moves

    for (const auto & range : ranges) {
        n_cells += range.c1 - range.c0;
    }

    std::vector<range_t> spare;

    spare.reserve(n_cells);
    ranges.reserve(n_cells);

    return spare;
}

// let the ranges [c0, c1) of cells follow the moves, which ascend in src; a range may break into several
// allocates no memory after reserve_remap()
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
