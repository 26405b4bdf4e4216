// What a failed decode leaves, and how it is undone.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_memory
// A batch without a slot leaves nothing, and an aborted batch leaves its finished micro-batches
// (0.3.10 and later). Positions of a batch are greater than all earlier ones of their sequence, so
// they can be removed by sequence and position.

const uint64_t plk::rollback::bits = PLK_CAP_ROLLBACK;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &context, const llama_batch &batch, int code, Saved *) {
    llama_memory_t memory = llama_get_memory(context.ctx);
    if (memory == nullptr || code == 1 || code == -1 || context.model->info.is_recurrent) {
        return; // no slot, or refused before a token was placed
    }
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            llama_memory_seq_rm(memory, batch.seq_id[i][j], batch.pos[i], batch.pos[i] + 1);
        }
    }
}

#elif defined(PLK_USE_guard)
// llama_decode undoes every failure (0.3.9, b5415), but keeps the ranges that it undid: the next
// failure would remove the cells that occupy these ranges then.
#include "cells/private.h"

#include "llama-kv-cache.h"

namespace plk {
PLK_PRIVATE(Pending, llama_kv_cache_unified::pending);
} // namespace plk

const uint64_t plk::rollback::bits = PLK_CAP_ROLLBACK;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &context, const llama_batch &, int, Saved *) {
    auto *cache = dynamic_cast<llama_kv_cache_unified *>(llama_get_kv_self(context.ctx));
    if (cache != nullptr && !(cache->*plk_member(Pending{})).ranges.empty()) {
        cache->commit();
    }
}

#elif defined(PLK_USE_patched)
// Trees with the patches full-defrag and decode-rollback, which are always combined through 0.3.8
// and in b4980: llama_decode undoes every failure itself, and may have moved cells.

#include "llama-kv-defrag.h"

#if __has_include("llama-kv-cache-unified.h")
#error "since b5590, upstream rolls back, and an aborted batch leaves its finished micro-batches"
#endif

const uint64_t plk::rollback::bits = PLK_CAP_ROLLBACK;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &, const llama_batch &, int, Saved *) {}

#elif defined(PLK_USE_context)
// b4980: upstream's restore uses cell indices as positions, and removes these from every sequence.
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache_unified;
}

// Return NULL if the memory is not an array of cells.
static plk::Cache *cache_of(llama_context *ctx) {
    auto *cache = dynamic_cast<plk::Cache *>(ctx->get_kv_self());
    return cache != nullptr && !cache->recurrent ? cache : nullptr;
}

#elif defined(PLK_USE_split)
// 0.3.6 through 0.3.8: a batch without a slot leaves its first micro-batches, and an aborted batch
// removes positions of every sequence.
#include "llama-context.h"
#include "llama-kv-cache.h"

namespace plk {
using Cache = llama_kv_cache;
}

// Return NULL if the memory is not an array of cells.
static plk::Cache *cache_of(llama_context *ctx) {
    return ctx->kv_self.recurrent ? nullptr : &ctx->kv_self;
}

#elif defined(PLK_USE_prefix)
// Through 0.3.5: a batch without a slot leaves its first tokens, and cells can only be counted.

#include <map>

const uint64_t plk::rollback::bits = 0;
// Since 0.3.2, an aborted decode removes positions of every sequence, which cannot be restored.
const bool plk::rollback::abortable = false;

namespace {
struct Used : plk::rollback::Saved {
    int32_t cells = 0;
};
using Pair = std::pair<int32_t, int32_t>; // sequence, position
} // namespace

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &context) {
    if (context.model->info.is_recurrent) {
        return nullptr;
    }
    auto saved = std::make_unique<Used>();
    saved->cells = plk::memory::used(context.ctx);
    return saved;
}

