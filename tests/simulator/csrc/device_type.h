// The device type torch keeps free for others; Python calls it "sim".
#pragma once

#include <c10/core/DeviceType.h>

namespace sim {

constexpr c10::DeviceType kDeviceType = c10::DeviceType::PrivateUse1;

} // namespace sim
