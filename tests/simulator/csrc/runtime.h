// Streams with a worker thread each, events, and what the host knows about them.
//
// Two sides. The submission side (vector clocks, simulated times, races) is brought up to date when work is submitted,
// in both modes, under Runtime::mutex. The execution side (worker threads, real time) exists in threads mode only; in
// virtual mode work runs inside its submission.
//
// Locks are taken in this order: an allocator's, then Runtime::mutex, then a stream's queue.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clocks.h"
#include "landings.h"
#include "pinned_watch.h"
#include "race_detector.h"

namespace sim {

struct CapturedEvent;
using CapturedEventPtr = std::shared_ptr<const CapturedEvent>;

// One recording of an event; recording again makes a new one, as in CUDA.
class Event {
 public:
  Event(const VectorClock& clock, Nanoseconds simulated_end, bool virtual_time)
      : clock(clock), simulated_end(simulated_end), virtual_time(virtual_time) {}
  // A place in a graph, that never happens.
  explicit Event(CapturedEventPtr captured) : simulated_end(0), virtual_time(true), captured(std::move(captured)) {}

  const VectorClock clock;         // what is finished once the event is
  const Nanoseconds simulated_end; // kept in both modes
  const bool virtual_time;
  const CapturedEventPtr captured; // null unless it was recorded during a capture

  // Threads mode only.
  void finish();
  void wait();
  bool reached();
  Nanoseconds real_end();

 private:
  std::mutex mutex_;
  std::condition_variable finished_;
  bool done_ = false;
  Nanoseconds real_end_ = 0;
};
using EventPtr = std::shared_ptr<Event>;

// One thing for a worker to do: finish an event, or a body. Without a name it leaves no span in the trace.
struct Task {
  std::function<void()> body;
  const char* name = nullptr;
  EventPtr finishes = nullptr;
};

class Stream {
 public:
  int id = 0;
  VectorClock clock;             // guarded by Runtime::mutex
  Nanoseconds simulated_end = 0; // likewise: when all work submitted so far ends

  void push(Task task);
  bool ever_used();
  bool idle() const { return unfinished_ == 0; }

 private:
  void work();
  void run(Task& task);

  std::mutex mutex_;
  std::condition_variable task_arrived_;
  std::deque<Task> queue_;
  std::atomic<size_t> unfinished_ = 0;
  bool has_worker_ = false;
};

// name, stream, start and end; real nanoseconds in threads mode, simulated ones in virtual mode.
struct Span {
  std::string name;
  int stream;
  Nanoseconds start, end;
};

class Runtime {
 public:
  static Runtime& get(); // never destroyed: worker threads may outlive static destructors

  std::mutex mutex; // guards the submission side: the members up to the next comment and both clocks of each stream
  std::array<Stream, kStreams> streams;
  VectorClock host_clock; // one for all threads of the host
  Nanoseconds host_ns = 0;
  RaceLog races;
  PinnedWatch pinned_watch;
  Landings landings;
  std::array<int, kDevices> streams_made{};

  // The host has waited for this or found it finished. Call it with `mutex` held.
  void host_learns(const VectorClock& finished, Nanoseconds simulated_end);

  // Its own lock, since workers use these.
  void add_span(Span span);
  std::vector<Span> take_spans();
  void keep_error(std::exception_ptr error);
  std::exception_ptr take_error();

 private:
  Runtime();

  std::mutex log_mutex_;
  std::vector<Span> spans_;
  std::exception_ptr error_;
};

// What the program asks for, part of the capture where the stream is capturing.
EventPtr record_event(int stream);
void stream_waits(int stream, const EventPtr& event);
// What an allocator needs: the end of what really was submitted, capture or not.
EventPtr end_of_submitted_work(int stream);

// What the program asks: a "yes" is knowledge that orders later work. In virtual mode each "no" costs the host 1 us, so
// that polling loops end.
bool host_query(const EventPtr& event);
bool host_query_stream(int stream);
// What an allocator asks: neither takes simulated time nor teaches the host anything, or whether a race is seen would
// depend on when an allocator looked.
bool is_finished(const EventPtr& event);

// Waiting surfaces the error of an asynchronous kernel, if there was one.
void host_waits(const EventPtr& event);
void synchronize_stream(int stream);
// The same for work that must be over before its memory goes: asks no capture for permission.
void finish_stream(int stream);
void synchronize_device(int device);
void synchronize_all();

// Each thread has its own current device, and its own current stream on every device.
int current_device();
void set_current_device(int device);
int current_stream(int device);
inline int current_stream() { return current_stream(current_device()); }
int exchange_stream(int stream);
int new_stream(int device);

// Makes a device current for a scope; -1 changes nothing.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;

 private:
  int before_;
};

} // namespace sim
