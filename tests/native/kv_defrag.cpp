// Unit tests of llama-kv-defrag.h: results are compared with those of reference implementations that work cell by cell.
// Usage: kv_defrag GROUP. Returns 0 if the group passes; a failed CHECK exits with 1.

#include "check.h"
#include "failing.h"
#include "llama-kv-defrag.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>

#include <sys/mman.h>

using namespace llama_kv_defrag;
using llama_kv_defrag::move; // not std::move

static std::mt19937 generator(20261120);

static uint32_t below(uint32_t n) {
    return generator() % n;
}

// random occupancy of a cache: scattered, in runs, alternating, periodic or compact
static std::vector<uint8_t> random_cache(uint32_t size) {
    std::vector<uint8_t> used(size);
    const uint32_t kind = below(5);
    const uint32_t density = below(101);
    const uint32_t run = 1 + below(size + 1);

    for (uint32_t i = 0; i < size; ++i) {
        switch (kind) {
            case 0: used[i] = below(100) < density; break;
            case 1: used[i] = i > 0 && below(8) ? used[i - 1] : below(2); break;
            case 2: used[i] = i % 2; break;
            case 3: used[i] = (i/run) % 2 == 0; break;
            case 4: used[i] = i < run; break;
        }
    }

    return used;
}

static uint32_t count(const std::vector<uint8_t> & used) {
    uint32_t n = 0;
    for (uint8_t u : used) {
        n += u != 0;
    }
    return n;
}

static void check_plan(const std::vector<uint8_t> & used) {
    const uint32_t size = used.size();
    const uint32_t n = count(used);
    const plan p = plan_fewest(used.data(), size);

    CHECK(p.n_used == n);

    // the minimum number of moved cells is the number of used cells beyond the first n
    uint32_t n_beyond = 0;
    for (uint32_t i = n; i < size; ++i) {
        n_beyond += used[i] != 0;
    }
    CHECK(p.n_cells == n_beyond);

    std::vector<uint8_t> now = used;
    uint32_t n_cells = 0;

    for (size_t i = 0; i < p.moves.size(); ++i) {
        const move & m = p.moves[i];

        CHECK(m.len > 0);
        CHECK(m.src >= n && m.src + m.len <= size);
        CHECK(m.dst + m.len <= n);

        if (i > 0) {
            const move & l = p.moves[i - 1];
            CHECK(m.src >= l.src + l.len && m.dst >= l.dst + l.len);
            CHECK(m.src != l.src + l.len || m.dst != l.dst + l.len); // adjacent moves are merged
        }

        for (uint32_t k = 0; k < m.len; ++k) {
            CHECK(now[m.src + k] && !now[m.dst + k]);
            now[m.src + k] = 0;
            now[m.dst + k] = 1;
        }
        n_cells += m.len;
    }

    CHECK(n_cells == p.n_cells);

    for (uint32_t i = 0; i < size; ++i) {
        CHECK(now[i] == (i < n));
    }
}

static void check_ordered(const std::vector<uint8_t> & used) {
    const uint32_t size = used.size();
    const plan p = plan_ordered(used.data(), size);

    CHECK(p.n_used == count(used));

    // the cell with rank i is expected at index i
    std::vector<uint32_t> by_rank;
    for (uint32_t i = 0; i < size; ++i) {
        if (used[i]) {
            by_rank.push_back(i);
        }
    }

    std::vector<uint32_t> now(size);
    for (uint32_t i = 0; i < size; ++i) {
        now[i] = i;
    }
    uint32_t n_cells = 0;
    uint32_t end = 0;
    for (const move & m : p.moves) {
        CHECK(m.len > 0 && m.dst < m.src && m.src >= end);
        for (uint32_t k = 0; k < m.len; ++k) {
            now[m.dst + k] = now[m.src + k];
        }
        n_cells += m.len;
        end = m.src + m.len;
    }
    CHECK(n_cells == p.n_cells);

    for (uint32_t i = 0; i < p.n_used; ++i) {
        CHECK(now[i] == by_rank[i]);
    }

    CHECK(count_without_overlaps(p.moves) == without_overlaps(p.moves).size());

    // moves that were split so that none overlaps itself have the same result
    for (uint32_t i = 0; i < size; ++i) {
        now[i] = i;
    }
    n_cells = 0;
    for (const move & m : without_overlaps(p.moves)) {
        CHECK(m.len > 0 && m.dst + m.len <= m.src);
        n_cells += m.len;
        for (uint32_t k = m.len; k-- > 0;) { // backwards, because the direction must not matter
            now[m.dst + k] = now[m.src + k];
        }
    }
    CHECK(n_cells == p.n_cells);
    for (uint32_t i = 0; i < p.n_used; ++i) {
        CHECK(now[i] == by_rank[i]);
    }
}

