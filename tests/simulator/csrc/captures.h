// Captures under way: what is launched on a capturing stream is recorded for a graph, and not run. As in CUDA, what
// cannot be recorded, or would disturb, raises and makes the capture invalid.
//
// Everything here is guarded by a lock of its own, which is taken last.
#pragma once

#include <ATen/core/GraphImplInterface.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace sim {

// Launches a recorded piece of work on a stream, as often as it is called. It knows addresses and keeps no memory.
using Launch = std::function<void(int stream)>;

// How many launches of each stream of a capture come before something.
using LaunchCounts = std::vector<size_t>;

// An event recorded during a capture: a place in a graph. It never happens.
struct CapturedEvent {
  int64_t capture;
  size_t index; // among the events of that capture
  LaunchCounts before;
};
using CapturedEventPtr = std::shared_ptr<const CapturedEvent>;

// What a graph does on one of its streams.
struct Step {
  enum class Kind { Launch, RecordEvent, WaitForEvent } kind;
  size_t branch; // an index into Capture::streams()
  Launch launch = nullptr;
  size_t event = 0;
};

class Capture {
 public:
  Capture(int64_t id, int stream, at::GraphCaptureMode mode);

  const int64_t id; // never 0, never used again
  const int stream; // on which it began; others join when they wait for an event of the capture
  const at::GraphCaptureMode mode;
  const std::thread::id thread = std::this_thread::get_id();

  void record_launch(int stream, Launch launch);
  CapturedEventPtr record_event(int stream);
  void record_wait(int stream, const CapturedEvent& event);
  void invalidate(const char* reason); // the first reason stays

  // For the time after end_capture().
  const std::vector<Step>& steps() const { return steps_; }
  const std::vector<int>& streams() const { return streams_; }
  size_t event_count() const { return event_count_; }
  const std::string& why_invalid() const { return why_invalid_; } // empty: it is valid

  // Whether its own stream has waited for all that the others were given.
  bool is_joined() const;

 private:
  size_t branch_of(int stream); // a new one for a stream that joins

  std::vector<Step> steps_;
  std::vector<int> streams_;
  std::vector<LaunchCounts> before_; // for each stream: what comes before the next step on it
  size_t event_count_ = 0;
  std::string why_invalid_;
};
using CapturePtr = std::shared_ptr<Capture>;

CapturePtr begin_capture(int stream, at::GraphCaptureMode mode);
void end_capture(Capture& capture); // also one that is over

namespace detail {

inline std::atomic<int> captures_under_way = 0;

CapturePtr find_capture(int stream);
void check_unsafe(const char* what);
void check_host_uses_stream(int stream, const char* what);
void check_host_uses_event(const CapturedEventPtr& captured, const char* what);

} // namespace detail

// All that a program which captures nothing pays for.
inline bool anything_captures() { return detail::captures_under_way != 0; }

inline CapturePtr capture_on(int stream) { return anything_captures() ? detail::find_capture(stream) : nullptr; }

// For what disturbs a capture by any thread, by its own thread, or not at all, as its mode says.
inline void check_unsafe(const char* what) {
  if (anything_captures()) detail::check_unsafe(what);
}

// For waiting for a stream and asking whether it has finished: unsafe, and impossible for a capturing stream.
inline void check_host_uses_stream(int stream, const char* what) {
  if (anything_captures()) detail::check_host_uses_stream(stream, what);
}

// The same for an event; `captured` is null unless it was recorded during a capture.
inline void check_host_uses_event(const CapturedEventPtr& captured, const char* what) {
  if (anything_captures() || captured) detail::check_host_uses_event(captured, what);
}

// Whether a stream's wait for an event is part of a capture, which the stream joins thereby. No other wait crosses a
// capture's border.
bool wait_is_captured(int stream, const CapturedEventPtr& event);

} // namespace sim
