#include "launch.h"

#include <c10/util/Exception.h>

#include <map>
#include <mutex>
#include <thread>

#include "captures.h"
#include "device_allocator.h"
#include "gate.h"
#include "runtime.h"
#include "settings.h"

namespace sim {

namespace {

// When an engine is taken, in simulated time. A copy gets the earliest gap that is long enough, so one that waits for
// its stream does not hold up those that are ready, just as on a device. Guarded by the runtime's mutex.
class EngineTimeline {
 public:
  Nanoseconds reserve(Nanoseconds ready, Nanoseconds duration, Nanoseconds host_now) {
    forget_before(host_now);
    Nanoseconds start = ready;
    // The first reservation that ends after `ready`; the ones before it cannot be in the way.
    auto next = busy_.upper_bound(start);
    if (next != busy_.begin() && std::prev(next)->second > start) next = std::prev(next);
    for (; next != busy_.end() && next->first < start + duration; ++next) start = std::max(start, next->second);
    if (duration > 0) add(start, start + duration);
    return start;
  }

 private:
  void add(Nanoseconds start, Nanoseconds end) {
    if (auto after = busy_.find(end); after != busy_.end()) {
      end = after->second;
      busy_.erase(after);
    }
    auto before = busy_.lower_bound(start);
    if (before != busy_.begin() && std::prev(before)->second == start)
      std::prev(before)->second = end;
    else
      busy_[start] = end;
  }

  // No copy starts before the host's present. A host that never waits must not make the list grow without end: then the
  // oldest gaps are given up.
  void forget_before(Nanoseconds host_now) {
    constexpr size_t max_reservations = 256;
    while (!busy_.empty() && busy_.begin()->second <= host_now) busy_.erase(busy_.begin());
    if (busy_.size() <= max_reservations) return;
    auto second = std::next(busy_.begin());
    busy_.begin()->second = second->second;
    busy_.erase(second);
  }

  std::map<Nanoseconds, Nanoseconds> busy_; // start -> end, disjoint, touching ones merged
};

struct CopyEngine {
  EngineTimeline timeline;
  std::mutex one_copy_at_a_time; // threads mode
};

struct Engines {
  std::array<CopyEngine, kDevices> h2d, d2h;
  Gate h2d_gate, d2h_gate, kernel_gate; // of all devices

  static Engines& get() {
    static Engines* engines = new Engines; // outlives the workers
    return *engines;
  }
  CopyEngine& copy_engine(Engine engine, int device) {
    return engine == Engine::HostToDevice ? h2d[device] : d2h[device];
  }
  Gate& gate(Engine engine) { return engine == Engine::HostToDevice ? h2d_gate : d2h_gate; }
};

Nanoseconds copy_duration(Engine engine, size_t bytes) {
  const int64_t bytes_per_us = engine == Engine::HostToDevice ? settings.h2d_mb_s : settings.d2h_mb_s; // == MB/s
  const Nanoseconds latency = settings.latency_us * 1000;
  return bytes_per_us ? latency + static_cast<Nanoseconds>(bytes * 1e3 / bytes_per_us) : latency;
}

void sleep_until(Nanoseconds time) {
  std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(time)));
}

// On the worker's thread. A copy lands at its end: reading its destination early finds old data, and overwriting its
// source early spoils it.
void run_copy(Engine engine, int device, Nanoseconds duration, const std::function<void()>& body) {
  Engines& engines = Engines::get();
  std::lock_guard exclusive(engines.copy_engine(engine, device).one_copy_at_a_time);
  if (duration > 0) sleep_until(real_now() + duration);
  engines.gate(engine).wait_while_held();
  body();
}

void run_kernel(Nanoseconds duration, const std::function<void()>& body) {
  const Nanoseconds start = real_now();
  body();
  if (duration > 0) sleep_until(start + duration);
}

void check_accesses(const Work& work, int64_t tick, const VectorClock& known, RaceLog& races) {
  const Access access{work.stream, tick, work.name};
  for (MemoryBlock* block : work.reads) block->history.read(access, known, block->begin, races);
  for (MemoryBlock* block : work.writes) block->history.write(access, known, block->begin, races);
}

