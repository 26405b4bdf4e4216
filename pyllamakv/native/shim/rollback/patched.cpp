// Trees with the patches full-defrag and decode-rollback, which are always combined through 0.3.8
// and in b4980: llama_decode undoes every failure itself, and may have moved cells.
#include "groups.h"

#include "llama-kv-defrag.h"

#if __has_include("llama-kv-cache-unified.h")
#error "since b5590, upstream rolls back, and an aborted batch leaves its finished micro-batches"
#endif

const uint64_t plk::rollback::bits = PLK_CAP_ROLLBACK;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &, const llama_batch &, int, Saved *) {}
