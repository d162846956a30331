// The ways to run work on a stream, the copy engines, and the kernels that tests queue.
#pragma once

#include <functional>
#include <vector>

#include "clocks.h"
#include "race_detector.h"

namespace sim {

// What launch() needs to know about memory, of a device or pinned.
struct MemoryBlock {
  char* begin;
  size_t bytes;
  AccessHistory history;
};

enum class Engine { Compute, HostToDevice, DeviceToHost };

struct Work {
  int stream;
  const char* name; // a literal or an operator's name
  bool traced = true;
  Engine engine = Engine::Compute;
  size_t bytes = 0;         // of a copy; its duration follows from the settings
  Nanoseconds duration = 0; // of a kernel
  std::vector<MemoryBlock*> reads, writes;
  std::function<void()> body;
};

// Queues the work behind what the stream has, checks its accesses, and returns its tick on the stream.
int64_t submit(Work work);
// The same, or records the work where the stream is capturing.
void launch(Work work);

// The length of an ordinary kernel, as set.
Nanoseconds kernel_duration();

void hold_engine(Engine engine);
void release_engine(Engine engine);
// A kernel on the current stream that ends at the next release_kernels().
void launch_held_kernel();
void release_kernels();
bool anything_held();

} // namespace sim
