// Releases that update their memory only in a decode.
#include "groups.h"

const bool plk::update::present = false;

void plk::update::run(llama_context *, bool) {}
