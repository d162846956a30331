// Copies: which engine runs them, when they block the host, and when they go through a temporary. As in CUDA.
#include <ATen/ops/_neg_view.h>
#include <ATen/ops/conj_physical.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/neg.h>
#include <torch/library.h>

#include <cstring>

#include "captures.h"
#include "pinned_allocator.h"
#include "settings.h"
#include "tensors.h"

namespace sim {

using at::Tensor;

namespace {

// A device knows no lazy conjugation: make it real.
Tensor resolve_lazy_bits(Tensor tensor) {
  if (tensor.is_conj()) tensor = at::conj_physical(tensor.conj());
  if (tensor.is_neg()) tensor = at::neg(at::_neg_view(tensor));
  return tensor;
}

// The same elements in the same order without holes, so that one memcpy does it.
bool same_dense_layout(const Tensor& a, const Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.is_conj() != b.is_conj() || a.is_neg() != b.is_neg()) return false;
  if (!a.is_non_overlapping_and_dense() || !b.is_non_overlapping_and_dense()) return false;
  for (int64_t d = 0; d < a.dim(); d++)
    if (a.size(d) != 1 && a.stride(d) != b.stride(d)) return false;
  return true;
}

void copy_on_device(const Tensor& source_as_given, const Tensor& destination) {
  TORCH_CHECK(source_as_given.device() == destination.device(), "sim: there are no copies between devices");
  TORCH_CHECK(!destination.is_conj() && !destination.is_neg(), "sim: cannot copy into a lazily conjugated tensor");
  const Tensor source = resolve_lazy_bits(source_as_given);
  Work work{.stream = current_stream(), .name = "copy_d2d", .duration = kernel_duration()};
  if (DeviceBlock* block = block_of(source)) work.reads.push_back(block);
  if (DeviceBlock* block = block_of(destination)) work.writes.push_back(block);
  work.body = [to = bytes_as_host_tensor(destination), from = bytes_as_host_tensor(source)] { to.copy_(from); };
  launch(std::move(work));
}

// Brings what is known about these bytes of pinned memory up to date before a copy from or to them is submitted.
// Returns whether the device may still be writing them, so that they can change without the host's doing.
bool prepare_pinned(const PinnedBlock& block, const void* begin, size_t bytes, bool is_written) {
  Runtime& runtime = Runtime::get();
  const char* const first = static_cast<const char*>(begin);
  std::lock_guard lock(runtime.mutex);
  runtime.landings.device_uses(first, bytes);
  if (is_written) runtime.pinned_watch.device_writes(first, bytes, runtime.races);
  return block.history.has_write_beyond(runtime.host_clock);
}

// Between host and device, dense, and by address: a graph does it again.
struct Transfer {
  bool to_device;
  const char* from;
  char* to;
  size_t bytes;

