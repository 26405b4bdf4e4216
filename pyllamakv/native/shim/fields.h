// Fill upstream's structs by field name: releases add and remove fields, and use the same offset
// for another meaning.
#pragma once

#include "core.h"

#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>

// Define set_NAME, which sets a field of a struct. It does nothing in trees without this field.
#define PLK_FIELD(name)                                                                            \
    template <typename Struct, typename Value, typename = void> struct set_##name {                \
        static constexpr bool exists = false;                                                      \
        static void to(Struct &, Value) {}                                                         \
    };                                                                                             \
    template <typename Struct, typename Value>                                                     \
    struct set_##name<Struct, Value, std::void_t<decltype(std::declval<Struct &>().name)>> {       \
        static constexpr bool exists = true;                                                       \
        static void to(Struct &s, Value value) {                                                   \
            s.name = (decltype(s.name))(value);                                                    \
        }                                                                                          \
    };

namespace plk::fields {
PLK_FIELD(all_pos_0)
PLK_FIELD(defrag_thold)
PLK_FIELD(devices)
PLK_FIELD(flash_attn)
PLK_FIELD(flash_attn_type)
PLK_FIELD(kv_unified)
PLK_FIELD(load_mode)
PLK_FIELD(n_outputs_max)
PLK_FIELD(no_perf)
PLK_FIELD(pooling_type)
PLK_FIELD(rpc_servers)
PLK_FIELD(seed)
PLK_FIELD(swa_full)
PLK_FIELD(tensor_buft_overrides)
PLK_FIELD(use_mlock)
PLK_FIELD(use_mmap)

#define PLK_SET(name, target, value)                                                               \
    ::plk::fields::set_##name<std::decay_t<decltype(target)>, std::decay_t<decltype(value)>>::to(  \
        target, value)
#define PLK_HAS(name, type) (::plk::fields::set_##name<type, int>::exists)

// Read a number from the metadata of the model, which has the same keys in all releases. Return the
// first element of an array, and -1 if the key is absent or has no number.
inline int64_t number(const llama_model *model, const std::string &key) {
    char text[128];
    if (llama_model_meta_val_str(model, key.c_str(), text, sizeof(text)) < 0) {
        return -1;
    }
    const char *digits = text;
    while (*digits == '[' || *digits == ' ') {
        ++digits;
    }
    return *digits >= '0' && *digits <= '9' ? strtoll(digits, nullptr, 10) : -1;
}

inline std::string architecture(const llama_model *model) {
    char text[128];
    const int32_t length =
        llama_model_meta_val_str(model, "general.architecture", text, sizeof(text));
    return length < 0 ? std::string() : std::string(text);
}

// Return whether a model keeps a state instead of cells. The oldest releases have no function for
// this, and support one such architecture.
template <typename Model>
auto ask_recurrent(const Model *model, int) -> decltype(llama_model_is_recurrent(model)) {
    return llama_model_is_recurrent(model);
}
template <typename Model> bool ask_recurrent(const Model *model, long) {
    return architecture(model) == "mamba";
}
inline bool recurrent(const llama_model *model) { return ask_recurrent(model, 0); }

template <typename Model>
auto ask_outputs(const Model *model, int) -> decltype(llama_model_n_cls_out(model)) {
    return llama_model_n_cls_out(model);
}
template <typename Model> uint32_t ask_outputs(const Model *, long) { return 0; }

template <typename Model>
auto ask_embedding(const Model *model, int32_t, int) -> decltype(llama_model_n_embd_out(model)) {
    return llama_model_n_embd_out(model);
}
template <typename Model> int32_t ask_embedding(const Model *, int32_t n_embd, long) {
    return n_embd;
}

// Fill the fields that all releases provide in the same way.
inline void describe(const llama_model *model, plk_model_info &info) {
    const std::string prefix = architecture(model) + ".";
    const auto heads = static_cast<int32_t>(number(model, prefix + "attention.head_count"));
    const auto heads_kv = static_cast<int32_t>(number(model, prefix + "attention.head_count_kv"));
    info.n_head = std::max(heads, 0);
    info.n_head_kv = heads_kv >= 0 ? heads_kv : info.n_head;
    const int64_t even = info.n_head > 0 ? info.n_embd / info.n_head : 0;
    const int64_t key = number(model, prefix + "attention.key_length");
    const int64_t value = number(model, prefix + "attention.value_length");
    info.n_embd_k_gqa = static_cast<int32_t>((key >= 0 ? key : even) * info.n_head_kv);
    info.n_embd_v_gqa = static_cast<int32_t>((value >= 0 ? value : even) * info.n_head_kv);
    info.n_params = llama_model_n_params(model);
    info.n_bytes = llama_model_size(model);
    info.is_recurrent = recurrent(model) ? 1 : 0;
    info.n_cls_out = static_cast<int32_t>(ask_outputs(model, 0));
    info.n_embd_out = ask_embedding(model, info.n_embd, 0);
}

} // namespace plk::fields
