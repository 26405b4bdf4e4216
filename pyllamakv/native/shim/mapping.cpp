// Operations on caches in mapped memory: memory use, trim, and the file.
#include "groups.h"

namespace {

int check_mapped(const plk_context *context) {
    if (const int wrong = plk::need(context)) {
        return wrong;
    }
    if (plk::mapping::count(context->ctx) == 0) {
        return plk::refuse(PLK_EUNSUPPORTED, "%s",
                           plk::mapping::bits
                               ? "the cache of this context lies on the heap: make it with kv_backing"
                               : "this build keeps its cache on the heap only: it lacks the patch "
                                 "mmap-kv, or the platform mapped memory");
    }
    return PLK_OK;
}

// Apply pending updates: a pending copy may read the data of cells that are already free.
void settle(plk_context &context) {
    if (plk::update::present && plk::cells::pending(context.ctx) != 0) {
        plk::update::run(context.ctx, context.guard);
    }
    llama_synchronize(context.ctx);
}

} // namespace

extern "C" {

int plk_mapping_read(plk_context *context, plk_mapping *out) {
    return plk::guarded([&]() -> int {
        int code = check_mapped(context);
        plk_mapping mapping{};
        mapping.size = sizeof(mapping);
        if (code == PLK_OK) {
            code = plk::mapping::read(context->ctx, mapping);
        }
        if (code != PLK_OK) {
            return code;
        }
        uint64_t all = 0;
        bool host = true;
        for (int32_t cache = 0; cache < plk::cells::count(context->ctx); ++cache) {
            plk_cells_info info{};
            if (plk::cells::info(context->ctx, cache, info) == PLK_OK) {
                all += info.bytes_k + info.bytes_v;
                host = host && info.host == 1;
            }
        }
        // bytes_reserved is rounded up to whole pages, so the difference is a lower bound.
        const bool some = !host && all > mapping.bytes_reserved;
        mapping.bytes_elsewhere = some ? all - mapping.bytes_reserved : 0;
        return plk::give(mapping, out, "plk_mapping");
    });
}

int32_t plk_mapping_tensors(plk_context *context, int32_t room, int64_t *rows) {
    return plk::guarded([&]() -> int {
        const int code = check_mapped(context);
        if (code != PLK_OK) {
            return code;
        }
        if (rows == nullptr || room < 0) {
            return plk::refuse(PLK_EINVAL, "rows is NULL or room negative");
        }
        return plk::mapping::tensors(context->ctx, room, rows);
    });
}

int64_t plk_mapping_trim(plk_context *context) {
    int64_t bytes = 0;
    const int code = plk::guarded([&]() -> int {
        const int code = check_mapped(context);
        if (code == PLK_OK) {
            settle(*context);
            bytes = plk::mapping::trim(context->ctx);
        }
        return code;
    });
    return code == PLK_OK ? bytes : code;
}

int plk_mapping_flush(plk_context *context, const int32_t *tokens, int32_t n_tokens) {
    return plk::guarded([&]() -> int {
        const int code = check_mapped(context);
        if (code != PLK_OK) {
            return code;
        }
        if (!context->asked.kv_keep) {
            return plk::refuse(PLK_EUNSUPPORTED,
                               "the cache of this context is not kept: make it with kv_keep");
        }
        settle(*context);
        return plk::mapping::flush(context->ctx, tokens, n_tokens);
    });
}

int32_t plk_mapping_tokens(plk_context *context, int32_t room, int32_t *tokens) {
    return plk::guarded([&]() -> int {
        const int code = check_mapped(context);
        if (code != PLK_OK) {
            return code;
        }
        if (tokens == nullptr || room < 0) {
            return plk::refuse(PLK_EINVAL, "tokens is NULL or room negative");
        }
        return plk::mapping::tokens(context->ctx, room, tokens);
    });
}

} // extern "C"
