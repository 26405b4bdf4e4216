// Contexts whose parameters cannot be read.
#include "groups.h"

const bool plk::settings::flash_takes_f32 = false;

plk::settings::Settings plk::settings::read(llama_context *) { return {}; }
