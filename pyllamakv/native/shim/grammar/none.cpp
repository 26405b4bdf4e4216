// Releases whose grammars cannot be parsed here (through 0.2.90).
#include "groups.h"

struct plk::grammar::Grammar {};
const uint64_t plk::grammar::bits = 0;

plk::grammar::Grammar *plk::grammar::open(const llama_model *, const char *) {
    refuse(PLK_EUNSUPPORTED, "this build has no grammars");
    return nullptr;
}
void plk::grammar::close(Grammar *) {}
void plk::grammar::reset(Grammar *) {}
void plk::grammar::apply(Grammar *, std::vector<llama_token_data> &) {}
void plk::grammar::accept(Grammar *, int32_t) {}
