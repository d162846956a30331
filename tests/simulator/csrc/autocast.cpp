// torch.autocast("sim"): matrix products and convolutions in the lower precision, as on other devices.
#include <torch/library.h>

#include "device_type.h"

namespace at::autocast { // of ATen/autocast_mode.h, which takes seconds to compile
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}

namespace sim {

namespace {

at::Tensor cast_for_autocast(const at::Tensor& tensor) {
  const bool eligible = tensor.defined() && tensor.device().type() == kDeviceType && tensor.is_floating_point() &&
                        tensor.scalar_type() != at::kDouble;
  return eligible ? tensor.to(at::autocast::get_autocast_dtype(kDeviceType)) : tensor;
}

void in_lower_precision(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastPrivateUse1);
  const size_t count = op.schema().arguments().size();
  for (auto value = stack->end() - count; value != stack->end(); ++value)
    if (value->isTensor()) *value = cast_for_autocast(value->toTensor());
  op.callBoxed(stack);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name : {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv1d", "conv2d", "conv3d",
                           "conv_transpose2d.input", "scaled_dot_product_attention"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&in_lower_precision>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }

} // namespace sim
