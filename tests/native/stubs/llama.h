// Stubs of llama.h that the headers of the patches need to compile.
#pragma once

#define LLAMA_API

struct llama_context;
