#include "runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <thread>

#include "captures.h"
#include "settings.h"

namespace sim {

// ---- events

void Event::finish() {
  {
    std::lock_guard lock(mutex_);
    done_ = true;
    real_end_ = real_now();
  }
  finished_.notify_all();
}

void Event::wait() {
  std::unique_lock lock(mutex_);
  finished_.wait(lock, [this] { return done_; });
}

bool Event::reached() {
  std::lock_guard lock(mutex_);
  return done_;
}

Nanoseconds Event::real_end() {
  std::lock_guard lock(mutex_);
  return real_end_;
}

// ---- streams

// A forked child inherits the simulator's memory but none of its worker threads: using the device would hang.
static bool in_forked_child = false;

void Stream::push(Task task) {
  TORCH_CHECK(!in_forked_child, "sim: the device cannot be used in a forked child process");
  std::lock_guard lock(mutex_);
  if (!has_worker_) {
    has_worker_ = true;
    std::thread([this] { work(); }).detach();
  }
  queue_.push_back(std::move(task));
  unfinished_++;
  task_arrived_.notify_one();
}

bool Stream::ever_used() {
  std::lock_guard lock(mutex_);
  return has_worker_;
}

void Stream::work() {
  for (;;) {
    Task task;
    {
      std::unique_lock lock(mutex_);
      task_arrived_.wait(lock, [this] { return !queue_.empty(); });
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    if (task.finishes) {
      unfinished_--; // first, so that who has waited for the event finds the stream idle
      task.finishes->finish();
    } else {
      run(task);
      unfinished_--;
    }
  }
}

void Stream::run(Task& task) {
  Runtime& runtime = Runtime::get();
  const Nanoseconds start = real_now();
  try {
    task.body();
  } catch (...) {
    runtime.keep_error(std::current_exception());
  }
  if (task.name && settings.trace) runtime.add_span({task.name, id, start, real_now()});
}

// ---- runtime

Runtime& Runtime::get() {
  static Runtime* runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime() {
  for (int i = 0; i < kStreams; i++) streams[i].id = i;
  pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
}

void Runtime::host_learns(const VectorClock& finished, Nanoseconds simulated_end) {
  pinned_watch.host_learns(finished, races); // before the host may lawfully write
  landings.host_learns(finished);
  host_clock.merge(finished);
  host_ns = std::max(host_ns, simulated_end);
}

void Runtime::add_span(Span span) {
  std::lock_guard lock(log_mutex_);
  spans_.push_back(std::move(span));
}

std::vector<Span> Runtime::take_spans() {
  std::lock_guard lock(log_mutex_);
  return std::exchange(spans_, {});
}

void Runtime::keep_error(std::exception_ptr error) {
  std::lock_guard lock(log_mutex_);
  if (!error_) error_ = std::move(error); // the first is the cause, the rest follow from it
}

std::exception_ptr Runtime::take_error() {
  std::lock_guard lock(log_mutex_);
  return std::exchange(error_, nullptr);
}

// ---- order between streams and host

EventPtr record_event(int stream) {
  if (CapturePtr capture = capture_on(stream)) return std::make_shared<Event>(capture->record_event(stream));
  return end_of_submitted_work(stream);
}

EventPtr end_of_submitted_work(int stream_id) {
  Runtime& runtime = Runtime::get();
  Stream& stream = runtime.streams[stream_id];
  std::lock_guard lock(runtime.mutex);
  const bool virtual_time = settings.virtual_time;
  auto event = std::make_shared<Event>(stream.clock, std::max(stream.simulated_end, runtime.host_ns), virtual_time);
  if (!virtual_time) stream.push({.finishes = event});
  return event;
}

void stream_waits(int stream_id, const EventPtr& event) {
  if (wait_is_captured(stream_id, event->captured)) return;
  Runtime& runtime = Runtime::get();
  Stream& stream = runtime.streams[stream_id];
  std::lock_guard lock(runtime.mutex);
  stream.clock.merge(event->clock);
  stream.simulated_end = std::max(stream.simulated_end, event->simulated_end);
  if (!event->virtual_time) stream.push({.body = [event] { event->wait(); }});
}

static bool is_finished_locked(Event& event) {
  return event.virtual_time ? Runtime::get().host_ns >= event.simulated_end : event.reached();
}

bool is_finished(const EventPtr& event) {
  std::lock_guard lock(Runtime::get().mutex);
  return is_finished_locked(*event);
}

// With the runtime's mutex held.
static bool answer_query(bool finished, const VectorClock& clock, Nanoseconds simulated_end) {
  constexpr Nanoseconds poll_ns = 1000;
  Runtime& runtime = Runtime::get();
  if (finished)
    runtime.host_learns(clock, simulated_end);
  else if (settings.virtual_time)
    runtime.host_ns += poll_ns;
  return finished;
}

bool host_query(const EventPtr& event) {
  check_host_uses_event(event->captured, "querying an event");
  std::lock_guard lock(Runtime::get().mutex);
  return answer_query(is_finished_locked(*event), event->clock, event->simulated_end);
}

bool host_query_stream(int stream_id) {
  check_host_uses_stream(stream_id, "querying a stream");
  Runtime& runtime = Runtime::get();
  Stream& stream = runtime.streams[stream_id];
  std::lock_guard lock(runtime.mutex);
  const bool finished = settings.virtual_time ? runtime.host_ns >= stream.simulated_end : stream.idle();
  return answer_query(finished, stream.clock, stream.simulated_end);
}

static void wait_until_finished(const EventPtr& event) {
  Runtime& runtime = Runtime::get();
  if (!event->virtual_time) event->wait();
  {
    std::lock_guard lock(runtime.mutex);
    runtime.host_learns(event->clock, event->simulated_end);
  }
  if (std::exception_ptr error = runtime.take_error()) std::rethrow_exception(error);
}

void host_waits(const EventPtr& event) {
  check_host_uses_event(event->captured, "synchronizing with an event");
  wait_until_finished(event);
}

void synchronize_stream(int stream) {
  check_host_uses_stream(stream, "synchronizing with a stream");
  finish_stream(stream);
}

void finish_stream(int stream_id) {
  Runtime& runtime = Runtime::get();
  // Nothing to wait for, and no worker needed; but what the stream waited for is known to it, hence to the host.
  if (!settings.virtual_time && !runtime.streams[stream_id].ever_used()) return;
  wait_until_finished(end_of_submitted_work(stream_id));
}

void synchronize_device(int device) {
  for (int i = 0; i < kStreamsPerDevice; i++) synchronize_stream(default_stream(device) + i);
}

void synchronize_all() {
  for (int device = 0; device < kDevices; device++) synchronize_device(device);
}

// ---- the current device and streams of each thread

static std::array<int, kDevices> default_streams() {
  std::array<int, kDevices> streams;
  for (int device = 0; device < kDevices; device++) streams[device] = default_stream(device);
  return streams;
}

static thread_local int thread_device = 0;
static thread_local std::array<int, kDevices> thread_streams = default_streams();

int current_device() { return thread_device; }
int current_stream(int device) { return thread_streams[device]; }
int exchange_stream(int stream) { return std::exchange(thread_streams[device_of(stream)], stream); }

void set_current_device(int device) {
  TORCH_CHECK(device < kDevices, "sim: there is no device ", device, ", only ", kDevices);
  if (device >= 0) thread_device = device;
}

int new_stream(int device) {
  Runtime& runtime = Runtime::get();
  std::lock_guard lock(runtime.mutex);
  return default_stream(device) + 1 + runtime.streams_made[device]++ % kPoolStreams;
}

DeviceScope::DeviceScope(int device) : before_(thread_device) { set_current_device(device); }
DeviceScope::~DeviceScope() { thread_device = before_; }

} // namespace sim
