// Endpoints of RPC servers. llama.cpp asserts when nobody answers, so somebody is looked for first.
#pragma once

#include "groups.h"

#include <cstdlib>
#include <netdb.h>
#include <set>
#include <sys/socket.h>
#include <sys/time.h>
#include <thread>
#include <unistd.h>

namespace plk::rpc {

// How many threads a server computes with: PLK_RPC_THREADS, or one per processor. They wait for
// each other in loops: two servers of two threads each on two processors hold each other up.
inline int n_threads() {
    const char *named = getenv("PLK_RPC_THREADS");
    const int asked = named != nullptr ? atoi(named) : 0;
    return asked > 0 ? asked : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

inline bool answers(const std::string &endpoint) {
    // A server takes one client and keeps few others waiting: one that this process uses already
    // must not be asked again and again.
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
    hints.ai_family = AF_INET; // llama.cpp's own client speaks no other
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

// Call `use` for each of the endpoints, after each has answered.
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
