// A batch without a slot leaves nothing, and an aborted batch leaves its finished micro-batches
// (0.3.10 and later). Positions of a batch are greater than all earlier ones of their sequence, so
// they can be removed by sequence and position.
#include "groups.h"

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
