// Cells through the public view, the only access in releases through 0.3.5.
//
// The view adds a pending shift to positions that already include it. While a shift may be pending,
// the positions come from the states of the sequences; otherwise the view is exact.
#include "cells/state.h"
#include "fields.h"

#include <mutex>
#include <set>

const uint64_t plk::cells::bits = PLK_CAP_CELLS;

namespace {

struct View {
    llama_kv_cache_view view;
    View(llama_context *ctx, int32_t n_seq) : view(llama_kv_cache_view_init(ctx, n_seq)) {
        llama_kv_cache_view_update(ctx, &view);
    }
    ~View() { llama_kv_cache_view_free(&view); }
    View(const View &) = delete;
    View &operator=(const View &) = delete;
};

bool is_array(llama_context *ctx) { return !plk::fields::recurrent(llama_get_model(ctx)); }

// Return the positions of a sequence's cells, in the order of the cells. The state of a sequence
// begins with the number of cells, then a position and an empty list of owners for each. The buffer
// has no room for the keys and values that follow: llama.cpp stops there and logs an error.
std::vector<int32_t> positions(llama_context *ctx, llama_seq_id seq, size_t count) {
    std::vector<uint32_t> words(1 + 2 * count, UINT32_MAX);
    {
        const plk::Muted muted;
        llama_state_seq_get_data(ctx, reinterpret_cast<uint8_t *>(words.data()),
                                 words.size() * sizeof(uint32_t), seq);
    }
    std::vector<int32_t> found;
    for (size_t i = 0; words[0] == count && i < count && words[2 + 2 * i] == 0; ++i) {
        found.push_back(static_cast<int32_t>(words[1 + 2 * i]));
    }
    return found;
}

// Contexts in which a shift may be pending.
class Shifts : public plk::cells::Watch {
  public:
    void shifting(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1) override;
    void applied(llama_context *ctx) override {
        // Without RoPE, the oldest releases never apply a shift.
        if (llama_rope_type(llama_get_model(ctx)) != LLAMA_ROPE_TYPE_NONE) {
            closed(ctx);
        }
    }
    void closed(llama_context *ctx) override {
        const std::lock_guard<std::mutex> lock(mutex);
        contexts.erase(ctx);
    }
    bool any(llama_context *ctx) {
        const std::lock_guard<std::mutex> lock(mutex);
        return contexts.count(ctx) > 0;
    }

  private:
    std::mutex mutex;
    std::set<llama_context *> contexts;
};

Shifts &shifts() {
    static Shifts *one = new Shifts;
    return *one;
}

// Cells and their owners below `n_seq`. A view lists a cell's owners in ascending order, so n_seq
// columns suffice; llama_n_seq_max returns the number of cells in these releases.
struct Cells {
    std::vector<int32_t> pos;   // -1 for a free cell
    std::vector<int32_t> shift; // pending part of the position
    std::vector<std::vector<int32_t>> of; // cells of each sequence, ascending
    int32_t bad = -1; // a sequence whose positions could not be read; -1: none

    Cells(llama_context *ctx, int32_t n_seq) : of(n_seq) {
        const View now(ctx, n_seq);
        const auto n_cells = static_cast<size_t>(now.view.n_cells);
        pos.resize(n_cells, -1);
        shift.resize(n_cells, 0);
        for (size_t i = 0; i < n_cells; ++i) {
            for (int32_t j = 0; j < n_seq; ++j) {
                const llama_seq_id seq = now.view.cells_sequences[i * n_seq + j];
                if (seq < 0) {
                    break;
                }
                if (seq < n_seq) {
                    pos[i] = now.view.cells[i].pos;
                    of[seq].push_back(static_cast<int32_t>(i));
                }
            }
        }
        if (shifts().any(ctx)) {
            correct(ctx);
        }
    }

