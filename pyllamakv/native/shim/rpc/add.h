// Add each server as one device (0.3.5 through 0.3.16).
#pragma once

#include "rpc/serve.h"

#include <map>

bool plk::rpc::add(const char *endpoints, std::vector<void *> &list) {
    // A second registration of the same server would list its device twice.
    static std::map<std::string, ggml_backend_dev_t> known;
    return each(endpoints, [&](const char *endpoint) {
        ggml_backend_dev_t &device = known[endpoint];
        if (device == nullptr) {
            device = ggml_backend_rpc_add_device(endpoint);
            if (device == nullptr) {
                plk::refuse(PLK_EMODEL, "%s is no RPC server of this release", endpoint);
                return false;
            }
            ggml_backend_device_register(device);
        }
        list.push_back(device);
        return true;
    });
}