static void test_plan_exhaustive() {
    for (uint32_t size = 0; size <= 12; ++size) {
        for (uint32_t bits = 0; bits < (1u << size); ++bits) {
            std::vector<uint8_t> used(size);
            for (uint32_t i = 0; i < size; ++i) {
                used[i] = (bits >> i) & 1;
            }
            check_plan(used);
            check_ordered(used);
        }
    }
}

static void test_plan_random() {
    for (int i = 0; i < 3000; ++i) {
        const auto used = random_cache(1 + below(700));

        check_plan(used);
        check_ordered(used);
    }

    // any value but 0 means used
    const uint8_t used[] = { 0, 255, 0, 7 };
    stats sum;
    const plan p = make_plan(used, 4, ORDER_FEWEST, sum);
    CHECK(sum.t_plan_ns > 0);
    CHECK(make_plan(used, 4, ORDER_KEPT, sum).n_cells == 2);
    CHECK(p.n_used == 2 && p.n_cells == 1 && p.moves.size() == 1);
    CHECK(p.moves[0].src == 3 && p.moves[0].dst == 0);
}

static void test_plan_linear() {
    // a quadratic plan of this takes hours, a linear one milliseconds
    const uint32_t size = 1u << 22;
    std::vector<uint8_t> used(size);
    for (uint32_t i = 0; i < size; ++i) {
        used[i] = i % 2;
    }
    const plan p = plan_fewest(used.data(), size);
    CHECK(p.n_used == size/2 && p.n_cells == size/4 && p.moves.size() == size/4);
    CHECK(plan_ordered(used.data(), size).moves.size() == size/2);
}

// makes all moves in one batch; returns the bytes of scratch memory
static size_t move_data(const std::vector<layout> & layouts, const move * moves, size_t n_moves, uint32_t n_threads, size_t n_alone = 1 << 22) {
    const bool rows = std::any_of(layouts.begin(), layouts.end(), [](const layout & l) { return l.n_rows > 1; });
    host_moves ready(moves, n_moves, n_moves + 1, rows);
    host_mover mover(layouts, n_threads, n_alone);
    ready.start(moves, n_moves);
    mover.run(ready);
    return ready.n_scratch();
}

// reference implementation: copies cell by cell, row by row, byte by byte
static void move_data_reference(const layout & l, const std::vector<move> & moves) {
    for (const move & m : moves) {
        for (uint32_t k = 0; k < m.len; ++k) {
            for (size_t r = 0; r < l.n_rows; ++r) {
                for (size_t b = 0; b < l.cell; ++b) {
                    l.data[r*l.stride + (m.dst + k)*l.cell + b] = l.data[r*l.stride + (m.src + k)*l.cell + b];
                }
            }
        }
    }
}

