// A release of which we do not know what a failed decode leaves.
#include "groups.h"

const uint64_t plk::rollback::bits = 0;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &, const llama_batch &, int, Saved *) {}
