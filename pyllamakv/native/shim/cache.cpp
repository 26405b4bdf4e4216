// Cells, defragmentation, updates and counters of the caches of a context.
#include "groups.h"

#include <chrono>

namespace {

// Count the occupied cells whose content changed: the library moved it there.
int32_t moved(const plk::Picture &before, const plk::Picture &after) {
    int32_t count = 0;
    for (size_t i = 0; i < after.pos.size() && before.pos.size() == after.pos.size(); ++i) {
        const uint64_t *old = before.seqs.data() + i * before.words;
        const uint64_t *now = after.seqs.data() + i * after.words;
        count += after.pos[i] >= 0 && (after.pos[i] != before.pos[i] ||
                                       !std::equal(now, now + after.words, old));
    }
    return count;
}

// Return the increase of a counter, or -1 if this build does not count it.
int64_t since(int64_t first, int64_t last) { return last < 0 ? -1 : last - first; }

// Fill the fields that a release does not expose (type_k < 0): the cache has the requested types,
// and all layers are equal.
void complete(const plk_context &c, plk_cells_info &info) {
    if (info.type_k >= 0) {
        return;
    }
    info.type_k = c.asked.type_k;
    info.type_v = c.asked.type_v;
    info.v_transposed = plk::flash(c) > 0 ? 0 : 1;
    const auto bytes = [&](int32_t type, int32_t width) {
        const auto kind = static_cast<ggml_type>(type);
        const size_t row = ggml_type_size(kind) * static_cast<size_t>(width) /
                           static_cast<size_t>(ggml_blck_size(kind));
        return static_cast<uint64_t>(row) * static_cast<uint64_t>(info.n_cells) *
               static_cast<uint64_t>(info.n_layer);
    };
    info.bytes_k = bytes(info.type_k, c.model->info.n_embd_k_gqa);
    info.bytes_v = bytes(info.type_v, c.model->info.n_embd_v_gqa);
    info.host = c.model->offloaded && c.asked.offload_kqv ? -1 : 1;
}

int check_cache(const plk_context *context, int32_t cache) {
    if (const int wrong = plk::need(context)) {
        return wrong;
    }
    if (!(plk::cells::bits & PLK_CAP_CELLS)) {
        return plk::refuse(PLK_EUNSUPPORTED, "this build cannot see cells");
    }
    const int32_t count = plk::cells::count(context->ctx);
    if (cache < 0 || cache >= count) {
        return plk::refuse(count ? PLK_EINVAL : PLK_EUNSUPPORTED,
                           "there is no cache %d: this context has %d", cache, count);
    }
    return PLK_OK;
}

} // namespace

extern "C" {

int plk_defrag(plk_context *context, plk_defrag_report *out) {
    return plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        plk_context_info info{};
        plk::cells::describe(context->ctx, info);
        if (const char *reason = plk::defrag::refusal(context->ctx, info)) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "the memory of this context cannot be defragmented: %s", reason);
        }
        if (context->pooling == PLK_POOLING_MEAN && !plk::update::reserves_means) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "this release cannot move cells of a context with pooling \"mean\": use "
                               "another pooling, or a later release");
        }
        plk::Picture before, after;
        plk_counters first{}, last{};
        const bool seen = plk::take_picture(*context, before);
        const bool counted = plk::counters::read(context->ctx, first);
        const auto start = std::chrono::steady_clock::now();
        const int code = plk::defrag::run(context->ctx, context->guard);
        if (code != PLK_OK) {
            return code;
        }
        const auto spent = std::chrono::steady_clock::now() - start;
        plk_defrag_report report{};
        report.size = sizeof(report);
        report.passes = report.moves = report.cells = -1;
        report.bytes = report.graphs = report.plan_ns = report.scratch_bytes = -1;
        report.ns = std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
        if (seen && plk::take_picture(*context, after)) {
            report.cells = moved(before, after);
        }
        if (counted && plk::counters::read(context->ctx, last)) {
            report.passes = static_cast<int32_t>(since(first.defrags, last.defrags));
            report.moves = static_cast<int32_t>(since(first.moves, last.moves));
            report.bytes = since(first.bytes_moved, last.bytes_moved);
            report.graphs = since(first.graphs, last.graphs);
            report.plan_ns = since(first.plan_ns, last.plan_ns);
            report.scratch_bytes = last.scratch_bytes;
        }
        return plk::give(report, out, "plk_defrag_report");
    });
}

int plk_update(plk_context *context) {
    return plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        if (!plk::update::present) {
            return plk::refuse(PLK_EUNSUPPORTED, "this build updates its memory only in a decode");
        }
        plk::update::run(context->ctx, context->guard);
        return PLK_OK;
    });
}

int plk_cells_info_read(plk_context *context, int32_t cache, plk_cells_info *out) {
    return plk::guarded([&]() -> int {
        int code = check_cache(context, cache);
        plk_cells_info info{};
        if (code == PLK_OK) {
            info.size = sizeof(info);
            code = plk::cells::info(context->ctx, cache, info);
            complete(*context, info);
        }
        return code == PLK_OK ? plk::give(info, out, "plk_cells_info") : code;
    });
}

int plk_cells_read(plk_context *context, int32_t cache, int32_t room, int32_t *pos, int32_t *shift,
                   uint64_t *seqs, int32_t words) {
    return plk::guarded([&]() -> int {
        int code = check_cache(context, cache);
        plk_cells_info info{};
        if (code == PLK_OK) {
            code = plk::cells::info(context->ctx, cache, info);
        }
        if (code != PLK_OK) {
            return code;
        }
        const auto enough = static_cast<int32_t>((context->n_seq_max + 63) / 64);
        if (pos == nullptr || shift == nullptr || seqs == nullptr || room < info.n_cells ||
            words < enough) {
            return plk::refuse(PLK_EINVAL, "expected room for %d cells and %d words each",
                               info.n_cells, enough);
        }
        return plk::cells::read(context->ctx, cache, room, pos, shift, seqs, words);
    });
}

int plk_counters_read(plk_context *context, plk_counters *out) {
    return plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        plk_counters counters{};
        if (!plk::counters::read(context->ctx, counters)) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "nothing is counted here: the build lacks the patch kv-counters, or "
                               "this context the cache");
        }
        counters.size = sizeof(counters);
        return plk::give(counters, out, "plk_counters");
    });
}

} // extern "C"