static void check_data(uint32_t size, size_t cell, size_t n_rows, size_t padding) {
    const bool kept = below(2);
    const auto used = random_cache(size);
    const plan p = kept ? plan_ordered(used.data(), size) : plan_fewest(used.data(), size);
    const size_t stride = size*cell + padding;

    // exact size without padding of the last row, so that the address sanitizer detects overruns
    std::vector<uint8_t> fast(stride*(n_rows - 1) + size*cell);
    for (uint8_t & b : fast) {
        b = generator();
    }
    std::vector<uint8_t> slow  = fast;
    std::vector<uint8_t> parts = fast;
    std::vector<uint8_t> large = fast;
    std::vector<uint8_t> other = fast;

    move_data({ { fast.data(), cell, n_rows, stride } }, p.moves.data(), p.moves.size(), 1);
    move_data_reference({ slow.data(), cell, n_rows, stride }, p.moves);
    CHECK(fast == slow);

    // as for large data: several tensors and threads, and non-temporal stores
    const size_t n_scratch = move_data({ { large.data(), cell, n_rows, stride }, { other.data(), cell, n_rows, stride } },
            p.moves.data(), p.moves.size(), 3, 0);
    CHECK(large == slow && other == slow);
    // short runs of single values need a list of cells; all other moves need no scratch memory
    const bool listed = n_rows > 1 && p.n_cells < host_moves::LONG_RUN*p.moves.size();
    CHECK(n_scratch == (listed ? 8*p.n_cells : 0));

    // in batches, and in reverse order if no cell is both source and destination, because any order must be correct
    const size_t n_batch = 1 + below(5);
    const size_t n = p.moves.size();
    host_moves ready(p.moves.data(), n, n_batch, n_rows > 1);
    host_mover mover({ { parts.data(), cell, n_rows, stride } }, 3, 0);
    size_t n_expected = 0;
    for (size_t i = 0; n_rows > 1 && i < n; i += n_batch) {
        size_t n_cells = 0;
        for (size_t k = i; k < std::min(i + n_batch, n); ++k) {
            n_cells += p.moves[k].len;
        }
        n_expected = std::max(n_expected, n_cells < host_moves::LONG_RUN*(std::min(i + n_batch, n) - i) ? 8*n_cells : 0);
    }
    CHECK(ready.n_scratch() == n_expected);
    for (size_t i = 0; i < n; i += n_batch) {
        const size_t end   = kept ? std::min(i + n_batch, n) : n - i;
        const size_t begin = kept ? i : end > n_batch ? end - n_batch : 0;
        ready.start(p.moves.data() + begin, end - begin);
        mover.run(ready);
    }
    CHECK(parts == slow);
    // the scratch memory of the largest batch is enough for all, if the batches have the same boundaries
    CHECK(ready.n_scratch() == n_expected || (!kept && n % n_batch != 0));
}

static void test_data_rows() {
    // f16 and f32 rows, q8_0 and q4_0 blocks, single values, odd sizes
    for (size_t cell : { 1, 2, 3, 4, 8, 18, 34, 64, 68, 128, 544 }) {
        for (int i = 0; i < 30; ++i) {
            check_data(1 + below(150), cell, 1, 0);
        }
    }
}

// returns the number of threads that are started to move 80 bytes of each of two tensors
static uint32_t threads_for(uint32_t n_threads, size_t n_small) {
    std::vector<uint8_t> one(80);
    std::vector<uint8_t> two(80);
    const move m = { 10, 0, 10 };
    const uint32_t before = n_started;
    move_data({ { one.data(), 4, 1, 0 }, { two.data(), 4, 1, 0 } }, &m, 1, n_threads, n_small);
    return n_started - before;
}

static void test_threads() {
    CHECK(threads_for(3, 0)  == 1); // one tensor per thread
    CHECK(threads_for(2, 0)  == 1);
    CHECK(threads_for(1, 0)  == 0);
    CHECK(threads_for(3, 79) == 1);
    CHECK(threads_for(3, 80) == 0); // small data: no threads
}

// fault injection into each allocation and each thread start: the data is unchanged, or all of it has moved
static void test_faults() {
    const std::vector<move> moves = { { 10, 0, 10 }, { 30, 10, 10 } };
    for (const size_t n_rows : { 1, 130 }) {
        const size_t stride = 40*4;
        std::vector<uint8_t> before(stride*n_rows);
        for (uint8_t & b : before) {
            b = generator();
        }
        std::vector<uint8_t> after = before;
        move_data_reference({ after.data(), 4, n_rows, stride }, moves);
        bool hit = true;
        int n_failed = 0, n_moved = 0;
        for (long at = 0; hit; ++at) {
            std::vector<uint8_t> one = before, two = before, three = before;
            const std::vector<layout> layouts = {
                { one.data(), 4, n_rows, stride }, { two.data(), 4, n_rows, stride }, { three.data(), 4, n_rows, stride },
            };
            bool failed = false;
            arm(at);
            try {
                move_data(layouts, moves.data(), moves.size(), 4, 0);
            } catch (const std::bad_alloc &) {
                failed = true;
            }
            hit = disarm();
            for (const auto * data : { &one, &two, &three }) {
                CHECK(*data == (failed ? before : after));
            }
            (failed ? n_failed : n_moved) += hit;
        }
        CHECK(n_failed >= 3 && n_moved >= 4); // failed allocations and failed thread starts
    }
}

