#include "landings.h"

#include <cstring>

namespace sim {

void Landings::Landing::deliver() const { std::memcpy(destination, data.get(), bytes); }

void Landings::add(int stream, int64_t tick, char* destination, size_t bytes, std::unique_ptr<char[]> data) {
  landings_.push_back({stream, tick, destination, bytes, std::move(data)});
}

void Landings::host_learns(const VectorClock& finished) {
  std::erase_if(landings_, [&](const Landing& landing) {
    if (!finished.covers(landing.stream, landing.tick)) return false;
    landing.deliver();
    return true;
  });
}

void Landings::device_uses(const char* begin, size_t bytes) {
  std::erase_if(landings_, [&](const Landing& landing) {
    if (!landing.overlaps(begin, bytes)) return false;
    landing.deliver();
    return true;
  });
}

void Landings::block_is_freed(const char* begin, size_t bytes) {
  std::erase_if(landings_, [&](const Landing& landing) { return landing.overlaps(begin, bytes); });
}

} // namespace sim
