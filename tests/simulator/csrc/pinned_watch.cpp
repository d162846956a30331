#include "pinned_watch.h"

#include <cstring>
#include <sstream>

namespace sim {

std::unique_ptr<char[]> PinnedWatch::snapshot(const void* source, size_t bytes) {
  std::unique_ptr<char[]> copy(new char[bytes]); // not make_unique, which would clear it first
  std::memcpy(copy.get(), source, bytes);
  return copy;
}

bool PinnedWatch::Copy::unchanged(RaceLog& log) const {
  if (std::memcmp(source, snapshot.get(), bytes) == 0) return true;
  std::ostringstream message;
  message << "race: the host overwrites pinned memory which copy_h2d on stream " << stream << " may still read ("
          << bytes << " bytes at " << static_cast<const void*>(source) << ")";
  log.report(message.str());
  return false;
}

void PinnedWatch::add(int stream, int64_t tick, const char* source, size_t bytes, std::unique_ptr<char[]> snapshot,
                      const VectorClock& known, RaceLog& log) {
  if (known.covers(stream, tick)) return;
  std::erase_if(copies_, [&](const Copy& copy) {
    if (!copy.overlaps(source, bytes)) return false;
    if (!copy.unchanged(log)) return true;
    // The newer copy of the same bytes on the same stream ends later: it watches for both.
    return copy.stream == stream && copy.source >= source && copy.source + copy.bytes <= source + bytes;
  });
  copies_.push_back({stream, tick, source, bytes, std::move(snapshot)});
}

void PinnedWatch::device_writes(const char* destination, size_t bytes, RaceLog& log) {
  std::erase_if(copies_, [&](const Copy& copy) {
    if (!copy.overlaps(destination, bytes)) return false;
    copy.unchanged(log);
    return true;
  });
}

void PinnedWatch::block_is_freed(const char* begin, size_t bytes, RaceLog& log) { device_writes(begin, bytes, log); }

void PinnedWatch::host_learns(const VectorClock& finished, RaceLog& log) {
  std::erase_if(copies_, [&](const Copy& copy) {
    if (!finished.covers(copy.stream, copy.tick)) return false;
    copy.unchanged(log);
    return true;
  });
}

void PinnedWatch::check_all(RaceLog& log) {
  std::erase_if(copies_, [&](const Copy& copy) { return !copy.unchanged(log); });
}

} // namespace sim
