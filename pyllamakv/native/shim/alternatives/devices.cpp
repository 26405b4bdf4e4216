// Devices.
// CMake defines PLK_USE_NAME of one section: see cmake/probes.cmake.
#include "groups.h"

#ifdef PLK_USE_registry
// Devices from ggml's registry (0.3.2 and later).

#include "ggml-backend.h"

#include <cstdio>

namespace {
int32_t kind_of(ggml_backend_dev_t device) {
    switch (ggml_backend_dev_type(device)) {
    case GGML_BACKEND_DEVICE_TYPE_CPU: return 0;
    case GGML_BACKEND_DEVICE_TYPE_ACCEL: return 2;
    default: return 1;
    }
}
} // namespace

int32_t plk::devices::count() { return static_cast<int32_t>(ggml_backend_dev_count()); }

bool plk::devices::read(int32_t index, plk_device &out) {
    ggml_backend_dev_t device = ggml_backend_dev_get(static_cast<size_t>(index));
    size_t available = 0, total = 0;
    ggml_backend_dev_memory(device, &available, &total);
    out.kind = kind_of(device);
    out.memory_free = available;
    out.memory_total = total;
    snprintf(out.name, sizeof(out.name), "%s", ggml_backend_dev_name(device));
    snprintf(out.description, sizeof(out.description), "%s",
             ggml_backend_dev_description(device));
    return true;
}

bool plk::devices::select(const char *names, std::vector<void *> &list) {
    const std::string all = names;
    for (size_t start = 0; start <= all.size();) {
        const size_t end = std::min(all.find(',', start), all.size());
        const std::string name = all.substr(start, end - start);
        start = end + 1;
        ggml_backend_dev_t found = nullptr;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            if (name == ggml_backend_dev_name(ggml_backend_dev_get(i))) {
                found = ggml_backend_dev_get(i);
            }
        }
        if (found == nullptr) {
            plk::refuse(PLK_EINVAL, "there is no device '%s'", name.c_str());
            return false;
        }
        // llama.cpp always uses the CPU, and asserts if it is listed as a device to offload to.
        if (kind_of(found) != 0) {
            list.push_back(found);
        }
    }
    return true;
}

#elif defined(PLK_USE_none)
// Releases without a device registry (through 0.3.1).

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

#endif
