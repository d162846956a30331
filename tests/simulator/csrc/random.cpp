#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <array>
#include <mutex>

#include "clocks.h"

namespace sim {

static std::array<at::Generator, kDevices>& generators() {
  static auto* generators = new auto([] {
    std::array<at::Generator, kDevices> made;
    for (at::Generator& generator : made) generator = at::make_generator<at::CPUGeneratorImpl>();
    return made;
  }());
  return *generators;
}

const at::Generator& device_generator(int device) { return generators()[device]; }

void seed_devices(uint64_t seed) {
  for (at::Generator& generator : generators()) {
    std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

// torch's kernel takes no generator, so it would draw from the host's, and at some later time.
static std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const bool active = train.value_or(true);
  const double keep = active ? 1 - p : 1;
  const at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep);
  const double scale = keep > 0 ? 1 / keep : 0;
  return {input.mul(mask).mul_(scale), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) { library.impl("native_dropout", native_dropout); }

} // namespace sim
