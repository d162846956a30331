// Between tensors and the memory under them.
#pragma once

#include <ATen/core/Tensor.h>

#include "device_allocator.h"
#include "device_type.h"

namespace sim {

inline bool on_device(const at::Tensor& tensor) { return tensor.device().type() == kDeviceType; }
inline int device_index(const at::Tensor& tensor) { return on_device(tensor) ? tensor.device().index() : -1; }

// The device memory a kernel touches through this tensor; null where there is none.
DeviceBlock* block_of(const at::Tensor& tensor);

// A CPU tensor over the same bytes. It keeps nothing alive: like a kernel's argument it is only an address, so that a
// kernel which runs after its memory was freed really finds what the next owner put there.
at::Tensor bytes_as_host_tensor(const at::Tensor& tensor);

// Empty memory on the current stream of a device (-1: of the current one).
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype, int device = -1);

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

} // namespace sim