static void test_data_transposed() {
    for (size_t cell : { 1, 2, 4, 8 }) {
        for (int i = 0; i < 40; ++i) {
            check_data(1 + below(150), cell, 1 + below(20), below(3)*cell);
        }
        // row counts around multiples of the number of rows that a thread processes at a time
        for (size_t n_rows : { 63, 64, 65, 128, 130 }) {
            check_data(1 + below(150), cell, n_rows, 0);
        }
    }

    // a run of this length needs no list of cells
    std::vector<uint8_t> data(200);
    const move longest = { 20, 0, host_moves::LONG_RUN };
    const move shorter = { 20, 0, host_moves::LONG_RUN - 1 };
    CHECK(move_data({ { data.data(), 2, 2, 100 } }, &longest, 1, 1) == 0);
    CHECK(move_data({ { data.data(), 2, 2, 100 } }, &shorter, 1, 1) == 8*(host_moves::LONG_RUN - 1));
}

static void test_data_wide() {
    // beyond 32 bits: an offset is a cell index times a row size, and must not wrap
    const size_t cell = size_t(1) << 20;
    const uint32_t size = 4100;

    void * map = mmap(nullptr, cell*size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        return; // the address space is too small
    }

    uint8_t * data = static_cast<uint8_t *>(map);
    data[cell*4098] = 42;
    const move m = { 4098, 1, 1 };
    move_data({ { data, cell, 1, 0 } }, &m, 1, 1);
    CHECK(data[cell] == 42);

    munmap(map, cell*size);
}

struct some_cell {
    int pos = -1;
    int delta = 0;
    std::set<int> seq;

    bool operator==(const some_cell & other) const {
        return pos == other.pos && delta == other.delta && seq == other.seq;
    }
};

static void test_cells() {
    for (int round = 0; round < 400; ++round) {
        const uint32_t size = 1 + below(200);
        const std::vector<uint8_t> used = random_cache(size);
        const plan p = below(2) ? plan_fewest(used.data(), size) : plan_ordered(used.data(), size);

        std::vector<some_cell> cells(size);
        for (uint32_t i = 0; i < size; ++i) {
            if (used[i]) {
                cells[i].pos = i;
                cells[i].delta = int(below(9)) - 4;
                for (int s = 0; s < 4; ++s) {
                    if (below(2)) {
                        cells[i].seq.insert(s);
                    }
                }
            } else {
                cells[i].delta = below(2); // a stale value of an earlier cell
            }
        }

        std::vector<some_cell> want = cells;
        for (const move & m : p.moves) {
            for (uint32_t k = 0; k < m.len; ++k) {
                want[m.dst + k] = want[m.src + k];
                want[m.src + k] = some_cell();
            }
        }

        move_cells(cells.data(), p.moves.data(), p.moves.size());

        CHECK(cells == want);
    }
}

struct some_range {
    uint32_t c0;
    uint32_t c1;
};

