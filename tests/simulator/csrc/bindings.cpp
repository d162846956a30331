// What tests call, as torch.ops.sim.*.
#include <torch/library.h>

#include <thread>

#include "device_allocator.h"
#include "graphs.h"
#include "pinned_allocator.h"
#include "random.h"
#include "settings.h"

namespace sim {

namespace {

std::atomic<int64_t>& setting(const std::string& name) {
  static const std::map<std::string, std::atomic<int64_t>*> by_name{
      {"latency_us", &settings.latency_us}, {"h2d_mb_s", &settings.h2d_mb_s}, {"d2h_mb_s", &settings.d2h_mb_s},
      {"kernel_us", &settings.kernel_us},   {"poison", &settings.poison},     {"race", &settings.race},
      {"virtual", &settings.virtual_time},  {"trace", &settings.trace},
  };
  const auto found = by_name.find(name);
  TORCH_CHECK_VALUE(found != by_name.end(), "sim: there is no setting ", name);
  return *found->second;
}

void configure(std::string name, int64_t value) {
  std::atomic<int64_t>& target = setting(name);
  if (&target == &settings.virtual_time && value != target) {
    TORCH_CHECK(!anything_held(), "sim: release what is held before changing the mode");
    synchronize_all(); // nothing crosses from one mode into the other
  }
  target = value;
}

Engine engine_named(const std::string& direction) {
  TORCH_CHECK_VALUE(direction == "h2d" || direction == "d2h", "sim: a copy goes \"h2d\" or \"d2h\", not \"", direction,
                    "\"");
  return direction == "h2d" ? Engine::HostToDevice : Engine::DeviceToHost;
}

void busy(int64_t us) {
  launch({.stream = current_stream(), .name = "busy", .duration = us * 1000, .body = [] {}});
}

int64_t host_time_ns() {
  Runtime& runtime = Runtime::get();
  std::lock_guard lock(runtime.mutex);
  return runtime.host_ns;
}

// Real work takes real time too, in threads mode.
void host_busy(int64_t us) {
  {
    Runtime& runtime = Runtime::get();
    std::lock_guard lock(runtime.mutex);
    runtime.host_ns += us * 1000;
  }
  if (!settings.virtual_time) std::this_thread::sleep_for(std::chrono::microseconds(us));
}

std::vector<std::string> take_races() {
  Runtime& runtime = Runtime::get();
  std::lock_guard lock(runtime.mutex);
  runtime.pinned_watch.check_all(runtime.races);
  return runtime.races.take();
}

// An operator cannot return a struct: the names, and for each of them stream, start and end.
std::tuple<std::vector<std::string>, std::vector<int64_t>> take_trace() {
  std::vector<std::string> names;
  std::vector<int64_t> numbers;
  for (const Span& span : Runtime::get().take_spans()) {
    names.push_back(span.name);
    numbers.insert(numbers.end(), {span.stream, span.start, span.end});
  }
  return {names, numbers};
}

void release_all() {
  release_engine(Engine::HostToDevice);
  release_engine(Engine::DeviceToHost);
  release_kernels();
}

// Everything finished, as if nothing had happened; errors and races that nobody asked for are dropped.
void reset() {
  reset_graphs(); // first: nothing can be waited for during a capture
  release_all();
  Runtime& runtime = Runtime::get();
  for (int stream = 0; stream < kStreams; stream++) {
    try {
      synchronize_stream(stream);
    } catch (...) { // an earlier test's
    }
  }
  runtime.take_error();
  runtime.take_spans();
  {
    std::lock_guard lock(runtime.mutex);
    runtime.pinned_watch.clear();
    runtime.races.take();
  }
  DeviceAllocator::get().emptyCache();
  PinnedAllocator::get().empty_cache();
  for (c10::DeviceIndex device = 0; device < kDevices; device++) {
    DeviceAllocator::get().resetAccumulatedStats(device);
    DeviceAllocator::get().resetPeakStats(device);
    exchange_stream(default_stream(device));
  }
  PinnedAllocator::get().reset_accumulated_stats();
  PinnedAllocator::get().reset_peak_stats();
  set_current_device(0);
}

} // namespace

TORCH_LIBRARY(sim, library) {
  library.def("configure(str name, int value) -> ()", configure);
  library.def("setting(str name) -> int", [](std::string name) { return setting(name).load(); });
  library.def("reset() -> ()", reset);
  library.def("busy(int us) -> ()", busy);
  library.def("hold_kernel() -> ()", launch_held_kernel);
  library.def("release_kernels() -> ()", release_kernels);
  library.def("hold_copies(str direction) -> ()", [](std::string direction) { hold_engine(engine_named(direction)); });
  library.def("release_copies(str direction) -> ()",
              [](std::string direction) { release_engine(engine_named(direction)); });
  library.def("release_all() -> ()", release_all);
  library.def("synchronize_all() -> ()", synchronize_all);
  library.def("races() -> str[]", take_races);
  library.def("trace() -> (str[], int[])", take_trace);
  library.def("host_time_ns() -> int", host_time_ns);
  library.def("host_busy(int us) -> ()", host_busy);
  library.def("pinned_allocations() -> int", [] { return PinnedAllocator::get().handed_out(); });
  library.def("pinned_blocks() -> int", [] { return PinnedAllocator::get().get_stats().num_host_alloc; });
  library.def("manual_seed(int seed) -> ()", [](int64_t seed) { seed_devices(static_cast<uint64_t>(seed)); });
}

} // namespace sim
