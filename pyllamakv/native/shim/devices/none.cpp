// Releases without a device registry (through 0.3.1).
#include "groups.h"

#include <cstdio>

int32_t plk::devices::count() { return 1; }

bool plk::devices::read(int32_t, plk_device &out) {
    out.kind = 0;
    snprintf(out.name, sizeof(out.name), "CPU");
    return true;
}

bool plk::devices::select(const char *names, std::vector<void *> &) {
    if (std::string(names) == "CPU") {
        return true;
    }
    plk::refuse(PLK_EUNSUPPORTED, "this release cannot be told which devices to use");
    return false;
}
