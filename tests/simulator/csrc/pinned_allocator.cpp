#include "pinned_allocator.h"

#include <cstdlib>
#include <cstring>

#include "block_lookup.h"
#include "captures.h"
#include "settings.h"

namespace sim {

namespace {

constexpr size_t kPage = 4096;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

bool copies_finished(const PinnedBlock& block) {
  for (const EventPtr& event : block.copies)
    if (!is_finished(event)) return false;
  return true;
}

} // namespace

PinnedAllocator& PinnedAllocator::get() {
  static auto* allocator = new PinnedAllocator; // tensors may be freed after static destructors have run
  return *allocator;
}

PinnedBlock* PinnedAllocator::find(const void* address) {
  std::lock_guard lock(mutex_);
  return block_containing(blocks_, address);
}

PinnedBlock& PinnedAllocator::mapped(const void* begin, size_t bytes) {
  PinnedBlock* block = find(begin);
  TORCH_CHECK(block && static_cast<const char*>(begin) + bytes <= block->begin + block->bytes,
              "sim: illegal memory access: a graph uses pinned memory that has been given back since");
  return *block;
}

at::DataPtr PinnedAllocator::allocate(size_t bytes) {
  if (bytes == 0) return {nullptr, nullptr, &free, at::kCPU};
  const size_t rounded = whole_pages(bytes);
  PinnedBlock* block = nullptr;
  std::lock_guard lock(mutex_);
  for (auto it = cached_.lower_bound(rounded); it != cached_.end() && it->first <= 2 * rounded; ++it) {
    if (!copies_finished(*it->second)) continue;
    block = it->second;
    cached_.erase(it);
    block->copies.clear();
    std::lock_guard runtime_lock(Runtime::get().mutex);
    block->history.clear();
    break;
  }
  if (!block) {
    check_unsafe("allocating pinned memory");
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, kPage, rounded) == 0, "sim: out of pinned memory, ", bytes,
                " bytes were asked for");
    char* const begin = static_cast<char*>(memory);
    block = &blocks_.emplace(begin, PinnedBlock{{begin, rounded, {}}, {}}).first->second;
    stats_.allocations.increase(1);
    stats_.allocated_bytes.increase(rounded);
    stats_.num_host_alloc++;
  }
  handed_out_++;
  stats_.active_requests.increase(1);
  stats_.active_bytes.increase(block->bytes);
  if (settings.poison) std::memset(block->begin, 0xFF, block->bytes);
  return {block->begin, block->begin, &free, at::kCPU};
}

void PinnedAllocator::free(void* begin) {
  if (begin) get().release(static_cast<char*>(begin));
}

void PinnedAllocator::release(char* begin) {
  std::lock_guard lock(mutex_);
  PinnedBlock& block = blocks_.at(begin);
  {
    Runtime& runtime = Runtime::get();
    std::lock_guard runtime_lock(runtime.mutex);
    runtime.pinned_watch.block_is_freed(block.begin, block.bytes, runtime.races);
    runtime.landings.block_is_freed(block.begin, block.bytes);
  }
  stats_.active_requests.decrease(1);
  stats_.active_bytes.decrease(block.bytes);
  cached_.emplace(block.bytes, &block);
}

void PinnedAllocator::copy_submitted(PinnedBlock& block, int stream) {
  EventPtr end = end_of_submitted_work(stream);
  std::lock_guard lock(mutex_);
  // Or a long-lived block's list would grow with every copy.
  std::erase_if(block.copies, [](const EventPtr& event) { return is_finished(event); });
  block.copies.push_back(std::move(end));
}

bool PinnedAllocator::record_event(void* pointer, void*, c10::Stream stream) {
  PinnedBlock* block = find(pointer);
  if (block) copy_submitted(*block, static_cast<int>(stream.id()));
  return block != nullptr;
}

void PinnedAllocator::copy_data(void* destination, const void* source, size_t bytes) const {
  std::memcpy(destination, source, bytes);
}

void PinnedAllocator::empty_cache() {
  std::lock_guard lock(mutex_);
  std::erase_if(cached_, [this](const auto& entry) {
    PinnedBlock* block = entry.second;
    if (!copies_finished(*block)) return false;
    stats_.allocations.decrease(1);
    stats_.allocated_bytes.decrease(block->bytes);
    stats_.num_host_free++;
    std::free(block->begin);
    blocks_.erase(block->begin);
    return true;
  });
}

at::HostStats PinnedAllocator::get_stats() {
  std::lock_guard lock(mutex_);
  return stats_;
}

void PinnedAllocator::reset_accumulated_stats() {
  std::lock_guard lock(mutex_);
  for (auto* counter : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes})
    counter->reset_accumulated();
  stats_.num_host_alloc = stats_.num_host_free = 0;
}

void PinnedAllocator::reset_peak_stats() {
  std::lock_guard lock(mutex_);
  for (auto* counter : {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes})
    counter->reset_peak();
}

int64_t PinnedAllocator::handed_out() {
  std::lock_guard lock(mutex_);
  return handed_out_;
}

} // namespace sim
