#include "device_allocator.h"

#include <sys/mman.h>

#include <cstring>

#include "block_lookup.h"
#include "captures.h"
#include "device_type.h"
#include "settings.h"

namespace sim {

namespace {

constexpr size_t kDeviceMemory = size_t{8} << 30; // what memory_info reports; nothing enforces it

size_t round_up(size_t bytes) {
  constexpr size_t small_step = 512, large_step = size_t{2} << 20, large = size_t{1} << 20;
  const size_t step = bytes <= large ? small_step : large_step;
  return (bytes + step - 1) / step * step;
}

// Work of its own on the stream: in stream order this harms no correct program, but whoever still reads the memory
// without having told anyone finds NaN, or -1, and is reported. Never part of a graph.
void poison(DeviceBlock& block, const char* why) {
  char* begin = block.begin;
  const size_t bytes = block.bytes;
  submit({.stream = block.stream, .name = why, .traced = false, .writes = {&block}, .body = [begin, bytes] {
            std::memset(begin, 0xFF, bytes);
          }});
}

} // namespace

DeviceAllocator& DeviceAllocator::get() {
  static auto* allocator = new DeviceAllocator; // tensors may be freed after static destructors have run
  return *allocator;
}

DeviceBlock* DeviceAllocator::find(const void* address) {
  std::lock_guard lock(mutex_);
  return block_containing(blocks_, address);
}

DeviceBlock& DeviceAllocator::mapped(const void* begin, size_t bytes) {
  DeviceBlock* block = find(begin);
  TORCH_CHECK(block && static_cast<const char*>(begin) + bytes <= block->begin + block->bytes,
              "sim: illegal memory access: a graph uses memory that has been given back since");
  return *block;
}

void DeviceAllocator::release_graph(int64_t id) {
  std::lock_guard lock(mutex_);
  for (auto& [begin, block] : blocks_) {
    if (block.graph != id) continue;
    block.graph = 0;
    const bool waits = !block.unfinished.empty();
    if (!block.requested && !waits) cached_[block.stream].emplace(block.bytes, &block);
  }
}

// Unless it stays with a graph.
void DeviceAllocator::make_reusable(DeviceBlock& block) {
  stats_of(block).active_bytes[0].decrease(block.bytes);
  stats_of(block).active[0].decrease(1);
  if (!block.graph) cached_[block.stream].emplace(block.bytes, &block);
}

// A freed block returns to its stream once the work of the streams recorded for it is over. As in CUDA's allocator, no
// one looks during a capture, where an event must not be queried.
void DeviceAllocator::return_finished_blocks() {
  if (anything_captures()) return;
  std::erase_if(waiting_, [this](DeviceBlock* block) {
    for (const EventPtr& event : block->unfinished)
      if (!is_finished(event)) return false;
    {
      std::lock_guard lock(Runtime::get().mutex);
      for (const EventPtr& event : block->unfinished) block->history.forget_finished(event->clock);
    }
    block->unfinished.clear();
    make_reusable(*block);
    return true;
  });
}

DeviceBlock* DeviceAllocator::take_cached(int stream, size_t bytes) {
  auto& free_blocks = cached_[stream];
  auto best = free_blocks.lower_bound(bytes);
  if (best == free_blocks.end() || best->first > std::max<size_t>(2 * bytes, 4096)) return nullptr;
  // Of equal blocks the last freed first: the order that exposes a missing record_stream.
  best = std::prev(free_blocks.upper_bound(best->first));
  DeviceBlock* block = best->second;
  free_blocks.erase(best);
  return block;
}

DeviceBlock* DeviceAllocator::map_new(int stream, size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "sim: out of memory, ", bytes, " bytes were asked for");
  char* const begin = static_cast<char*>(memory);
  DeviceBlock& block = blocks_.emplace(begin, DeviceBlock{{begin, bytes, {}}, stream}).first->second;
  DeviceStats& stats = stats_of(block);
  stats.reserved_bytes[0].increase(bytes);
  stats.segment[0].increase(1);
  stats.num_device_alloc++;
  return &block;
}

