// Through 0.3.5: a batch without a slot leaves its first tokens, and cells can only be counted.
#include "groups.h"

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
