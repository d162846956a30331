// The device's own random numbers: drawing on it does not disturb the host's.
#pragma once

#include <ATen/core/Generator.h>

namespace sim {

const at::Generator& device_generator(int device);
void seed_devices(uint64_t seed);

} // namespace sim
