// Catches the host overwriting pinned memory that a copy to the device still reads.
//
// The host's writes cannot be seen, so the source's bytes are kept at submission and compared later: whenever the host
// is about to learn that the copy is over (afterwards it may write), when another copy uses the same bytes, when the
// block is freed (from then on the allocator protects it) and when a test asks for the races. A copy is over for the
// host when the host waited for it, not when it happens to have run: the verdict does not depend on timing.
// Everything here is guarded by the runtime's mutex.
#pragma once

#include <memory>
#include <vector>

#include "race_detector.h"

namespace sim {

class PinnedWatch {
 public:
  // The bytes as they are now; made before the copy is submitted and outside any lock, since it may be long.
  static std::unique_ptr<char[]> snapshot(const void* source, size_t bytes);

  // `known` is the host's clock: another thread may have waited for the copy by now, then there is nothing to watch.
  void add(int stream, int64_t tick, const char* source, size_t bytes, std::unique_ptr<char[]> snapshot,
           const VectorClock& known, RaceLog& log);
  // A copy from the device is about to write there: what it changes is not the host's doing.
  void device_writes(const char* destination, size_t bytes, RaceLog& log);
  void block_is_freed(const char* begin, size_t bytes, RaceLog& log);
  void host_learns(const VectorClock& finished, RaceLog& log);
  // Compare what is still watched; what differs is reported once.
  void check_all(RaceLog& log);
  void clear() { copies_.clear(); }

 private:
  struct Copy {
    int stream;
    int64_t tick;
    const char* source;
    size_t bytes;
    std::unique_ptr<char[]> snapshot;

    bool overlaps(const char* begin, size_t length) const { return begin < source + bytes && source < begin + length; }
    bool unchanged(RaceLog& log) const;
  };

  std::vector<Copy> copies_;
};

} // namespace sim
