#ifndef LLAMA_KV_COMPACT_IMPL_H
#define LLAMA_KV_COMPACT_IMPL_H

// Implementation of llama-kv-compact.h. It accesses a cache through the public members that the patch adds to
// llama_kv_cache. llama-kv-compact-targets.h defines what depends on the release's classes of memory.

#include "llama-kv-compact.h"

#include "llama-context.h"
#include "llama-impl.h"
#include "llama-kv-cache.h"
#include "llama-kv-compact-cells.h"
#include "llama-kv-defrag-ggml.h"

#include <algorithm>
#include <atomic>
#include <typeinfo>
#include <vector>

namespace llama_kv_compaction {

// A cache whose cells may move.
struct target {
    llama_kv_cache * kv;

    // a cache with the same cells, whose data moves with kv by the same plan; nullptr if there is none
    llama_kv_cache * mirror;
};

// Append the caches of a memory, each with its mirror.
// Return false for a memory that may keep cell indexes outside of its caches.
static bool get_targets(const llama_memory_i * memory, std::vector<target> & res);

// Create the context's scheduler if the release does so only before the first computation.
template <typename Context>
auto prepare(Context * ctx, int) -> decltype(ctx->sched_reserve()) {
    ctx->sched_reserve();
}

template <typename Context>
void prepare(Context *, long) {}

// Return the memory as a T; nullptr if its class is any other, including classes derived from T.
template <typename T>
const T * as(const llama_memory_i * memory) {
    return memory && typeid(*memory) == typeid(T) ? static_cast<const T *>(memory) : nullptr;
}

// Return true if a free cell precedes a used one.
static bool has_holes(llama_kv_cache * kv) {
    const auto & streams = kv->get_compact_cells();

    return std::any_of(streams.begin(), streams.end(), [](const auto & cells) { return cells.used_max_p1() > cells.get_used(); });
}

// Return the fraction of cells that attention visits unnecessarily, in the stream where it is largest.
static float get_sparsity(llama_kv_cache * kv) {
    float res = 0.0f;

    for (const auto & cells : kv->get_compact_cells()) {
        // see llama_kv_cache::get_n_kv()
        const uint32_t n_kv   = GGML_PAD(cells.used_max_p1(), 256);
        const uint32_t n_need = GGML_PAD(cells.get_used(),    256);

        if (n_kv >= llama_kv_settings::get().min_cells) {
            res = std::max(res, 1.0f - float(n_need)/n_kv);
        }
    }

    return res;
}

// Return true if each cell has the same position and sequences in both.
template <typename Cells>
bool has_same_cells(const Cells & left, const Cells & right) {
    if (left.size() != right.size()) {
        return false;
    }

    for (uint32_t i = 0; i < left.size(); ++i) {
        if (left.is_empty(i) != right.is_empty(i)) {
            return false;
        }

        if (left.is_empty(i)) {
            continue;
        }

        if (left.pos_get(i) != right.pos_get(i) || left.seq_count(i) != right.seq_count(i)) {
            return false;
        }

        for (int s = 0, n = left.seq_count(i); n > 0; ++s) {
            if (left.seq_has(i, s)) {
                if (!right.seq_has(i, s)) {
                    return false;
                }

                --n;
            }
        }
    }

    return true;
}

// Return the reason why the cells cannot move; nullptr if they can.
static const char * get_refusal(const target & t) {
    if (t.kv->get_has_shared_cells()) {
        return "the cells are shared with the cache of another context";
    }

    if (!t.mirror) {
        return nullptr;
    }

    const auto & left  = t.kv->get_compact_cells();
    const auto & right = t.mirror->get_compact_cells();

    const bool same = std::equal(left.begin(), left.end(), right.begin(), right.end(), [](const auto & a, const auto & b) {
        return has_same_cells(a, b);
    });

    return same ? nullptr : "a cache that mirrors this one has other cells";
}

// Return the same for all caches of a context, and append them to res. res is valid only if the result is nullptr.
static const char * get_refusal(const llama_context * ctx, std::vector<target> & res) {
    if (!get_targets(ctx->get_memory(), res)) {
        return ctx->get_memory() ? "this kind of memory has no cells, or names them by number outside of its caches" : "the context has no memory";
    }

    for (const auto & t : res) {
        if (const char * refusal = get_refusal(t)) {
            return refusal;
        }
    }

    return nullptr;
}

// Return a cache of the context with its mirror; {} if the cache is a mirror or its kind of memory is unknown.
static target find_target(const llama_context * ctx, const llama_kv_cache * kv) {
    std::vector<target> all;

    if (get_targets(ctx->get_memory(), all)) {
        for (const auto & t : all) {
            if (t.kv == kv) {
                return t;
            }
        }
    }

    return {};
}

// defrag_thold in llama_context_default_params()
static const float UNSET = -1.0f;

// the threshold that the program set for all contexts with the default
static std::atomic<float> default_thold(UNSET);

// Requests a compaction from the updates during its lifetime, also if an exception ends it.
class request {
public:
    explicit request(llama_context * context) : ctx(context) {
        ctx->compact_requested = true;
    }

