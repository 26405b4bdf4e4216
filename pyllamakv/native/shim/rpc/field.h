// Clients name their servers in the model parameters (through 0.3.6), so no device is registered.
#pragma once

#include "rpc/endpoints.h"

bool plk::rpc::add(const char *endpoints, std::vector<void *> &) {
    return each(endpoints, [](const char *) { return true; });
}
