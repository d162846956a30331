// What a test can set. Atomics, since worker threads read them while the host changes them.
#pragma once

#include <atomic>
#include <cstdint>

namespace sim {

struct Settings {
  std::atomic<int64_t> latency_us; // every copy between host and device takes this long ...
  std::atomic<int64_t> h2d_mb_s;   // ... plus bytes / bandwidth; 0 = infinite bandwidth
  std::atomic<int64_t> d2h_mb_s;
  std::atomic<int64_t> kernel_us;    // length of every ordinary kernel
  std::atomic<int64_t> poison;       // 0 = off, 1 = memory handed out is filled with 0xFF, 2 = freed memory too
  std::atomic<int64_t> race;         // report unsynchronised accesses
  std::atomic<int64_t> virtual_time; // no threads: work runs at submission, time is simulated
  std::atomic<int64_t> trace;        // keep the span of everything that ran
};

inline Settings settings{20, 0, 0, 0, 1, 1, 0, 1};

} // namespace sim