at::DataPtr DeviceAllocator::allocate(size_t bytes) {
  const c10::Device device(kDeviceType, static_cast<c10::DeviceIndex>(current_device()));
  if (bytes == 0) return {nullptr, nullptr, &free, device};
  const int stream = current_stream();
  const CapturePtr capture = capture_on(stream);
  const size_t rounded = round_up(bytes);
  DeviceBlock* block;
  {
    std::lock_guard lock(mutex_);
    return_finished_blocks();
    block = capture ? nullptr : take_cached(stream, rounded); // a graph's memory is new, and all its own
    if (!block) {
      if (!capture) check_unsafe("allocating device memory");
      block = map_new(stream, rounded);
    }
    block->requested = bytes;
    block->graph = capture ? capture->id : 0;
    DeviceStats& stats = stats_of(*block);
    stats.allocation[0].increase(1);
    stats.active[0].increase(1);
    stats.requested_bytes[0].increase(bytes);
    stats.allocated_bytes[0].increase(block->bytes);
    stats.active_bytes[0].increase(block->bytes);
  }
  if (settings.poison && capture)
    std::memset(block->begin, 0xFF, block->bytes); // now and never again: replays find what earlier ones left
  else if (settings.poison)
    poison(*block, "hand-out of memory");
  return {block->begin, block->begin, &free, device};
}

void DeviceAllocator::free(void* begin) {
  if (begin) get().release(static_cast<char*>(begin));
}

void DeviceAllocator::release(char* begin) {
  std::lock_guard lock(mutex_);
  DeviceBlock& block = blocks_.at(begin);
  DeviceStats& stats = stats_of(block);
  stats.allocation[0].decrease(1);
  stats.requested_bytes[0].decrease(block.requested);
  stats.allocated_bytes[0].decrease(block.bytes);
  block.requested = 0;
  if (settings.poison == 2 && block.other_streams.empty() && !block.graph) poison(block, "free of memory");
  for (int stream : block.other_streams) block.unfinished.push_back(end_of_submitted_work(stream));
  block.other_streams.clear();
  if (block.unfinished.empty())
    make_reusable(block);
  else
    waiting_.push_back(&block);
}

void DeviceAllocator::copy_data(void* destination, const void* source, size_t bytes) const {
  synchronize_all();
  std::memcpy(destination, source, bytes);
}

void DeviceAllocator::recordStream(const at::DataPtr& pointer, c10::Stream stream) {
  std::lock_guard lock(mutex_);
  DeviceBlock* block = pointer.get() ? find(pointer.get()) : nullptr;
  const int id = static_cast<int>(stream.id());
  if (block && id != block->stream) block->other_streams.insert(id);
}

void DeviceAllocator::emptyCache(c10::MempoolId_t) {
  synchronize_all();
  std::lock_guard lock(mutex_);
  return_finished_blocks();
  for (auto& [stream, free_blocks] : cached_) {
    for (auto& [bytes, block] : free_blocks) {
      DeviceStats& stats = stats_of(*block);
      stats.reserved_bytes[0].decrease(bytes);
      stats.segment[0].decrease(1);
      stats.num_device_free++;
      munmap(block->begin, bytes);
      blocks_.erase(block->begin);
    }
  }
  cached_.clear();
}

DeviceAllocator::DeviceStats DeviceAllocator::getDeviceStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  return stats_.at(device);
}

template <class Action>
static void for_each_counter(DeviceAllocator::DeviceStats& stats, Action action) {
  for (auto* counter : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                        &stats.active_bytes, &stats.requested_bytes})
    action((*counter)[0]);
}

void DeviceAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  DeviceStats& stats = stats_.at(device);
  for_each_counter(stats, [](auto& counter) { counter.reset_accumulated(); });
  stats.num_device_alloc = stats.num_device_free = 0;
}

void DeviceAllocator::resetPeakStats(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  for_each_counter(stats_.at(device), [](auto& counter) { counter.reset_peak(); });
}

std::pair<size_t, size_t> DeviceAllocator::getMemoryInfo(c10::DeviceIndex device) {
  std::lock_guard lock(mutex_);
  const auto reserved = static_cast<size_t>(stats_.at(device).reserved_bytes[0].current);
  return {kDeviceMemory - std::min(reserved, kDeviceMemory), kDeviceMemory};
}

} // namespace sim
