// What stands around a header of a patch: just enough of llama.h to compile it.
#pragma once

#define LLAMA_API

struct llama_context;
