// Pooling by a classification head.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_rank
// Pooling by a classification head (0.3.1 and later).

#if __has_include("llama-context.h")
#include "llama-context.h"
#endif
#if __has_include("llama-model.h")
#include "llama-model.h"
#endif

const uint64_t plk::pooling::bits = LLAMA_POOLING_TYPE_RANK == PLK_POOLING_RANK ? PLK_CAP_RANK : 0;

namespace {
template <typename Model>
auto has(Model *model, const char *name, int) -> decltype(model->get_tensor(name) != nullptr) {
    return model->get_tensor(name) != nullptr;
}
// A public function, through 0.3.6.
template <typename Model>
auto has(Model *model, const char *name, long)
    -> decltype(llama_get_model_tensor(model, name) != nullptr) {
    return llama_get_model_tensor(model, name) != nullptr;
}
template <typename Model> bool has(Model *, const char *, ...) { return true; }

template <typename Context>
auto width_of(Context *ctx, int) -> decltype(ctx->get_gf_res_reserve()->get_embd()->ne[0] + 0) {
    const auto *result = ctx->get_gf_res_reserve();
    const ggml_tensor *embd = result != nullptr ? result->get_embd() : nullptr;
    return embd != nullptr ? embd->ne[0] : 0;
}
template <typename Context> int64_t width_of(Context *, long) { return 0; }
} // namespace

bool plk::pooling::has_head(const llama_model *model) {
    auto *found = const_cast<llama_model *>(model);
    return has(found, "cls.weight", 0) || has(found, "cls.output.weight", 0);
}

int64_t plk::pooling::width(llama_context *ctx) { return width_of(ctx, 0); }

#elif defined(PLK_USE_none)
// Releases without pooling by a classification head.

const uint64_t plk::pooling::bits = 0;

bool plk::pooling::has_head(const llama_model *) { return false; }

int64_t plk::pooling::width(llama_context *) { return 0; }

#endif