void plk::rollback::undo(plk_context &context, const llama_batch &batch, int, Saved *saved) {
    if (saved == nullptr) {
        return;
    }
    const int32_t more = plk::memory::used(context.ctx) - static_cast<Used *>(saved)->cells;
    const int32_t added = std::max(0, std::min(more, batch.n_tokens));
    std::map<Pair, int> copies;
    for (int32_t i = 0; i < added; ++i) {
        for (int32_t j = 0; j < batch.n_seq_id[i]; ++j) {
            copies[{batch.seq_id[i][j], batch.pos[i]}] = 0;
        }
    }
    plk::Picture picture;
    if (plk::take_picture(context, picture)) {
        for (size_t cell = 0; cell < picture.pos.size(); ++cell) {
            for (auto &[pair, count] : copies) {
                const uint64_t word = picture.seqs[cell * picture.words + pair.first / 64];
                count += picture.pos[cell] == pair.second && (word >> (pair.first % 64) & 1);
            }
        }
    }
    for (const auto &[pair, count] : copies) {
        // A position in two cells existed before. It is kept, although one cell is a leftover.
        if (count < 2) {
            plk::memory::seq_rm(context.ctx, pair.first, pair.second, pair.second + 1);
        }
    }
}

#elif defined(PLK_USE_none)
// Releases whose failed decodes have unknown effects.

const uint64_t plk::rollback::bits = 0;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &, const llama_batch &, int, Saved *) {}

#endif

#if defined(PLK_USE_context) || defined(PLK_USE_split)
// For releases whose cells are public and in which a failed decode leaves cells of its batch, or
// removes cells that it did not write. Positions and sequences of all cells are saved before a
// decode and restored after a failed one. A failed decode does not change the data of occupied
// cells, so this is enough.

namespace plk::rollback {

const uint64_t bits = 0;
const bool abortable = true;

// Positions and sequences in the form of plk_cells_read: a copy of the cells, with a std::set each,
// often costs more than the decode. No shift is pending: a guarded decode applies it first.
struct Cells : Saved {
    plk::Picture picture;
    uint32_t head = 0, used = 0, n = 0;
};

std::unique_ptr<Saved> save(plk_context &context) {
    const plk::Cache *cache = cache_of(context.ctx);
    auto saved = std::make_unique<Cells>();
    if (cache == nullptr || !plk::take_picture(context, saved->picture)) {
        return nullptr;
    }
    saved->head = cache->head;
    saved->used = cache->used;
    saved->n = cache->n;
    return saved;
}

// Return whether `cell` was occupied and now has another content, so that its data moved as well.
// Only a patched decode moves cells, and it undoes failures itself.
inline bool moved(const plk::Picture &before, const plk::Picture &after, size_t cell) {
    if (before.pos[cell] < 0 || after.pos[cell] < 0) {
        return false;
    }
    const uint64_t *old = before.seqs.data() + cell * before.words;
    return before.pos[cell] != after.pos[cell] ||
           !std::equal(old, old + before.words, after.seqs.data() + cell * after.words);
}

void undo(plk_context &context, const llama_batch &, int, Saved *saved) {
    plk::Cache *cache = cache_of(context.ctx);
    const auto *old = static_cast<const Cells *>(saved);
    plk::Picture now;
    if (cache == nullptr || old == nullptr || !plk::take_picture(context, now)) {
        return;
    }
    for (size_t i = 0; i < now.pos.size(); ++i) {
        if (moved(old->picture, now, i)) {
            return;
        }
    }
    for (size_t i = 0; i < now.pos.size(); ++i) {
        auto &cell = cache->cells[i];
        cell.pos = old->picture.pos[i];
        cell.seq_id.clear();
        for (uint32_t seq = 0; seq < context.n_seq_max; ++seq) {
            const uint64_t word = old->picture.seqs[i * old->picture.words + seq / 64];
            if (word >> (seq % 64) & 1) {
                cell.seq_id.insert(static_cast<llama_seq_id>(seq));
            }
        }
    }
    cache->head = old->head;
    cache->used = old->used;
    cache->n = old->n;
}

} // namespace plk::rollback
#endif
