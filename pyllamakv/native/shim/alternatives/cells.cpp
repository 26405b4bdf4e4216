// Reading the cells of caches.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#if defined(PLK_USE_shared) || defined(PLK_USE_rows) || defined(PLK_USE_streams) ||                \
    defined(PLK_USE_single_rows) || defined(PLK_USE_single)
// A tree of caches with private arrays of cells:
//   shared       two caches may have the same arrays (0.3.30 and later)
//   rows         an array per stream; slots are always scattered (b6845, 0.3.17 through 0.3.25)
//   streams      an array per stream (0.3.15, 0.3.16)
//   single_rows  one array (0.3.12, 0.3.14)
//   single       one array; slots are always contiguous (between b5590 and 0.3.10)
// Between 0.3.12 and 0.3.16, slots are contiguous unless LLAMA_SET_ROWS enabled scattered slots when
// the cache was created.
#include "cells/private.h"

#if defined(PLK_USE_shared) || defined(PLK_USE_rows)
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache.h"
#else
#include "llama-kv-cache-unified-iswa.h"
#include "llama-kv-cache-unified.h"
#endif

namespace plk {

#if defined(PLK_USE_shared) || defined(PLK_USE_rows)
using Cache = llama_kv_cache;
using Iswa = llama_kv_cache_iswa;
#else
using Cache = llama_kv_cache_unified;
using Iswa = llama_kv_cache_unified_iswa;
#endif
PLK_PRIVATE(Layers, Cache::layers);
PLK_PRIVATE(Transposed, Cache::v_trans);

inline const auto &layers_of(Cache &cache) { return cache.*plk_member(Layers{}); }
inline bool transposed(Cache &cache) { return cache.*plk_member(Transposed{}); }

#if defined(PLK_USE_single_rows) || defined(PLK_USE_single)
PLK_PRIVATE(Cells, Cache::cells);
PLK_PRIVATE(Head, Cache::head);

constexpr bool counts_streams = false;
inline uint32_t n_stream(const Cache &) { return 1; }
inline const auto &cells_of(Cache &cache, uint32_t) { return cache.*plk_member(Cells{}); }
inline uint32_t head_of(Cache &cache, uint32_t) { return cache.*plk_member(Head{}); }
inline bool copies(Cache &) { return false; }
#else
PLK_PRIVATE(Heads, Cache::v_heads);
PLK_PRIVATE(Copies, Cache::sc_info);

constexpr bool counts_streams = true;
inline uint32_t n_stream(const Cache &cache) { return cache.get_n_stream(); }
inline uint32_t head_of(Cache &cache, uint32_t s) { return (cache.*plk_member(Heads{}))[s]; }
inline bool copies(Cache &cache) { return !(cache.*plk_member(Copies{})).ssrc.empty(); }
#ifdef PLK_USE_shared
PLK_PRIVATE(Cells, Cache::v_cells_impl);
inline const auto &cells_of(Cache &cache, uint32_t s) { return (*(cache.*plk_member(Cells{})))[s]; }
#else
PLK_PRIVATE(Cells, Cache::v_cells);
inline const auto &cells_of(Cache &cache, uint32_t s) { return (cache.*plk_member(Cells{}))[s]; }
#endif
#endif

#ifdef PLK_USE_streams
constexpr bool splits_across = true;
inline bool contiguous(Cache &cache) { return !cache.get_supports_set_rows(); }
#else
constexpr bool splits_across = false;
#ifdef PLK_USE_single_rows
PLK_PRIVATE(SetRows, Cache::supports_set_rows);
inline bool contiguous(Cache &cache) { return !(cache.*plk_member(SetRows{})); }
#elif defined(PLK_USE_single)
inline bool contiguous(Cache &) { return true; }
#else
inline bool contiguous(Cache &) { return false; }
#endif
#endif

} // namespace plk

#include "cells/tree.h"

#elif defined(PLK_USE_unified)
// Public cells in a class with private flags (0.3.9, b5415).
#include "cells/private.h"

