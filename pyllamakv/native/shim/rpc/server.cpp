// A server of several devices, which a client adds in one call (b6845, 0.3.17 and later).
#include "rpc/endpoints.h"

#include "ggml-backend.h"
#include "ggml-rpc.h"

bool plk::rpc::add(const char *endpoints, std::vector<void *> &list) {
    return each(endpoints, [&](const char *endpoint) {
        ggml_backend_reg_t server = ggml_backend_rpc_add_server(endpoint);
        if (server == nullptr) {
            plk::refuse(PLK_EMODEL, "%s is no RPC server of this release", endpoint);
            return false;
        }
        ggml_backend_register(server);
        for (size_t i = 0; i < ggml_backend_reg_dev_count(server); ++i) {
            list.push_back(ggml_backend_reg_dev_get(server, i));
        }
        return true;
    });
}

int plk::rpc::serve(const char *endpoint, const char *device, uint64_t) {
    ggml_backend_dev_t found = nullptr;
    for (size_t i = 0; i < ggml_backend_dev_count() && found == nullptr; ++i) {
        ggml_backend_dev_t candidate = ggml_backend_dev_get(i);
        const bool cpu = ggml_backend_dev_type(candidate) == GGML_BACKEND_DEVICE_TYPE_CPU;
        if (*device ? strcmp(device, ggml_backend_dev_name(candidate)) == 0 : cpu) {
            found = candidate;
        }
    }
    if (found == nullptr) {
        return plk::refuse(PLK_EINVAL, "there is no device '%s' to serve", device);
    }
    ggml_backend_rpc_start_server(endpoint, nullptr, static_cast<size_t>(n_threads()), 1, &found);
    return plk::refuse(PLK_EEXCEPTION, "the server could not listen");
}
