// The object that functions about tokens take: the vocabulary (0.3.7 and later), or the model.
#pragma once

#include "core.h"

namespace plk {

template <typename Model>
auto words_of(const Model *model, int) -> decltype(llama_model_get_vocab(model)) {
    return llama_model_get_vocab(model);
}
template <typename Model> const Model *words_of(const Model *model, long) { return model; }

inline auto words(const llama_model *model) { return words_of(model, 0); }

} // namespace plk