void run_now(Runtime& runtime, const Work& work, Nanoseconds start, Nanoseconds end) {
  try {
    work.body();
  } catch (...) {
    runtime.keep_error(std::current_exception()); // surfaces at the next synchronisation, as on a device
  }
  if (work.traced && settings.trace) runtime.add_span({work.name, work.stream, start, end});
}

// In place of a block, which may be given back before the replay.
struct Addresses {
  char* begin;
  size_t bytes;
};

std::vector<Addresses> addresses_of(const std::vector<MemoryBlock*>& blocks) {
  std::vector<Addresses> addresses;
  for (const MemoryBlock* block : blocks) addresses.push_back({block->begin, block->bytes});
  return addresses;
}

// What is there now, whoever owns it.
std::vector<MemoryBlock*> blocks_at(const std::vector<Addresses>& addresses) {
  std::vector<MemoryBlock*> blocks;
  for (const auto& [begin, bytes] : addresses) blocks.push_back(&DeviceAllocator::get().mapped(begin, bytes));
  return blocks;
}

void record(Capture& capture, Work work) {
  auto reads = addresses_of(work.reads), writes = addresses_of(work.writes);
  const int stream = work.stream;
  capture.record_launch(stream, [work = std::move(work), reads, writes](int stream) {
    Work again = work;
    again.stream = stream;
    again.reads = blocks_at(reads);
    again.writes = blocks_at(writes);
    launch(std::move(again));
  });
}

} // namespace

void launch(Work work) {
  if (CapturePtr capture = capture_on(work.stream))
    record(*capture, std::move(work));
  else
    submit(std::move(work));
}

int64_t submit(Work work) {
  Runtime& runtime = Runtime::get();
  Stream& stream = runtime.streams[work.stream];
  const bool is_copy = work.engine != Engine::Compute;
  const int device = device_of(work.stream);
  const Nanoseconds duration = is_copy ? copy_duration(work.engine, work.bytes) : work.duration;

  std::unique_lock lock(runtime.mutex);
  stream.clock.merge(runtime.host_clock); // what the host has seen finish comes before what it submits now
  const int64_t tick = stream.clock.advance(work.stream);
  if (settings.race) check_accesses(work, tick, stream.clock, runtime.races);

  Nanoseconds start = std::max(stream.simulated_end, runtime.host_ns);
  if (is_copy)
    start = Engines::get().copy_engine(work.engine, device).timeline.reserve(start, duration, runtime.host_ns);
  stream.simulated_end = start + duration;

  if (settings.virtual_time) {
    const Nanoseconds end = stream.simulated_end;
    lock.unlock(); // an operator written in Python needs the GIL, whose owner may be waiting for this lock
    run_now(runtime, work, start, end);
    return tick;
  }
  auto run = [engine = work.engine, device, duration, is_copy, body = std::move(work.body)] {
    if (is_copy)
      run_copy(engine, device, duration, body);
    else
      run_kernel(duration, body);
  };
  stream.push({.body = std::move(run), .name = work.traced ? work.name : nullptr});
  return tick;
}

Nanoseconds kernel_duration() { return settings.kernel_us * 1000; }

static void require_threads(const char* what) {
  TORCH_CHECK(!settings.virtual_time, "sim: ", what,
              " in virtual mode, where work is over when it is submitted: use threads mode");
}

void hold_engine(Engine engine) {
  require_threads("copies cannot be held");
  Engines::get().gate(engine).hold();
}

void release_engine(Engine engine) { Engines::get().gate(engine).release(); }

void launch_held_kernel() {
  require_threads("a kernel cannot be held");
  TORCH_CHECK(!capture_on(current_stream()), "sim: a kernel that is held cannot be captured");
  Gate& gate = Engines::get().kernel_gate;
  const int64_t seen = gate.hold();
  launch({.stream = current_stream(), .name = "held_kernel", .body = [&gate, seen] {
            gate.wait_for_release_after(seen);
          }});
}

void release_kernels() { Engines::get().kernel_gate.release(); }

bool anything_held() {
  Engines& engines = Engines::get();
  return engines.h2d_gate.held() || engines.d2h_gate.held() || engines.kernel_gate.held();
}

} // namespace sim
