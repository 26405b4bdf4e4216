// start_rpc_server, from before the device registry (0.2.90).
#include "rpc/field.h"

#include "ggml-backend.h"
#include "ggml-rpc.h"

int plk::rpc::serve(const char *endpoint, const char *device, uint64_t memory) {
    if (*device && strcmp(device, "CPU") != 0) {
        return plk::refuse(PLK_EUNSUPPORTED, "this release can serve its CPU only");
    }
    const Backend backend(ggml_backend_cpu_init(), ggml_backend_free);
    ggml_backend_cpu_set_n_threads(backend.get(), n_threads());
    const size_t total = memory > 0 ? memory : size_t(1) << 34;
    start_rpc_server(backend.get(), endpoint, total, total);
    return plk::refuse(PLK_EEXCEPTION, "the server could not listen");
}
