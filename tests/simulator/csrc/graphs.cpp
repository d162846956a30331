#include "graphs.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/util/Exception.h>

#include <mutex>
#include <set>
#include <vector>

#include "captures.h"
#include "device_allocator.h"
#include "runtime.h"

namespace sim {

namespace {

class Graph;

struct LiveGraphs {
  std::mutex mutex;
  std::set<Graph*> graphs;

  static LiveGraphs& get() {
    static auto* live = new LiveGraphs; // graphs may be destroyed after static destructors have run
    return *live;
  }
};

class Graph final : public at::GraphImplInterface {
 public:
  // Instantiating costs nothing here, so whether torch would keep the graph for it makes no difference.
  explicit Graph(const at::GraphImplArgs&) {
    std::lock_guard lock(LiveGraphs::get().mutex);
    LiveGraphs::get().graphs.insert(this);
  }

  ~Graph() override {
    {
      std::lock_guard lock(LiveGraphs::get().mutex);
      LiveGraphs::get().graphs.erase(this);
    }
    reset();
  }

  // A pool is only a hint to share memory with other graphs: each has its own here.
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode mode) override {
    TORCH_CHECK(!capture_, "sim: this graph has captured already, reset() it first");
    const int stream = current_stream();
    TORCH_CHECK(stream != default_stream(device_of(stream)), "sim: the default stream cannot be captured");
    capture_ = begin_capture(stream, mode);
    under_way_ = true;
  }

  void capture_end() override {
    TORCH_CHECK(under_way_, "sim: capture_end() without capture_begin()");
    TORCH_CHECK(current_stream(device_of(capture_->stream)) == capture_->stream,
                "sim: a capture ends on the stream on which it began");
    TORCH_CHECK(capture_->mode == at::GraphCaptureMode::Relaxed || capture_->thread == std::this_thread::get_id(),
                "sim: a capture that is not relaxed ends in the thread in which it began");
    end_capture(*capture_);
    under_way_ = false;
    const std::string why_invalid = capture_->why_invalid();
    if (!why_invalid.empty()) reset();
    TORCH_CHECK(why_invalid.empty(), "sim: the capture is invalid, because of: ", why_invalid);
    // Not the streams that joined: a graph is not in order with what the program does on those.
    streams_.clear();
    for (int stream : capture_->streams()) streams_.push_back(new_stream(device_of(stream)));
  }

  void instantiate() override { require_captured("instantiate"); }

  void replay() override {
    require_captured("replay");
    const CapturePtr capture = capture_; // a reset() by another thread leaves this replay whole
    std::vector<int> streams = streams_;
    streams[0] = current_stream(device_of(capture->stream));
    std::vector<EventPtr> events(capture->event_count());
    for (const Step& step : capture->steps()) {
      const int stream = streams[step.branch];
      switch (step.kind) {
        case Step::Kind::Launch:
          step.launch(stream);
          break;
        case Step::Kind::RecordEvent:
          events[step.event] = record_event(stream);
          break;
        case Step::Kind::WaitForEvent:
          stream_waits(stream, events[step.event]);
          break;
      }
    }
  }

  void reset() override {
    if (!capture_) return;
    end_capture(*capture_);
    DeviceAllocator::get().release_graph(capture_->id);
    capture_ = nullptr;
    under_way_ = false;
  }

  at::MempoolId_t pool() const override {
    TORCH_CHECK(capture_, "sim: pool() before capture_begin()");
    return {static_cast<c10::CaptureId_t>(capture_->id), 0};
  }

  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override { TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: a graph cannot be dumped"); }

 private:
  void require_captured(const char* what) const {
    TORCH_CHECK(capture_ && !under_way_, "sim: ", what, "() of a graph that has captured nothing");
  }

  CapturePtr capture_;       // null: there is none, neither under way nor over
  std::vector<int> streams_; // for replays, one for each of the capture; the first is not used
  bool under_way_ = false;
};

} // namespace

void reset_graphs() {
  std::lock_guard lock(LiveGraphs::get().mutex);
  for (Graph* graph : LiveGraphs::get().graphs) graph->reset();
}

} // namespace sim

// torch looks for the name of the device type in capitals, and this library is loaded before the type is renamed.
namespace at {
REGISTER_GRAPH_IMPL(SIM, sim::Graph)
} // namespace at
