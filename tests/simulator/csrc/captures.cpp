#include "captures.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "clocks.h"

namespace sim {

namespace {

struct Captures {
  std::recursive_mutex mutex; // what is done to a capture is one with finding it
  std::array<CapturePtr, kStreams> by_stream;
  int64_t last_id = 0;

  static Captures& get() {
    static auto* captures = new Captures; // outlives the workers
    return *captures;
  }

  std::vector<CapturePtr> under_way() {
    std::lock_guard lock(mutex);
    std::vector<CapturePtr> found;
    for (const CapturePtr& capture : by_stream)
      if (capture) found.push_back(capture);
    return found;
  }
};

// Null: it was recorded in none, or in one that is over.
CapturePtr capture_under_way_of(const CapturedEventPtr& event) {
  if (!event) return nullptr;
  for (CapturePtr& capture : Captures::get().under_way())
    if (capture->id == event->capture) return capture;
  return nullptr;
}

bool forbids_unsafe_calls(const Capture& capture) {
  switch (capture.mode) {
    case at::GraphCaptureMode::Relaxed:
      return false;
    case at::GraphCaptureMode::ThreadLocal:
      return capture.thread == std::this_thread::get_id();
    default:
      return true;
  }
}

[[noreturn]] void refuse(Capture& capture, const char* what) {
  capture.invalidate(what);
  TORCH_CHECK(false, "sim: not permitted during the capture on stream ", capture.stream, ": ", what);
}

} // namespace

Capture::Capture(int64_t id, int stream, at::GraphCaptureMode mode) : id(id), stream(stream), mode(mode) {
  branch_of(stream);
}

size_t Capture::branch_of(int stream) {
  const auto found = std::find(streams_.begin(), streams_.end(), stream);
  if (found != streams_.end()) return found - streams_.begin();
  streams_.push_back(stream);
  before_.emplace_back();
  for (LaunchCounts& counts : before_) counts.resize(streams_.size());
  return streams_.size() - 1;
}

void Capture::record_launch(int stream, Launch launch) {
  std::lock_guard lock(Captures::get().mutex); // autograd's thread may take turns with the program's
  const size_t branch = branch_of(stream);
  before_[branch][branch]++;
  steps_.push_back({.kind = Step::Kind::Launch, .branch = branch, .launch = std::move(launch)});
}

CapturedEventPtr Capture::record_event(int stream) {
  std::lock_guard lock(Captures::get().mutex);
  const size_t branch = branch_of(stream);
  steps_.push_back({.kind = Step::Kind::RecordEvent, .branch = branch, .event = event_count_});
  return std::make_shared<CapturedEvent>(CapturedEvent{id, event_count_++, before_[branch]});
}

void Capture::record_wait(int stream, const CapturedEvent& event) {
  std::lock_guard lock(Captures::get().mutex);
  const size_t branch = branch_of(stream);
  steps_.push_back({.kind = Step::Kind::WaitForEvent, .branch = branch, .event = event.index});
  LaunchCounts& before = before_[branch];
  for (size_t i = 0; i < event.before.size(); i++) before[i] = std::max(before[i], event.before[i]);
}

bool Capture::is_joined() const {
  for (size_t branch = 0; branch < before_.size(); branch++)
    if (before_[0][branch] != before_[branch][branch]) return false;
  return true;
}

void Capture::invalidate(const char* reason) {
  std::lock_guard lock(Captures::get().mutex);
  if (why_invalid_.empty()) why_invalid_ = reason;
}

CapturePtr begin_capture(int stream, at::GraphCaptureMode mode) {
  Captures& captures = Captures::get();
  std::lock_guard lock(captures.mutex);
  CapturePtr& capture = captures.by_stream[stream];
  TORCH_CHECK(!capture, "sim: stream ", stream, " is capturing already");
  capture = std::make_shared<Capture>(++captures.last_id, stream, mode);
  detail::captures_under_way++;
  return capture;
}

void end_capture(Capture& capture) {
  Captures& captures = Captures::get();
  std::lock_guard lock(captures.mutex);
  if (captures.by_stream[capture.stream].get() != &capture) return;
  for (int stream : capture.streams()) captures.by_stream[stream] = nullptr;
  detail::captures_under_way--;
  if (!capture.is_joined()) capture.invalidate("work of a stream that joined it and that its own does not wait for");
}

CapturePtr detail::find_capture(int stream) {
  std::lock_guard lock(Captures::get().mutex);
  return Captures::get().by_stream[stream];
}

void detail::check_unsafe(const char* what) {
  for (const CapturePtr& capture : Captures::get().under_way())
    if (forbids_unsafe_calls(*capture)) refuse(*capture, what);
}

void detail::check_host_uses_stream(int stream, const char* what) {
  if (CapturePtr capture = find_capture(stream)) refuse(*capture, what);
  check_unsafe(what);
}

void detail::check_host_uses_event(const CapturedEventPtr& captured, const char* what) {
  if (CapturePtr capture = capture_under_way_of(captured)) refuse(*capture, what);
  TORCH_CHECK(!captured, "sim: ", what, " that was recorded during a capture: it never happens");
  check_unsafe(what);
}

bool wait_is_captured(int stream, const CapturedEventPtr& event) {
  if (!anything_captures() && !event) return false;
  Captures& captures = Captures::get();
  std::lock_guard lock(captures.mutex);
  CapturePtr& waiting = captures.by_stream[stream];
  const CapturePtr capture = capture_under_way_of(event);
  if (waiting && waiting != capture) refuse(*waiting, "waiting for an event that was recorded outside of it");
  if (!capture) {
    TORCH_CHECK(!event, "sim: a stream waits for an event that was recorded during a capture: it never happens");
    return false;
  }
  if (stream == default_stream(device_of(stream))) refuse(*capture, "the default stream waiting for its event");
  capture->record_wait(stream, *event);
  waiting = capture;
  return true;
}

} // namespace sim
