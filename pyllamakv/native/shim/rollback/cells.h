// For releases whose cells are public and in which a failed decode leaves cells of its batch, or
// removes cells that it did not write. Positions and sequences of all cells are saved before a
// decode and restored after a failed one. A failed decode does not change the data of occupied
// cells, so this is enough.
#pragma once

#include "groups.h"

namespace plk::rollback {

const uint64_t bits = 0;
const bool abortable = true;

// Defined by the candidate. Return NULL if the memory is not an array of cells.
plk::Cache *cache_of(llama_context *ctx);

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
