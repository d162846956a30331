// Devices, streams and the two kinds of clock: real or simulated nanoseconds, and vector clocks.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>

namespace sim {

// Stream ids are global: device d owns ids d * kStreamsPerDevice and up; the first of them is its default stream.
constexpr int kDevices = 2;
constexpr int kPoolStreams = 32;
constexpr int kStreamsPerDevice = 1 + kPoolStreams;
constexpr int kStreams = kDevices * kStreamsPerDevice;

constexpr int device_of(int stream) { return stream / kStreamsPerDevice; }
constexpr int default_stream(int device) { return device * kStreamsPerDevice; }

using Nanoseconds = int64_t;

inline Nanoseconds real_now() {
  using namespace std::chrono;
  return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// How much of each stream's work is known to be finished: every piece of work is one tick of its stream. Work x comes
// before work y exactly if the clock with which y starts covers x. That depends on what the program waited for, never
// on how long anything took.
class VectorClock {
 public:
  bool covers(int stream, int64_t tick) const { return ticks_[stream] >= tick; }
  int64_t advance(int stream) { return ++ticks_[stream]; }
  void merge(const VectorClock& other) {
    for (int i = 0; i < kStreams; i++) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }

 private:
  std::array<int64_t, kStreams> ticks_{};
};

} // namespace sim