#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache_unified;
PLK_PRIVATE(HasShift, Cache::has_shift);
PLK_PRIVATE(DoDefrag, Cache::do_defrag);
PLK_PRIVATE(Transposed, Cache::v_trans);
} // namespace plk

#include "cells/flat.h"

plk::cells::Look plk::cells::look(llama_context *ctx) {
    llama_kv_cache *memory = llama_get_kv_self(ctx);
    auto *cache = dynamic_cast<Cache *>(memory);
    if (cache == nullptr) {
        Look none;
        none.recurrent = dynamic_cast<llama_kv_cache_recurrent *>(memory) != nullptr;
        return none;
    }
    return {cache, cache->*plk_member(HasShift{}), cache->*plk_member(DoDefrag{}),
            cache->*plk_member(Transposed{}), false};
}

#elif defined(PLK_USE_context)
// One array of cells in a class whose members are all public (b4980).
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache_unified;
}

#include "cells/flat.h"

plk::cells::Look plk::cells::look(llama_context *ctx) {
    auto *cache = dynamic_cast<Cache *>(ctx->get_kv_self());
    if (cache == nullptr || cache->recurrent) {
        Look none;
        none.recurrent = cache != nullptr;
        return none;
    }
    return {cache, cache->has_shift, cache->do_defrag, cache->v_trans, false};
}

#elif defined(PLK_USE_split)
// One array of cells in a struct of llama_context (0.3.6 through 0.3.8).
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache;
}

#include "cells/flat.h"

plk::cells::Look plk::cells::look(llama_context *ctx) {
    Cache &cache = ctx->kv_self;
    if (cache.recurrent) {
        Look none;
        none.recurrent = true;
        return none;
    }
    return {&cache, cache.has_shift, cache.do_defrag, cache.v_trans, false};
}

#elif defined(PLK_USE_view)
// Cells through the public view, the only access in releases through 0.3.5.
//
// The view adds a pending shift to positions that already include it. While a shift may be pending,
// the positions come from the states of the sequences; otherwise the view is exact.
#include "cells/state.h"
#include "fields.h"

#if __has_include("llama-kv-settings.h") // the patch full-defrag
#include "llama-kv-settings.h"
#endif

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

void plk::cells::set_options([[maybe_unused]] llama_context *ctx,
                             [[maybe_unused]] const llama_kv_defrag::options &options) {
#if __has_include("llama-kv-settings.h")
    llama_kv_defrag::set_options(ctx, options);
#endif
}

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

#elif defined(PLK_USE_none)
// Fallback: the cells cannot be read.

const uint64_t plk::cells::bits = 0;
plk::cells::Watch *const plk::cells::watch = nullptr;
const bool plk::cells::rounds_up = false;
bool plk::cells::needs_order(llama_context *) { return false; }

void plk::cells::describe(llama_context *ctx, plk_context_info &info) {
    info.memory = plk::memory::exists(ctx) ? PLK_MEMORY_OTHER : PLK_MEMORY_NONE;
    info.n_streams = plk::memory::exists(ctx) ? -1 : 0;
    info.defrag = 1; // PLK_CAP_DEFRAG decides
}
int32_t plk::cells::count(llama_context *) { return 0; }
int plk::cells::info(llama_context *, int32_t, plk_cells_info &) { return PLK_EUNSUPPORTED; }
int plk::cells::read(llama_context *, int32_t, int32_t, int32_t *, int32_t *, uint64_t *, int32_t) {
    return PLK_EUNSUPPORTED;
}
int plk::cells::pending(llama_context *) { return -1; }
bool plk::cells::can_copy(llama_context *, int32_t, int32_t, int32_t, int32_t) { return true; }
plk::cells::Limits plk::cells::limits(llama_context *) { return {}; }
void plk::cells::set_options(llama_context *, const llama_kv_defrag::options &) {}
void plk::cells::repair(llama_context *) {}
bool plk::cells::shifts_quantized(llama_context *) { return true; }
bool plk::cells::saves_sequences(llama_context *) { return true; }
int plk::cells::check_state(llama_context *, const uint8_t *, size_t) { return 1; }

#endif
