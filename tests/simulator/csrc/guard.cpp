// What torch asks of a device type: current device and streams, events, and a few questions about pointers.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "captures.h"
#include "device_allocator.h"
#include "device_type.h"
#include "pinned_allocator.h"
#include "runtime.h"

namespace sim {

namespace {

c10::Device make_device(int index) { return {kDeviceType, static_cast<c10::DeviceIndex>(index)}; }
c10::Stream make_stream(int id) { return c10::Stream(c10::Stream::UNSAFE, make_device(device_of(id)), id); }
int id_of(const c10::Stream& stream) { return static_cast<int>(stream.id()); }
int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

// torch keeps an opaque pointer for each event: to our handle on its last recording.
EventPtr& event_at(void* handle) { return *static_cast<EventPtr*>(handle); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return make_device(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < kDevices) set_current_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return make_stream(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return make_stream(default_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    return make_stream(new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return make_stream(exchange_stream(id_of(stream))); }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }

  bool queryStream(const c10::Stream& stream) const override { return host_query_stream(id_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(id_of(stream)); }
  bool isStreamCapturing(const c10::Stream& stream) const override { return capture_on(id_of(stream)) != nullptr; }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }

  void record(void** handle, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*handle) *handle = new EventPtr;
    event_at(*handle) = record_event(id_of(stream));
  }
  void destroyEvent(void* handle, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(handle);
  }
  // An event that was never recorded has nothing to wait for.
  void block(void* handle, const c10::Stream& stream) const override {
    if (handle) stream_waits(id_of(stream), event_at(handle));
  }
  bool queryEvent(void* handle) const override { return !handle || host_query(event_at(handle)); }
  void synchronizeEvent(void* handle) const override {
    if (handle) host_waits(event_at(handle));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "sim: elapsed_time needs two recorded events");
    Event &start = *event_at(first), &end = *event_at(second);
    constexpr double ms_per_ns = 1e-6;
    if (start.virtual_time && end.virtual_time) return (end.simulated_end - start.simulated_end) * ms_per_ns;
    TORCH_CHECK(start.reached() && end.reached(), "sim: elapsed_time needs two events that were reached");
    return (end.real_end() - start.real_end()) * ms_per_ns;
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    DeviceAllocator::get().recordStream(pointer, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &PinnedAllocator::get(); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::get().find(pointer) != nullptr; }
  at::Device getDeviceFromPtr(void* pointer) const override {
    const DeviceBlock* block = DeviceAllocator::get().find(pointer);
    return make_device(block ? device_of(block->stream) : 0);
  }
};

const bool registered = [] {
  c10::SetAllocator(kDeviceType, &DeviceAllocator::get());
  at::setHostAllocator(kDeviceType, &PinnedAllocator::get());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace sim
