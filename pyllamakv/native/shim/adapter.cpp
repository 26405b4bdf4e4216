// LoRA adapters: loading, and the adapters of a context.
#include "groups.h"

#include <cmath>

namespace {
// Nodes of a graph per pair of tensors: two tensors, two products, a scale and a sum.
constexpr size_t nodes_per_pair = 6;

// Return the adapters of a context in the form that `plk::adapters::set` takes.
std::vector<void *> loras_of(const std::vector<plk_adapter *> &adapters) {
    std::vector<void *> found;
    for (const plk_adapter *each : adapters) {
        found.push_back(each->lora);
    }
    return found;
}

// Refuse adapters for which a graph has no room: llama.cpp would assert in a later decode.
int check_nodes(plk_context &context, const std::vector<plk_adapter *> &adapters) {
    const size_t most = plk::adapters::max_nodes(context.ctx);
    // The number comes from the log, whose format a fork may change.
    const bool plausible = context.graph_nodes >= context.model->info.n_layer &&
                           static_cast<size_t>(context.graph_nodes) <= most;
    size_t needed = plausible ? context.graph_nodes : most / 2;
    for (const plk_adapter *each : adapters) {
        needed += nodes_per_pair * each->n_pairs;
    }
    if (most == 0 || needed <= most) {
        return PLK_OK;
    }
    return plk::refuse(PLK_EUNSUPPORTED,
                       "a graph with these adapters can have %zu nodes, in this release at most %zu: "
                       "use fewer adapters, or 0.3.17 or later",
                       needed, most);
}
} // namespace

plk_adapter::~plk_adapter() {
    if (lora != nullptr) {
        plk::adapters::close(lora);
    }
    plk::release(model);
}

void plk::release(plk_adapter *adapter) {
    if (adapter != nullptr && adapter->users.fetch_sub(1) == 1) {
        delete adapter;
    }
}

extern "C" {

int plk_adapter_load(plk_model *model, const char *path, int32_t n_pairs, plk_adapter **out) {
    return plk::guarded([&]() -> int {
        if (model == nullptr || path == nullptr || out == nullptr || n_pairs < 0) {
            return plk::refuse(PLK_EINVAL, "model, path or out is NULL, or n_pairs is negative");
        }
        *out = nullptr;
        if (!plk::adapters::bits) {
            return plk::refuse(PLK_EUNSUPPORTED, "this build has no LoRA adapters");
        }
        if (model->info.n_layer == 0 || model->info.n_params == 0) {
            return plk::refuse(PLK_EADAPTER, "the model was loaded without weights (vocab_only)");
        }
        auto handle = std::make_unique<plk_adapter>();
        plk::forget_logged();
        handle->lora = plk::adapters::open(model->model, path);
        if (handle->lora == nullptr) {
            return plk::refuse(PLK_EADAPTER, "llama.cpp cannot load %s: %s", path, plk::logged());
        }
        handle->n_pairs = n_pairs;
        handle->model = model;
        model->users.fetch_add(1);
        *out = handle.release();
        return PLK_OK;
    });
}

void plk_adapter_free(plk_adapter *adapter) {
    plk::guarded([&] {
        plk::release(adapter);
        return PLK_OK;
    });
}

int plk_adapters_set(plk_context *context, int32_t n, plk_adapter *const *adapters,
                     const float *scales) {
    return plk::guarded([&]() -> int {
        if (const int wrong = plk::need(context)) {
            return wrong;
        }
        if (n < 0 || (n > 0 && (adapters == nullptr || scales == nullptr))) {
            return plk::refuse(PLK_EINVAL, "n is %d, or adapters or scales is NULL", n);
        }
        if (!plk::adapters::bits) {
            return plk::refuse(PLK_EUNSUPPORTED, "this build has no LoRA adapters");
        }
        std::vector<plk_adapter *> chosen(adapters, adapters + n);
        std::vector<float> factors(scales, scales + n);
        for (int32_t i = 0; i < n; ++i) {
            if (chosen[i] == nullptr || chosen[i]->model != context->model) {
                return plk::refuse(PLK_EINVAL, "adapter %d is NULL or of another model", i);
            }
            if (std::count(chosen.begin(), chosen.end(), chosen[i]) != 1 ||
                !std::isfinite(factors[i])) {
                return plk::refuse(PLK_EINVAL, "adapter %d is named twice, or its scale is not finite",
                                   i);
            }
        }
        if (const int wrong = check_nodes(*context, chosen)) {
            return wrong;
        }
        const std::vector<void *> wanted = loras_of(chosen);
        const std::vector<void *> former = loras_of(context->adapters);
        plk::forget_logged();
        const int code = plk::guarded([&] {
            return plk::adapters::set(context->ctx, wanted, factors)
                ? PLK_OK
                : plk::refuse(PLK_EUNSUPPORTED, "llama.cpp refuses the adapters: %s", plk::logged());
        });
        if (code != PLK_OK) {
            plk::adapters::set(context->ctx, former, context->scales);
            return code;
        }
        for (plk_adapter *each : chosen) {
            each->users.fetch_add(1);
        }
        chosen.swap(context->adapters);
        factors.swap(context->scales);
        for (plk_adapter *each : chosen) {
            plk::release(each);
        }
        return PLK_OK;
    });
}

} // extern "C"
