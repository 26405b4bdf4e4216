// A server of one backend from the registry; clients use a field (0.3.2 through 0.3.6).
#include "rpc/field.h"
#include "rpc/serve.h"

static_assert(sizeof(llama_model_params::rpc_servers) > 0, "the field");

int plk::rpc::serve(const char *endpoint, const char *device, uint64_t memory) {
    const auto start = [&](ggml_backend_t backend, size_t available, size_t total) {
        ggml_backend_rpc_start_server(backend, endpoint, available, total);
    };
    return serve_backend(device, memory, start);
}