  private:
    void correct(llama_context *ctx) {
        const std::vector<int32_t> seen = pos;
        for (size_t seq = 0; seq < of.size(); ++seq) {
            const std::vector<int32_t> &cells = of[seq];
            if (cells.empty()) {
                continue;
            }
            const auto number = static_cast<llama_seq_id>(seq);
            const std::vector<int32_t> found = positions(ctx, number, cells.size());
            if (found.size() != cells.size()) {
                bad = number;
                return;
            }
            for (size_t i = 0; i < cells.size(); ++i) {
                pos[cells[i]] = found[i];
                shift[cells[i]] = seen[cells[i]] - found[i];
            }
        }
    }
};

void Shifts::shifting(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1) {
    if (!is_array(ctx)) {
        return; // a recurrent state has no pending shift
    }
    const Cells now(ctx, seq + 1);
    const std::vector<int32_t> &cells = now.of[seq];
    const bool any = std::any_of(cells.begin(), cells.end(), [&](int32_t i) {
        return now.pos[i] >= p0 && (p1 < 0 || now.pos[i] < p1);
    });
    if (any || now.bad >= 0) {
        const std::lock_guard<std::mutex> lock(mutex);
        contexts.insert(ctx);
    }
}

int32_t size_of(llama_context *ctx) {
    const View now(ctx, 1);
    return now.view.n_cells;
}

} // namespace

plk::cells::Watch *const plk::cells::watch = &shifts();
const bool plk::cells::rounds_up = false;
bool plk::cells::needs_order(llama_context *) { return false; }

void plk::cells::describe(llama_context *ctx, plk_context_info &info) {
    if (!is_array(ctx)) {
        info.memory = PLK_MEMORY_RECURRENT;
        info.can_remove_partly = 0;
        info.n_streams = 0;
        return;
    }
    info.memory = PLK_MEMORY_ATTENTION;
    info.n_caches = 1;
    info.n_streams = 1;
    info.can_remove_partly = 1;
    info.contiguous_slots = 1;
    info.defrag = 1;
}

int32_t plk::cells::count(llama_context *ctx) { return is_array(ctx) ? 1 : 0; }

int plk::cells::info(llama_context *ctx, int32_t, plk_cells_info &out) {
    out.n_cells = size_of(ctx);
    out.used = llama_get_kv_cache_used_cells(ctx);
    out.head = -1;
    out.has_shift = shifts().any(ctx) ? 1 : 0;
    out.n_layer = llama_n_layer(llama_get_model(ctx));
    out.type_k = out.type_v = -1;
    out.v_transposed = -1;
    out.host = -1;
    return PLK_OK;
}

int plk::cells::read(llama_context *ctx, int32_t, int32_t, int32_t *pos, int32_t *shift,
                     uint64_t *seqs, int32_t words) {
    const Cells now(ctx, 64 * words);
    if (now.bad >= 0) {
        return plk::refuse(PLK_ESTATE,
                           "the positions of sequence %d cannot be told while a shift is pending: "
                           "its state is not written as expected",
                           now.bad);
    }
    std::copy(now.pos.begin(), now.pos.end(), pos);
    std::copy(now.shift.begin(), now.shift.end(), shift);
    std::fill(seqs, seqs + now.pos.size() * words, 0);
    for (size_t seq = 0; seq < now.of.size(); ++seq) {
        for (const int32_t cell : now.of[seq]) {
            seqs[size_t(cell) * words + seq / 64] |= uint64_t(1) << (seq % 64);
        }
    }
    return static_cast<int>(now.pos.size());
}

// Return 1 or -1 (unknown): defrag_thold may have requested a defragmentation that the view lacks.
int plk::cells::pending(llama_context *ctx) { return shifts().any(ctx) ? 1 : -1; }

bool plk::cells::can_copy(llama_context *, int32_t, int32_t, int32_t, int32_t) { return true; }

plk::cells::Limits plk::cells::limits(llama_context *) { return {}; }

void plk::cells::repair(llama_context *) {}

bool plk::cells::shifts_quantized(llama_context *) { return true; }

bool plk::cells::saves_sequences(llama_context *) { return true; }

int plk::cells::check_state(llama_context *ctx, const uint8_t *data, size_t length) {
    if (!is_array(ctx)) {
        return check_states(data, length);
    }
    const auto n_values = static_cast<uint32_t>(llama_n_layer(llama_get_model(ctx)));
    StateReader reader{data, length, static_cast<uint32_t>(size_of(ctx)), 1, false, 0, n_values};
    return reader.result(reader.cache());
}
