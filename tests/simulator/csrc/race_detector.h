// Who touched a block of memory last, and whether that came before what touches it now.
// Everything here is guarded by the runtime's mutex.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "clocks.h"

namespace sim {

// `what` is a literal or a registered operator's name: it outlives the access.
struct Access {
  int stream = -1;
  int64_t tick = 0;
  const char* what = "";
};

class RaceLog {
 public:
  void report(std::string message) { messages_.push_back(std::move(message)); }
  std::vector<std::string> take() { return std::exchange(messages_, {}); }

 private:
  std::vector<std::string> messages_;
};

// The last write to one block and the reads since. Two accesses, one of them a write, that no wait puts in order are a
// race. Granularity is the block: disjoint slices of one tensor on two streams are reported as well.
class AccessHistory {
 public:
  void read(const Access& access, const VectorClock& known, const void* block, RaceLog& log);
  void write(const Access& access, const VectorClock& known, const void* block, RaceLog& log);

  // These accesses are physically over, so what comes next cannot collide with them.
  void forget_finished(const VectorClock& finished);
  void clear();
  bool has_write_beyond(const VectorClock& known) const {
    return has_write_ && !known.covers(last_write_.stream, last_write_.tick);
  }

 private:
  bool has_write_ = false;
  Access last_write_;
  std::vector<Access> reads_; // one a stream: the last
};

} // namespace sim
