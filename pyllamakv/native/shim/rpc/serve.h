// Serve a backend, for releases whose server takes one backend and its memory sizes.
#pragma once

#include "rpc/endpoints.h"

#include "ggml-backend.h"
#include "ggml-rpc.h"

namespace plk::rpc {

// Set the number of threads. The default of four takes a second for a small graph on fewer cores.
inline void set_threads(ggml_backend_dev_t device, ggml_backend_t backend) {
    using Setter = void (*)(ggml_backend_t, int);
    const auto set = reinterpret_cast<Setter>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads"));
    if (backend != nullptr && set != nullptr) {
        set(backend, n_threads());
    }
}

// Serve the named device, or the CPU if the name is empty. `memory`: bytes to offer; 0: as the
// device reports. `start` blocks; it returns only if the server cannot listen.
template <typename Start> int serve_backend(const char *device, uint64_t memory, Start start) {
    ggml_backend_t backend = nullptr;
    size_t available = 0, total = 0;
    for (size_t i = 0; i < ggml_backend_dev_count() && backend == nullptr; ++i) {
        ggml_backend_dev_t candidate = ggml_backend_dev_get(i);
        const bool cpu = ggml_backend_dev_type(candidate) == GGML_BACKEND_DEVICE_TYPE_CPU;
        if (*device ? strcmp(device, ggml_backend_dev_name(candidate)) == 0 : cpu) {
            ggml_backend_dev_memory(candidate, &available, &total);
            backend = ggml_backend_dev_init(candidate, nullptr);
            set_threads(candidate, backend);
        }
    }
    if (backend == nullptr) {
        return plk::refuse(PLK_EINVAL, "there is no device '%s' to serve", device);
    }
    if (memory > 0 || total == 0) {
        // Some releases report no memory for the CPU, but a client requires a number.
        available = total = memory > 0 ? memory : size_t(1) << 34;
    }
    const Backend owned(backend, ggml_backend_free);
    start(backend, available, total);
    return plk::refuse(PLK_EEXCEPTION, "the server could not listen");
}

} // namespace plk::rpc
