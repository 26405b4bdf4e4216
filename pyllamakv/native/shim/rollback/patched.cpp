// Our patches full-defrag and decode-rollback, which come together to 0.3.8 and in b4980: whatever
// fails is undone by llama_decode itself, and cells may have moved meanwhile.
#include "groups.h"

#include "llama-kv-defrag.h"

const uint64_t plk::rollback::bits = PLK_CAP_ROLLBACK;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &, const llama_batch &, int, Saved *) {}