static void test_ranges() {
    for (int round = 0; round < 4000; ++round) {
        const uint32_t size = 1 + below(150);
        const std::vector<uint8_t> used = random_cache(size);
        const bool kept = below(2);
        const plan p = kept ? plan_ordered(used.data(), size) : plan_fewest(used.data(), size);

        // slots of micro-batches: disjoint runs of used cells, in no particular order
        std::vector<some_range> ranges;
        std::vector<uint32_t> pending; // the cells in them
        for (uint32_t i = 0; i < size;) {
            uint32_t n = 0;
            while (i + n < size && used[i + n] && n < 20) {
                ++n;
            }
            if (n > 0 && below(3) == 0) {
                ranges.push_back({ i, i + n });
                for (uint32_t k = 0; k < n; ++k) {
                    pending.push_back(i + k);
                }
            }
            i += n + 1;
        }
        if (ranges.size() > 1 && below(2)) {
            std::swap(ranges.front(), ranges.back());
        }

        // all moves, a prefix of them or, if the order does not matter, a batch from the middle
        const size_t n = p.moves.size();
        const size_t begin = kept || below(2) ? 0 : below(uint32_t(n) + 1);
        const size_t end = below(2) ? n : begin + below(uint32_t(n - begin) + 1);

        std::set<uint32_t> want;
        for (uint32_t c : pending) {
            for (size_t i = begin; i < end; ++i) {
                const move & m = p.moves[i];
                if (c >= m.src && c < m.src + m.len) {
                    c = m.dst + (c - m.src);
                    break;
                }
            }
            want.insert(c);
        }
        CHECK(want.size() == pending.size());

        // in two steps, which allocate no memory
        auto spare = reserve_remap(ranges);
        const size_t middle = begin + below(uint32_t(end - begin) + 1);
        arm(0);
        remap(ranges, spare, p.moves.data() + begin, middle - begin);
        remap(ranges, spare, p.moves.data() + middle, end - middle);
        CHECK(!disarm());

        std::set<uint32_t> cells;
        for (const auto & range : ranges) {
            CHECK(range.c0 < range.c1);
            for (uint32_t c = range.c0; c < range.c1; ++c) {
                CHECK(cells.insert(c).second);
            }
        }
        CHECK(cells == want);
    }

    std::vector<some_range> none, one = { { 3, 5 } };
    auto spare = reserve_remap(none);
    CHECK(spare.capacity() == 0);
    remap(none, spare, nullptr, 0);
    CHECK(none.empty());
    spare = reserve_remap(one);
    remap(one, spare, nullptr, 0);
    CHECK(one.size() == 1 && one[0].c0 == 3 && one[0].c1 == 5);
}

static void test_graphs() {
    CHECK(moves_per_graph(0, 0) == 1);
    CHECK(moves_per_graph(65536, 0) == 1);
    CHECK(moves_per_graph(65536, 128) == 170); // 64 layers
    CHECK(moves_per_graph(1024, 128) == 2);
    CHECK(moves_per_graph(100, 128) == 1);     // too small for one move, which is the minimum

    for (int i = 0; i < 2000; ++i) {
        const size_t n_tensors = 1 + below(300);
        const size_t max_nodes = 4*n_tensors + below(70000);
        const size_t n = moves_per_graph(max_nodes, n_tensors);
        CHECK(n >= 1);
        CHECK(n_tensors + 3*n*n_tensors <= max_nodes);
        CHECK(n_tensors + 3*(n + 1)*n_tensors > max_nodes);
    }
}

static void test_options() {
    const options unset{};

    CHECK(unset.order == ORDER_DEFAULT && unset.mover == MOVER_AUTO && unset.n_threads == 0);

    // the default is the plan with the fewest moves
    const std::vector<uint8_t> used = { 0, 1, 1 };

    stats sum;

    for (const order each : { ORDER_DEFAULT, ORDER_FEWEST, ORDER_KEPT }) {
        CHECK(make_plan(used.data(), 3, each, sum).n_cells == (each == ORDER_KEPT ? 2 : 1));
    }
}

static void test_stopwatch() {
    int64_t sum = 0;
    {
        const stopwatch watch(sum);
        CHECK(sum == 0);
    }
    const int64_t first = sum;
    CHECK(first >= 0);
    {
        const stopwatch watch(sum);
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    CHECK(sum >= first + 2000000);
}

int main(int argc, char ** argv) {
    const std::map<std::string, std::function<void()>> groups = {
        { "plan-exhaustive", test_plan_exhaustive },
        { "plan-random",     test_plan_random     },
        { "plan-linear",     test_plan_linear     },
        { "data-rows",       test_data_rows       },
        { "data-transposed", test_data_transposed },
        { "data-wide",       test_data_wide       },
        { "cells",           test_cells           },
        { "faults",          test_faults          },
        { "ranges",          test_ranges          },
        { "graphs",          test_graphs          },
        { "options",         test_options         },
        { "stopwatch",       test_stopwatch       },
        { "threads",         test_threads         },
    };

    const auto it = groups.find(argc == 2 ? argv[1] : "");

    if (it == groups.end()) {
        for (const auto & group : groups) {
            std::printf("%s\n", group.first.c_str());
        }
        return argc == 2 ? 2 : 0;
    }

    it->second();

    return 0;
}
