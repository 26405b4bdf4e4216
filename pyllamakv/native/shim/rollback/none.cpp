// Releases whose failed decodes have unknown effects.
#include "groups.h"

const uint64_t plk::rollback::bits = 0;
const bool plk::rollback::abortable = true;

std::unique_ptr<plk::rollback::Saved> plk::rollback::save(plk_context &) { return nullptr; }

void plk::rollback::undo(plk_context &, const llama_batch &, int, Saved *) {}
