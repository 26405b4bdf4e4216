// A server of one backend (0.3.5 through 0.3.8).
#include "rpc/add.h"

int plk::rpc::serve(const char *endpoint, const char *device, uint64_t memory) {
    const auto start = [&](ggml_backend_t backend, size_t available, size_t total) {
        ggml_backend_rpc_start_server(backend, endpoint, available, total);
    };
    return serve_backend(device, memory, start);
}
