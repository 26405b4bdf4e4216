// RPC servers: adding and serving.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#if defined(PLK_USE_server) || defined(PLK_USE_cached) || defined(PLK_USE_plain) || defined(PLK_USE_field) || defined(PLK_USE_first)
// Endpoints of RPC servers. llama.cpp asserts if no server answers, so each is tested first.

#include "ggml-backend.h"

#include <cstdlib>
#include <netdb.h>
#include <set>
#include <sys/socket.h>
#include <sys/time.h>
#include <thread>
#include <unistd.h>

namespace plk::rpc {

using Backend = std::unique_ptr<std::remove_pointer_t<ggml_backend_t>, void (*)(ggml_backend_t)>;

// Return the number of compute threads of a server: PLK_RPC_THREADS, or one per processor. Threads
// wait in busy loops: on two processors, two servers of two threads each slow each other down.
inline int n_threads() {
    const char *named = getenv("PLK_RPC_THREADS");
    const int asked = named != nullptr ? atoi(named) : 0;
    return asked > 0 ? asked : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Test once per process whether a server accepts a connection. Set the last error if none does.
inline bool answers(const std::string &endpoint) {
    // A server has one client, and a short queue for others: a server that this process already
    // uses must not be tested repeatedly.
    static std::set<std::string> known;
    if (known.count(endpoint) > 0) {
        return true;
    }
    const size_t colon = endpoint.rfind(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == endpoint.size()) {
        plk::refuse(PLK_EINVAL, "'%s' is no endpoint: expected host:port", endpoint.c_str());
        return false;
    }
    addrinfo hints{}, *found = nullptr;
    hints.ai_family = AF_INET; // llama.cpp's client supports no other family
    hints.ai_socktype = SOCK_STREAM;
    const std::string host = endpoint.substr(0, colon), port = endpoint.substr(colon + 1);
    bool good = false;
    if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) == 0) {
        const int handle = socket(found->ai_family, found->ai_socktype, found->ai_protocol);
        const timeval patience{5, 0};
        setsockopt(handle, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
        good = handle >= 0 && connect(handle, found->ai_addr, found->ai_addrlen) == 0;
        if (handle >= 0) {
            ::close(handle);
        }
        freeaddrinfo(found);
    }
    if (good) {
        known.insert(endpoint);
    } else {
        plk::refuse(PLK_EMODEL, "no RPC server answers at %s", endpoint.c_str());
    }
    return good;
}

// Call `use` for each endpoint after it has answered. Return false at the first failure.
template <typename Use> bool each(const std::string &all, Use use) {
    for (size_t start = 0; start <= all.size();) {
        const size_t end = std::min(all.find(',', start), all.size());
        const std::string endpoint = all.substr(start, end - start);
        start = end + 1;
        if (!answers(endpoint) || !use(endpoint.c_str())) {
            return false;
        }
    }
    return true;
}

} // namespace plk::rpc
#endif

#if defined(PLK_USE_cached) || defined(PLK_USE_plain) || defined(PLK_USE_field)
// Serve a backend, for releases whose server takes one backend and its memory sizes.

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
#endif

#if defined(PLK_USE_cached) || defined(PLK_USE_plain)
// Add each server as one device (0.3.5 through 0.3.16).

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
#endif

#if defined(PLK_USE_field) || defined(PLK_USE_first)
// Clients name their servers in the model parameters (through 0.3.6), so no device is registered.

bool plk::rpc::add(const char *endpoints, std::vector<void *> &) {
    return each(endpoints, [](const char *) { return true; });
}
#endif

#ifdef PLK_USE_server
// A server of several devices, which a client adds in one call (b6845, 0.3.17 and later).

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

#elif defined(PLK_USE_cached)
// A server that can cache tensors in a directory (0.3.9 through 0.3.16).

int plk::rpc::serve(const char *endpoint, const char *device, uint64_t memory) {
    const auto start = [&](ggml_backend_t backend, size_t available, size_t total) {
        ggml_backend_rpc_start_server(backend, endpoint, nullptr, available, total);
    };
    return serve_backend(device, memory, start);
}

#elif defined(PLK_USE_plain)
// A server of one backend (0.3.5 through 0.3.8).

int plk::rpc::serve(const char *endpoint, const char *device, uint64_t memory) {
    const auto start = [&](ggml_backend_t backend, size_t available, size_t total) {
        ggml_backend_rpc_start_server(backend, endpoint, available, total);
    };
    return serve_backend(device, memory, start);
}

#elif defined(PLK_USE_field)
// A server of one backend from the registry; clients use a field (0.3.2 through 0.3.6).

static_assert(sizeof(llama_model_params::rpc_servers) > 0, "the field");

int plk::rpc::serve(const char *endpoint, const char *device, uint64_t memory) {
    const auto start = [&](ggml_backend_t backend, size_t available, size_t total) {
        ggml_backend_rpc_start_server(backend, endpoint, available, total);
    };
    return serve_backend(device, memory, start);
}

#elif defined(PLK_USE_first)
// start_rpc_server, from before the device registry (0.2.90).

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

#elif defined(PLK_USE_none)
// Builds without RPC, or with an unknown interface to RPC.

bool plk::rpc::add(const char *, std::vector<void *> &) {
    plk::refuse(PLK_EUNSUPPORTED, "this build cannot use RPC servers");
    return false;
}

int plk::rpc::serve(const char *, const char *, uint64_t) {
    return plk::refuse(PLK_EUNSUPPORTED, "this build cannot serve over RPC");
}

#endif
