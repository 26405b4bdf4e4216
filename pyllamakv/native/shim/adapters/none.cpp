// Releases whose adapters have an unknown interface.
#include "groups.h"

const uint64_t plk::adapters::bits = 0;

void *plk::adapters::open(llama_model *, const char *) { return nullptr; }
void plk::adapters::close(void *) {}
bool plk::adapters::set(llama_context *, const std::vector<void *> &, const std::vector<float> &) {
    return false;
}
size_t plk::adapters::max_nodes(llama_context *) { return 0; }
