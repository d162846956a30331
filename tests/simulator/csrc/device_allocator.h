// A caching allocator for both devices, as strict as a real one may be.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "launch.h"
#include "runtime.h"

namespace sim {

struct DeviceBlock : MemoryBlock {
  int stream;                       // the stream it was allocated on, and returns to
  size_t requested = 0;             // bytes asked for by its present owner; 0: it has none
  int64_t graph = 0;                // the id of the capture it was allocated in, while that graph lives
  std::set<int> other_streams;      // named by record_stream since it was handed out
  std::vector<EventPtr> unfinished; // after it was freed: the ends of their work
};

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  static DeviceAllocator& get();

  at::DataPtr allocate(size_t bytes) override; // on the current stream of the current device
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* destination, const void* source, size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override;
  void recordStream(const at::DataPtr& pointer, c10::Stream stream) override;

  using DeviceStats = c10::CachingDeviceAllocator::DeviceStats;
  DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

  // The block that contains this address, at its start or inside; null for memory that is not a device's.
  DeviceBlock* find(const void* address);
  // The block that contains these addresses, for a replay: raises if they were given back.
  DeviceBlock& mapped(const void* begin, size_t bytes);
  // The graph is gone: what was freed of its memory can be reused, the rest is ordinary memory.
  void release_graph(int64_t id);

 private:
  static void free(void* begin);
  void release(char* begin);
  void return_finished_blocks();
  DeviceBlock* take_cached(int stream, size_t bytes);
  DeviceBlock* map_new(int stream, size_t bytes);
  DeviceStats& stats_of(const DeviceBlock& block) { return stats_[device_of(block.stream)]; }
  void make_reusable(DeviceBlock& block);

  std::recursive_mutex mutex_;
  std::map<char*, DeviceBlock> blocks_;
  std::map<int, std::multimap<size_t, DeviceBlock*>> cached_; // stream -> size -> free blocks, oldest first
  std::vector<DeviceBlock*> waiting_;                         // freed, still in use by other streams
  std::array<DeviceStats, kDevices> stats_;
};

} // namespace sim
