// Virtual mode: copies into pinned memory become visible when the host learns that they are over.
//
// Work runs inside its submission there, so that without this the host would find the result at once, and a program
// that reads it too early would never be caught. Guarded by the runtime's mutex.
#pragma once

#include <memory>
#include <vector>

#include "clocks.h"

namespace sim {

class Landings {
 public:
  void add(int stream, int64_t tick, char* destination, size_t bytes, std::unique_ptr<char[]> data);
  void host_learns(const VectorClock& finished);
  // The device is about to use these bytes, and it has them already.
  void device_uses(const char* begin, size_t bytes);
  void block_is_freed(const char* begin, size_t bytes);

 private:
  struct Landing {
    int stream;
    int64_t tick;
    char* destination;
    size_t bytes;
    std::unique_ptr<char[]> data;

    bool overlaps(const char* begin, size_t length) const {
      return begin < destination + bytes && destination < begin + length;
    }
    void deliver() const;
  };

  std::vector<Landing> landings_; // in the order of submission
};

} // namespace sim
