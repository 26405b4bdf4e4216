// Cells through the public view alone, where everything else is inside llama.cpp (to 0.3.5).
//
// The view adds a pending shift to positions that contain it already. Every shift goes through
// plk_seq_add and plk_seq_div, so a ledger of what is pending gives the true positions.
#include "cells/state.h"

#include <map>
#include <mutex>

const uint64_t plk::cells::bits = PLK_CAP_CELLS;

namespace {

struct View {
    llama_kv_cache_view view;
    View(llama_context *ctx, int32_t n_seq) : view(llama_kv_cache_view_init(ctx, n_seq)) {
        llama_kv_cache_view_update(ctx, &view);
    }
    ~View() { llama_kv_cache_view_free(&view); }
    bool occupied(int32_t cell) const {
        return view.cells_sequences[size_t(cell) * view.n_seq_max] >= 0;
    }
    bool has(int32_t cell, int32_t seq) const {
        const llama_seq_id *ids = view.cells_sequences + size_t(cell) * view.n_seq_max;
        return std::find(ids, ids + view.n_seq_max, seq) != ids + view.n_seq_max;
    }
};

// What is pending, per context and cell; absent where nothing is.
class Pending : public plk::cells::Ledger {
  public:
    void add(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t delta) override {
        change(ctx, seq, p0, p1, [&](int32_t) { return delta; });
    }
    void div(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, int32_t divisor) override {
        change(ctx, seq, p0, p1, [&](int32_t pos) { return pos / divisor - pos; });
    }
    void applied(llama_context *ctx) override {
        const std::lock_guard<std::mutex> lock(mutex);
        shifts.erase(ctx);
    }
    std::vector<int32_t> of(llama_context *ctx, int32_t n_cells) {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = shifts.find(ctx);
        return found != shifts.end() ? found->second : std::vector<int32_t>(n_cells, 0);
    }
    bool any(llama_context *ctx) {
        const std::lock_guard<std::mutex> lock(mutex);
        return shifts.count(ctx) > 0;
    }

  private:
    template <typename Shift>
    void change(llama_context *ctx, int32_t seq, int32_t p0, int32_t p1, Shift shift) {
        const View now(ctx, static_cast<int32_t>(llama_n_seq_max(ctx)));
        std::vector<int32_t> old = of(ctx, now.view.n_cells);
        bool changed = false;
        for (int32_t i = 0; i < now.view.n_cells; ++i) {
            const int32_t pos = now.view.cells[i].pos - old[i];
            if (now.has(i, seq) && pos >= p0 && (p1 < 0 || pos < p1)) {
                old[i] += shift(pos);
                changed = true;
            }
        }
        if (changed) {
            const std::lock_guard<std::mutex> lock(mutex);
            shifts[ctx] = std::move(old);
        }
    }

    std::mutex mutex;
    std::map<llama_context *, std::vector<int32_t>> shifts;
};

Pending &pending_shifts() {
    static Pending *one = new Pending;
    return *one;
}

bool is_array(llama_context *ctx) { return !llama_model_is_recurrent(llama_get_model(ctx)); }

int32_t size_of(llama_context *ctx) {
    const View now(ctx, 1);
    return now.view.n_cells;
}

} // namespace

plk::cells::Ledger *const plk::cells::ledger = &pending_shifts();

void plk::cells::describe(llama_context *ctx, plk_context_info &info) {
    if (!is_array(ctx)) {
        info.memory = PLK_MEMORY_RECURRENT;
        info.can_remove_partly = 0;
        return;
    }
    info.memory = PLK_MEMORY_ATTENTION;
    info.n_caches = 1;
    info.can_remove_partly = 1;
    info.contiguous_slots = 1;
    info.defrag = 1;
}

int32_t plk::cells::count(llama_context *ctx) { return is_array(ctx) ? 1 : 0; }

int plk::cells::info(llama_context *ctx, int32_t, plk_cells_info &out) {
    out.n_cells = size_of(ctx);
    out.used = llama_get_kv_cache_used_cells(ctx);
    out.head = -1;
    out.has_shift = pending_shifts().any(ctx) ? 1 : 0;
    out.n_layer = llama_n_layer(llama_get_model(ctx));
    out.type_k = out.type_v = -1;
    out.v_transposed = -1;
    out.host = -1;
    return PLK_OK;
}

int plk::cells::read(llama_context *ctx, int32_t, int32_t room, int32_t *pos, int32_t *shift,
                     uint64_t *seqs, int32_t words) {
    const View now(ctx, static_cast<int32_t>(llama_n_seq_max(ctx)));
    const int32_t n_cells = std::min(now.view.n_cells, room);
    const std::vector<int32_t> old = pending_shifts().of(ctx, now.view.n_cells);
    std::fill(seqs, seqs + size_t(n_cells) * words, 0);
    for (int32_t i = 0; i < n_cells; ++i) {
        const bool occupied = now.occupied(i);
        pos[i] = occupied ? now.view.cells[i].pos - old[i] : -1;
        shift[i] = occupied ? old[i] : 0;
        for (int32_t j = 0; j < now.view.n_seq_max; ++j) {
            const llama_seq_id seq = now.view.cells_sequences[size_t(i) * now.view.n_seq_max + j];
            if (seq >= 0 && seq < 64 * words) {
                seqs[size_t(i) * words + seq / 64] |= uint64_t(1) << (seq % 64);
            }
        }
    }
    return n_cells;
}

// A threshold may have asked for a defragmentation, which the view does not show.
int plk::cells::pending(llama_context *ctx) { return pending_shifts().any(ctx) ? 1 : -1; }

bool plk::cells::can_copy(llama_context *, int32_t, int32_t, int32_t, int32_t) { return true; }

bool plk::cells::shifts_quantized(llama_context *) { return true; }

int plk::cells::check_state(llama_context *ctx, const uint8_t *data, size_t length) {
    if (!is_array(ctx)) {
        return 1;
    }
    const auto n_values = static_cast<uint32_t>(llama_n_layer(llama_get_model(ctx)));
    StateReader reader{data, length, static_cast<uint32_t>(size_of(ctx)), 1, false, 0, n_values};
    return reader.result(reader.cache());
}
