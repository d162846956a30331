// A caching allocator for pinned host memory that does not hand out blocks which a copy still uses.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <map>
#include <mutex>
#include <vector>

#include "launch.h"
#include "runtime.h"

namespace sim {

struct PinnedBlock : MemoryBlock {
  std::vector<EventPtr> copies; // the ends of the copies from and to it
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  static PinnedAllocator& get();

  at::DataPtr allocate(size_t bytes) override;
  at::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* destination, const void* source, size_t bytes) const override;
  bool record_event(void* pointer, void* context, c10::Stream stream) override;
  void empty_cache() override;
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override;
  void reset_peak_stats() override;

  // The block that contains this address, at its start or inside; null for memory that is not pinned.
  PinnedBlock* find(const void* address);
  // The block that contains these addresses, for a replay: raises if they were given back.
  PinnedBlock& mapped(const void* begin, size_t bytes);
  void copy_submitted(PinnedBlock& block, int stream);
  int64_t handed_out();

 private:
  static void free(void* begin);
  void release(char* begin);

  std::mutex mutex_;
  std::map<char*, PinnedBlock> blocks_;
  std::multimap<size_t, PinnedBlock*> cached_;
  at::HostStats stats_;
  int64_t handed_out_ = 0;
};

} // namespace sim