    ~request() {
        ctx->compact_requested = false;
    }

    request(const request &) = delete;
    request & operator=(const request &) = delete;

private:
    llama_context * const ctx;
};

// Return true if the next update must compact this cache.
static bool is_due(const llama_context * ctx, const llama_kv_cache * kv) {
    const float thold = llama_kv_compact_thold(ctx);

    if (!ctx->compact_requested && !(thold > 0.0f && llama_kv_compact_due(ctx, thold))) {
        return false;
    }

    const auto t = find_target(ctx, kv);

    return t.kv && has_holes(t.kv) && !get_refusal(t);
}

// Return false if a graph failed; some cells have moved then, and the cache is valid.
static bool compact_stream(llama_context * ctx, const target & t, uint32_t strm) {
    auto & stats = t.kv->defrag_stats;

    const llama_kv_defrag::stopwatch watch(stats.t_ns);

    const auto options = llama_kv_defrag::effective(t.kv->defrag_options);

    auto & cells = t.kv->get_compact_cells()[strm];

    std::vector<uint8_t> occupied(cells.size());

    for (uint32_t i = 0; i < cells.size(); ++i) {
        occupied[i] = !cells.is_empty(i);
    }

    const auto plan = llama_kv_defrag::make_plan(occupied.data(), cells.size(), options.order, stats);

    if (plan.moves.empty()) {
        return true;
    }

    std::vector<llama_kv_defrag::cell_tensor> tensors;

    t.kv->get_compact_tensors(strm, tensors);

    if (t.mirror) {
        t.mirror->get_compact_tensors(strm, tensors);
    }

    const llama_kv_defrag::graphs graphs = {
        ctx->get_sched(),
        (size_t) ctx->get_gf_res_reserve()->get_max_nodes(),
        [ctx](ggml_cgraph * gf) { return ctx->graph_compute(gf, false) == GGML_STATUS_SUCCESS; },
    };

    std::vector<cell_moves<llama_kv_cells>> metadata;

    metadata.emplace_back(cells, plan);

    if (t.mirror) {
        metadata.emplace_back(t.mirror->get_compact_cells()[strm], plan);
    }

    size_t n_moved = 0;

    const auto moved = [&](const llama_kv_defrag::move * moves, size_t n_moves) {
        for (size_t i = 0; i < n_moves; ++i) {
            n_moved += moves[i].len;
        }
    };

    const auto res = llama_kv_defrag::carry_out(plan, options, tensors, &graphs, ctx->get_cparams().n_threads, stats, moved);

    for (auto & each : metadata) {
        each.commit(n_moved);
    }

    const bool done = res != llama_kv_defrag::RESULT_FAILED;

    if (!done) {
        LLAMA_LOG_ERROR("%s: failed to compute a graph that moves cells\n", __func__);
    }

    LLAMA_LOG_DEBUG("%s: stream %u: %u cells in %zu moves\n", __func__, strm, plan.n_cells, plan.moves.size());

    return done;
}

// Compact a cache for which is_due() was true. Always return true: the memory was updated.
static bool compact(llama_context * ctx, llama_kv_cache * kv) {
    const auto t = find_target(ctx, kv);

    kv->do_compact = false;

    for (uint32_t s = 0; s < t.kv->get_compact_cells().size(); ++s) {
        if (!compact_stream(ctx, t, s)) {
            break;
        }
    }

    return true;
}

} // namespace llama_kv_compaction

const char * llama_kv_compact_refusal(const llama_context * ctx) {
    std::vector<llama_kv_compaction::target> targets;

    return llama_kv_compaction::get_refusal(ctx, targets);
}

bool llama_kv_compact_due(const llama_context * ctx, float thold) {
    std::vector<llama_kv_compaction::target> targets;

    return llama_kv_compaction::get_targets(ctx->get_memory(), targets) && std::any_of(targets.begin(), targets.end(), [=](const auto & t) {
        return llama_kv_compaction::get_sparsity(t.kv) > thold;
    });
}

float llama_kv_compact_thold(const llama_context * ctx) {
    for (const float thold : { ctx->defrag_thold, llama_kv_compaction::default_thold.load() }) {
        if (thold != llama_kv_compaction::UNSET) {
            return thold;
        }
    }

    return llama_kv_settings::get().thold;
}

void llama_kv_compact_set_default_thold(float thold) {
    // a negative value is a value, and not the same as no value
    llama_kv_compaction::default_thold = std::max(thold, 0.0f);
}

int32_t llama_kv_compact(llama_context * ctx) {
    std::vector<llama_kv_compaction::target> targets;

    if (llama_kv_compaction::get_refusal(ctx, targets)) {
        return -1;
    }

    llama_kv_compaction::prepare(ctx, 0);

    ctx->memory_update(false);

    {
        const llama_kv_compaction::request request(ctx);

        ctx->memory_update(false);
    }

    for (const auto & t : targets) {
        if (llama_kv_compaction::has_holes(t.kv)) {
            return -2;
        }
    }

    return 0;
}

#endif // LLAMA_KV_COMPACT_IMPL_H
