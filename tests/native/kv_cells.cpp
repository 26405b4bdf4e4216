// Random test of llama_kv_cells: change and move cells, and compare with a simple model after each step.
#undef NDEBUG
#include "llama-kv-cells.h"

#if __has_include("llama-kv-compact-cells.h")
#include "llama-kv-compact-cells.h"
#define WITH_CELL_MOVES
#endif

#include <cstdio>
#include <cstdlib>
#include <map>
#include <new>
#include <random>
#include <set>

static size_t n_allocated = 0;

void *operator new(size_t size) {
    n_allocated += 1;
    if (void *res = std::malloc(size)) {
        return res;
    }
    throw std::bad_alloc();
}

void operator delete(void *block) noexcept { std::free(block); }
void operator delete(void *block, size_t) noexcept { std::free(block); }

namespace {

constexpr uint32_t n_cells = 48;
constexpr int n_seq = 5;

struct Cell {
    llama_pos pos = -1;
    llama_pos shift = 0;
    int mark = 0; // in the extra data of a cell, if the release has any
    std::set<int> seqs;
};

// Some releases store extra data per cell (llama_kv_cell_ext).
template <typename Cells>
auto set_mark(Cells &cells, uint32_t i, int mark, int) -> decltype(cells.ext_get(i), void()) {
    auto ext = cells.is_empty(i) ? typename std::decay<decltype(cells.ext_get(i))>::type{}
                                 : cells.ext_get(i);
    ext.x = mark;
    cells.ext_set(i, ext);
}
template <typename Cells> void set_mark(Cells &, uint32_t, int, long) {}

template <typename Cells>
auto mark_is(const Cells &cells, uint32_t i, int mark, int) -> decltype(cells.ext_get(i), bool()) {
    return cells.ext_get(i).x == mark;
}
template <typename Cells> bool mark_is(const Cells &, uint32_t, int, long) { return true; }

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::printf("line %d, step %d: %s\n", __LINE__, step, #condition);                     \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

void compare(const llama_kv_cells &cells, const std::vector<Cell> &model, int step) {
    uint32_t used = 0, end = 0;
    std::map<int, std::set<llama_pos>> positions;
    for (uint32_t i = 0; i < n_cells; ++i) {
        EXPECT(cells.is_empty(i) == (model[i].pos < 0));
        if (cells.is_empty(i)) {
            continue;
        }
        used += 1;
        end = i + 1;
        EXPECT(cells.pos_get(i) == model[i].pos);
        EXPECT(cells.get_shift(i) == model[i].shift);
        EXPECT(mark_is(cells, i, model[i].mark, 0));
        EXPECT(cells.seq_count(i) == static_cast<int>(model[i].seqs.size()));
        for (int s = 0; s < n_seq; ++s) {
            EXPECT(cells.seq_has(i, s) == (model[i].seqs.count(s) > 0));
            if (model[i].seqs.count(s)) {
                positions[s].insert(model[i].pos);
            }
        }
    }
    EXPECT(cells.get_used() == used);
    EXPECT(cells.used_max_p1() == end);
    for (int s = 0; s < n_seq; ++s) {
        const auto &all = positions[s];
        EXPECT(cells.seq_pos_min(s) == (all.empty() ? -1 : *all.begin()));
        EXPECT(cells.seq_pos_max(s) == (all.empty() ? -1 : *all.rbegin()));
    }
}

#ifdef WITH_CELL_MOVES

// Start the moves of a plan and commit the first n cells. Return the number of allocations of the commit; a partial commit
// may allocate and returns 0.
size_t move_cells(llama_kv_cells &cells, const std::vector<llama_kv_defrag::move> &moves, uint32_t n) {
    llama_kv_defrag::plan plan;
    plan.moves = moves;
    for (const auto &each : moves) {
        plan.n_cells += each.len;
    }
    llama_kv_compaction::cell_moves<llama_kv_cells> todo(cells, plan);
    const size_t before = n_allocated;
    todo.commit(n);
    return n == plan.n_cells || n == 0 ? n_allocated - before : 0;
}

void move_cell(llama_kv_cells &cells, uint32_t src, uint32_t dst, int step) {
    EXPECT(move_cells(cells, {{src, dst, 1}}, 0) == 0);
    EXPECT(!cells.is_empty(src) && cells.is_empty(dst));
    EXPECT(move_cells(cells, {{src, dst, 1}}, 1) == 0);
}

// Plan to move all used cells to the start in their order, and commit only the first n moves. Sources of moves are
// destinations of later ones.
int compact(llama_kv_cells &cells, std::vector<Cell> &model, uint32_t n, int step) {
    std::vector<llama_kv_defrag::move> moves;
    uint32_t end = 0;
    for (uint32_t i = 0; i < n_cells; ++i) {
        if (model[i].pos >= 0) {
            if (i != end) {
                moves.push_back({i, end, 1});
            }
            ++end;
        }
    }
    n = std::min<uint32_t>(n, moves.size());
    EXPECT(move_cells(cells, moves, n) == 0);
    for (uint32_t k = 0; k < n; ++k) {
        model[moves[k].dst] = model[moves[k].src];
        model[moves[k].src] = Cell();
    }
    return static_cast<int>(n);
}

#else

void move_cell(llama_kv_cells &cells, uint32_t src, uint32_t dst, int step) {
    const size_t before = n_allocated;
    cells.mv(src, dst);
    EXPECT(n_allocated == before);
}

int compact(llama_kv_cells &, std::vector<Cell> &, uint32_t, int) { return 0; }

#endif

} // namespace

int main() {
    std::mt19937 random(20261120);
    const auto draw = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
    llama_kv_cells cells;
    cells.resize(n_cells);
    std::vector<Cell> model(n_cells);
    int moved = 0;
    for (int step = 0; step < 20000; ++step) {
        const uint32_t i = draw(n_cells), j = draw(n_cells);
        const int s = static_cast<int>(draw(n_seq));
        if (model[i].pos < 0) {
            model[i].pos = static_cast<llama_pos>(draw(40));
            model[i].mark = step;
            cells.pos_set(i, model[i].pos);
            set_mark(cells, i, step, 0);
        }
        switch (draw(6)) {
        case 0:
            if (model[i].seqs.insert(s).second) {
                cells.seq_add(i, s);
            }
            break;
        case 1:
            if (model[i].seqs.count(s)) {
                model[i].seqs.erase(s);
                if (cells.seq_rm(i, s)) {
                    model[i] = Cell();
                }
            }
            break;
        case 2: {
            const auto delta = static_cast<llama_pos>(draw(9)) - 4;
            model[i].pos += delta;
            model[i].shift += delta;
            if (cells.pos_add(i, delta)) {
                model[i] = Cell();
            }
            break;
        }
        case 3:
            cells.rm(i);
            model[i] = Cell();
            break;
        default:
            if (model[j].pos < 0 && i != j) {
                // Pending shifts are applied before cells move.
                cells.reset_shift();
                for (auto &each : model) {
                    each.shift = 0;
                }
                move_cell(cells, i, j, step);
                model[j] = model[i];
                model[i] = Cell();
                moved += 1;
            }
        }
        if (step % 50 == 0) {
            cells.reset_shift();
            for (auto &each : model) {
                each.shift = 0;
            }
            moved += compact(cells, model, draw(3) ? n_cells : draw(n_cells), step);
        }
        // The cache treats a cell without sequences as free.
        if (model[i].pos >= 0 && model[i].seqs.empty()) {
            cells.rm(i);
            model[i] = Cell();
        }
        compare(cells, model, step);
    }
    std::printf("%d cells moved\n", moved);
    return moved > 1000 ? 0 : 1;
}
