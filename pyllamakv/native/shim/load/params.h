// Model parameters, shared by the candidates of this group.
#pragma once

#include "fields.h"
#include "groups.h"

#include <stdexcept>

namespace plk::load {

// Holds the device list that the parameters point to: llama.cpp copies it during the load.
struct Params {
    llama_model_params params = llama_model_default_params();
    std::vector<void *> devices;
};

inline void fill(Params &out, const plk_model_params &asked) {
    llama_model_params &params = out.params;
    params.n_gpu_layers = asked.n_gpu_layers;
    params.vocab_only = asked.vocab_only != 0;
    params.check_tensors = asked.check_tensors != 0;
    PLK_SET(use_mmap, params, asked.use_mmap != 0);
    PLK_SET(use_mlock, params, asked.use_mlock != 0);
    // In some releases one field replaces both: 0 reads the file, 1 maps it, and adding 2 locks it.
    PLK_SET(load_mode, params, (asked.use_mmap ? 1 : 0) + (asked.use_mlock ? 2 : 0));
    const bool remote = asked.rpc_servers != nullptr && *asked.rpc_servers != '\0';
    const bool named = asked.devices != nullptr && *asked.devices != '\0';
    bool good = true;
    if (remote) {
        good = plk::rpc::add(asked.rpc_servers, out.devices);
        PLK_SET(rpc_servers, params, asked.rpc_servers); // releases whose servers are not devices
    }
    if (good && named) {
        good = plk::devices::select(asked.devices, out.devices);
    }
    if (good && (named || (remote && !out.devices.empty()))) {
        if (!PLK_HAS(devices, llama_model_params)) {
            throw std::runtime_error("this release cannot be told which devices to use");
        }
        out.devices.push_back(nullptr);
        PLK_SET(devices, params, out.devices.data());
    }
    if (!good) {
        throw std::runtime_error(plk_last_error());
    }
}

} // namespace plk::load
