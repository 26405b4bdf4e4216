// Fallback: the cells cannot be read.
#include "groups.h"

const uint64_t plk::cells::bits = 0;
plk::cells::Watch *const plk::cells::watch = nullptr;
const bool plk::cells::rounds_up = false;
bool plk::cells::needs_order(llama_context *) { return false; }

void plk::cells::describe(llama_context *ctx, plk_context_info &info) {
    info.memory = plk::memory::exists(ctx) ? PLK_MEMORY_OTHER : PLK_MEMORY_NONE;
    info.n_streams = plk::memory::exists(ctx) ? -1 : 0;
    info.defrag = 1; // PLK_CAP_DEFRAG decides
}
int32_t plk::cells::count(llama_context *) { return 0; }
int plk::cells::info(llama_context *, int32_t, plk_cells_info &) { return PLK_EUNSUPPORTED; }
int plk::cells::read(llama_context *, int32_t, int32_t, int32_t *, int32_t *, uint64_t *, int32_t) {
    return PLK_EUNSUPPORTED;
}
int plk::cells::pending(llama_context *) { return -1; }
bool plk::cells::can_copy(llama_context *, int32_t, int32_t, int32_t, int32_t) { return true; }
plk::cells::Limits plk::cells::limits(llama_context *) { return {}; }
void plk::cells::repair(llama_context *) {}
bool plk::cells::shifts_quantized(llama_context *) { return true; }
bool plk::cells::saves_sequences(llama_context *) { return true; }
int plk::cells::check_state(llama_context *, const uint8_t *, size_t) { return 1; }
