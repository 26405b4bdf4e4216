// Trees without the patch mmap-kv: every cache is on the heap.
#include "groups.h"

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
