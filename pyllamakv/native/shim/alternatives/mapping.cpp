// Caches in mapped memory.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_patched
// Trees with the patch mmap-kv.
#include "built_from.h"

#include "llama-kv-mmap-api.h"
#include "llama-kv-mmap.h"

const uint64_t plk::mapping::bits = LLAMA_KV_MMAP_SUPPORTED ? PLK_CAP_MAPPING : 0;

void plk::mapping::choose(const plk_context_params *asked) {
    llama_kv_mmap::options options;
    if (asked != nullptr) {
        options.kind = asked->kv_backing == PLK_BACKING_HEAP ? llama_kv_mmap::KIND_HEAP
            : asked->kv_backing == PLK_BACKING_ANONYMOUS     ? llama_kv_mmap::KIND_ANON
                                                             : llama_kv_mmap::KIND_FILE;
        options.path = asked->kv_path != nullptr ? asked->kv_path : "";
        options.keep = static_cast<llama_kv_mmap::keep>(asked->kv_keep);
        options.huge = asked->kv_huge != 0;
        options.model = asked->kv_model != nullptr ? asked->kv_model : "";
        options.build = built_from(plk::built::variant);
        options.n_seq_max = asked->n_seq_max;
    }
    llama_kv_mmap::current() = options;
}

int plk::mapping::failure() {
    switch (llama_kv_mmap::current().failed) {
    case llama_kv_mmap::FAILURE_NONE:
        return 0;
    case llama_kv_mmap::FAILURE_UNSUPPORTED:
        return PLK_EUNSUPPORTED;
    case llama_kv_mmap::FAILURE_MEMORY:
        return PLK_EMEMORY;
    case llama_kv_mmap::FAILURE_SPACE:
        return PLK_ESPACE;
    case llama_kv_mmap::FAILURE_BUSY:
        return PLK_EBUSY;
    case llama_kv_mmap::FAILURE_DIRTY:
        return PLK_EDIRTY;
    case llama_kv_mmap::FAILURE_FOREIGN:
        return PLK_EFOREIGN;
    case llama_kv_mmap::FAILURE_DAMAGED:
        return PLK_EDAMAGED;
    case llama_kv_mmap::FAILURE_IO:
        break;
    }
    return PLK_ECONTEXT;
}

int32_t plk::mapping::count(llama_context *ctx) { return llama_kv_mmap_count(ctx); }

int plk::mapping::check(llama_context *ctx, const plk_context_params &asked) {
    if (asked.kv_backing == PLK_BACKING_HEAP) {
        return PLK_OK;
    }
    const int32_t n = llama_kv_mmap_count(ctx);
    llama_kv_mmap_info first{};
    if (!llama_kv_mmap_get(ctx, 0, &first)) {
        return refuse(PLK_EUNSUPPORTED,
                      "kv_backing has no effect here: all keys and values of this context are on "
                      "devices, mapped memory does not support them, or it has none");
    }
    plk_context_info info{};
    plk::cells::describe(ctx, info);
    if (asked.kv_keep && info.memory != PLK_MEMORY_ATTENTION && info.memory != PLK_MEMORY_SWA) {
        return refuse(PLK_EUNSUPPORTED,
                      "the memory of this model has more than keys and values of cells: it cannot "
                      "be kept");
    }
    for (int32_t i = 1; asked.kv_keep && i < n; ++i) {
        llama_kv_mmap_info next{};
        if (!llama_kv_mmap_get(ctx, i, &next) || next.generation != first.generation) {
            return refuse(PLK_EDIRTY,
                          "%s and %s.%d are not of one flush: their last owner did not finish",
                          asked.kv_path, asked.kv_path, i);
        }
    }
    return PLK_OK;
}

int plk::mapping::read(llama_context *ctx, plk_mapping &out) {
    llama_kv_mmap_info one{};
    for (int32_t i = 0; llama_kv_mmap_get(ctx, i, &one); ++i) {
        out.kind = one.kind;
        out.n_mappings += 1;
        out.n_tensors += one.n_tensors;
        out.n_cells += static_cast<int32_t>(one.n_cells * one.n_stream);
        out.kept = one.kept ? 1 : 0;
        out.resumed = one.resumed ? 1 : 0;
        out.generation = one.generation;
        out.bytes_reserved += one.n_reserved;
        out.bytes_committed += one.n_committed;
        out.bytes_file += one.n_file;
    }
    return PLK_OK;
}

int32_t plk::mapping::tensors(llama_context *ctx, int32_t room, int64_t *rows) {
    int32_t count = 0;
    llama_kv_mmap_info one{};
    for (int32_t i = 0; llama_kv_mmap_get(ctx, i, &one); ++i) {
        llama_kv_mmap_tensor tensor{};
        for (int32_t j = 0; llama_kv_mmap_get_tensor(ctx, i, j, &tensor); ++j) {
            if (count == room) {
                return refuse(PLK_EINVAL, "there is room for %d tensors, the cache has more", room);
            }
            int64_t *row = rows + 5 * count++;
            row[0] = i;
            row[1] = tensor.layer;
            row[2] = tensor.is_v ? 1 : 0;
            row[3] = static_cast<int64_t>(tensor.n_reserved);
            row[4] = static_cast<int64_t>(tensor.n_committed);
        }
    }
    return count;
}

int64_t plk::mapping::trim(llama_context *ctx) {
    return static_cast<int64_t>(llama_kv_mmap_trim(ctx));
}

int plk::mapping::flush(llama_context *ctx, const int32_t *tokens, int32_t n_tokens) {
    forget_logged();
    if (!llama_kv_mmap_flush(ctx, tokens, static_cast<size_t>(std::max(n_tokens, 0)))) {
        return refuse(PLK_EEXCEPTION, "%s", logged());
    }
    return PLK_OK;
}

int32_t plk::mapping::tokens(llama_context *ctx, int32_t room, int32_t *tokens) {
    int32_t count = 0;
    llama_kv_mmap_info one{};
    for (int32_t i = 0; llama_kv_mmap_get(ctx, i, &one); ++i) {
        const int32_t *found = llama_kv_mmap_tokens(ctx, i);
        const auto n = static_cast<int32_t>(one.n_cells * one.n_stream);
        if (found == nullptr) {
            break;
        }
        if (n > room - count) {
            return refuse(PLK_EINVAL, "there is room for %d tokens, the cache has more", room);
        }
        if (one.generation == 0) {
            std::fill(tokens + count, tokens + count + n, -1); // never flushed: the file has zeros
        } else {
            std::copy(found, found + n, tokens + count);
        }
        count += n;
    }
    return count;
}

#elif defined(PLK_USE_none)
// Trees without the patch mmap-kv: every cache is on the heap.

const uint64_t plk::mapping::bits = 0;

void plk::mapping::choose(const plk_context_params *) {}

int plk::mapping::failure() { return 0; }

int32_t plk::mapping::count(llama_context *) { return 0; }

int plk::mapping::check(llama_context *, const plk_context_params &) { return PLK_OK; }

int plk::mapping::read(llama_context *, plk_mapping &) { return PLK_EUNSUPPORTED; }

int32_t plk::mapping::tensors(llama_context *, int32_t, int64_t *) { return PLK_EUNSUPPORTED; }

int64_t plk::mapping::trim(llama_context *) { return PLK_EUNSUPPORTED; }

int plk::mapping::flush(llama_context *, const int32_t *, int32_t) { return PLK_EUNSUPPORTED; }

int32_t plk::mapping::tokens(llama_context *, int32_t, int32_t *) { return PLK_EUNSUPPORTED; }

#endif