  const char* host_side() const { return to_device ? from : to; }
  const char* device_side() const { return to_device ? to : from; }
};

// Returns its tick on the stream. A landing is where a copy to pinned memory goes in the meantime.
int64_t submit(const Transfer& transfer, int stream, PinnedBlock* pinned, char* landing = nullptr) {
  const auto [to_device, from, to, bytes] = transfer;
  Work work{.stream = stream,
            .name = to_device ? "copy_h2d" : "copy_d2h",
            .engine = to_device ? Engine::HostToDevice : Engine::DeviceToHost,
            .bytes = bytes,
            .body = [to = landing ? landing : to, from, bytes] { std::memcpy(to, from, bytes); }};
  auto& device_side = to_device ? work.writes : work.reads;
  auto& host_side = to_device ? work.reads : work.writes;
  if (DeviceBlock* block = DeviceAllocator::get().find(transfer.device_side())) device_side.push_back(block);
  if (pinned) host_side.push_back(pinned);
  return submit(std::move(work));
}

void submit_blocking(const Transfer& transfer, int stream, PinnedBlock* pinned) {
  check_host_uses_stream(stream, "a copy that blocks the host");
  if (pinned) prepare_pinned(*pinned, transfer.host_side(), transfer.bytes, !transfer.to_device);
  submit(transfer, stream, pinned);
  finish_stream(stream);
}

void submit_asynchronous(const Transfer& transfer, int stream, PinnedBlock& pinned) {
  const auto [to_device, from, to, bytes] = transfer;
  const bool unsettled = prepare_pinned(pinned, transfer.host_side(), bytes, !to_device);
  std::unique_ptr<char[]> snapshot, landing;
  if (to_device && settings.race && !unsettled) snapshot = PinnedWatch::snapshot(from, bytes);
  if (!to_device && settings.virtual_time) landing.reset(new char[bytes]);
  const int64_t tick = submit(transfer, stream, &pinned, landing.get());

  PinnedAllocator::get().copy_submitted(pinned, stream);
  Runtime& runtime = Runtime::get();
  if (snapshot) {
    std::lock_guard lock(runtime.mutex);
    runtime.pinned_watch.add(stream, tick, from, bytes, std::move(snapshot), runtime.host_clock, runtime.races);
  } else if (landing) {
    std::lock_guard lock(runtime.mutex);
    runtime.landings.add(stream, tick, to, bytes, std::move(landing));
    runtime.landings.host_learns(runtime.host_clock); // another thread may have waited for it by now
  }
}

void launch_asynchronous(const Transfer& transfer, int stream, PinnedBlock& pinned) {
  const CapturePtr capture = capture_on(stream);
  if (!capture) {
    submit_asynchronous(transfer, stream, pinned);
    return;
  }
  capture->record_launch(stream, [transfer](int stream) {
    DeviceAllocator::get().mapped(transfer.device_side(), transfer.bytes);
    PinnedBlock& pinned_now = PinnedAllocator::get().mapped(transfer.host_side(), transfer.bytes);
    launch_asynchronous(transfer, stream, pinned_now);
  });
}

// One transfer. It is asynchronous exactly if asked for and if the host side is pinned.
void transfer(const Tensor& source, const Tensor& destination, bool non_blocking) {
  const Transfer transfer{.to_device = on_device(destination),
                          .from = static_cast<const char*>(source.const_data_ptr()),
                          .to = static_cast<char*>(destination.mutable_data_ptr()),
                          .bytes = source.nbytes()};
  PinnedBlock* const pinned = PinnedAllocator::get().find(transfer.host_side());
  if (non_blocking && pinned)
    launch_asynchronous(transfer, current_stream(), *pinned);
  else
    submit_blocking(transfer, current_stream(), pinned);
}

// Other dtype, other strides or holes: through contiguous temporaries. With non_blocking the dtype changes on the
// device, else on the host. A temporary on the host is pageable, so that copy blocks, whatever was asked for.
void transfer_through_temporaries(const Tensor& source, const Tensor& destination, bool non_blocking) {
  const bool convert_at_source = on_device(source) == non_blocking;
  const Tensor contiguous_source =
      (convert_at_source ? source.to(destination.scalar_type()) : source).resolve_conj().resolve_neg().contiguous();
  Tensor landing = destination;
  if (!same_dense_layout(contiguous_source, destination))
    landing = at::empty(destination.sizes(), destination.options().dtype(contiguous_source.scalar_type()));
  transfer(contiguous_source, landing, non_blocking);
  if (!landing.is_same(destination)) destination.copy_(landing, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

at::Scalar item(const Tensor& self) {
  const Tensor on_host = at::empty({}, self.options().device(at::kCPU));
  copy_from(self.reshape({}), on_host, false);
  return on_host.item();
}

} // namespace

Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) return destination;
  DeviceScope scope(device_index(on_device(destination) ? destination : source));
  const Tensor expanded = source.sizes() == destination.sizes() ? source : source.expand(destination.sizes());
  if (on_device(source) && on_device(destination))
    copy_on_device(expanded, destination);
  else if (same_dense_layout(expanded, destination))
    transfer(expanded, destination, non_blocking);
  else
    transfer_through_temporaries(expanded, destination, non_blocking);
  return destination;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", item);
}

// Lazy conjugation and negation are resolved above; torch's own way of resolving them ends in this operator again.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

} // namespace sim
