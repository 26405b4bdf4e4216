// No way to update outside a decode.
#include "groups.h"

const bool plk::update::present = false;

void plk::update::run(llama_context *, bool) {}
