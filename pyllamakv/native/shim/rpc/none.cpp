// Builds without RPC, or with an unknown interface to RPC.
#include "groups.h"

bool plk::rpc::add(const char *, std::vector<void *> &) {
    plk::refuse(PLK_EUNSUPPORTED, "this build cannot use RPC servers");
    return false;
}

int plk::rpc::serve(const char *, const char *, uint64_t) {
    return plk::refuse(PLK_EUNSUPPORTED, "this build cannot serve over RPC");
}
