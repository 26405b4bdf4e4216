// Endpoints of RPC servers. llama.cpp asserts if no server answers, so each is tested first.
#pragma once

#include "groups.h"

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
