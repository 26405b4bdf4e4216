// List the devices of this build, and serve one of them over RPC.
#include "groups.h"

extern "C" {

int32_t plk_device_count(void) {
    return plk::guarded([&]() -> int {
        plk::start();
        return plk::devices::count();
    });
}

int plk_device_read(int32_t index, plk_device *out) {
    return plk::guarded([&]() -> int {
        plk::start();
        plk_device device{};
        if (index < 0 || index >= plk::devices::count() || !plk::devices::read(index, device)) {
            return plk::refuse(PLK_EINVAL, "there is no device %d", index);
        }
        device.size = sizeof(device);
        return plk::give(device, out, "plk_device");
    });
}

int plk_rpc_serve(const char *endpoint, const char *device, uint64_t memory) {
    return plk::guarded([&]() -> int {
        if (endpoint == nullptr) {
            return plk::refuse(PLK_EINVAL, "the endpoint is NULL: expected host:port");
        }
        plk::start();
        return plk::rpc::serve(endpoint, device != nullptr ? device : "", memory);
    });
}

} // extern "C"
