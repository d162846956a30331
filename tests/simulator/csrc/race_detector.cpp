#include "race_detector.h"

#include <sstream>

namespace sim {

static void check(const Access& now, const char* verb, const Access& before, const VectorClock& known,
                  const void* block, RaceLog& log) {
  if (now.stream == before.stream || known.covers(before.stream, before.tick)) return;
  std::ostringstream message;
  message << "race: " << now.what << " on stream " << now.stream << " " << verb << " " << before.what << " on stream "
          << before.stream << " (block " << block << ")";
  log.report(message.str());
}

void AccessHistory::read(const Access& access, const VectorClock& known, const void* block, RaceLog& log) {
  if (has_write_) check(access, "reads what is written by", last_write_, known, block, log);
  for (Access& earlier : reads_) {
    if (earlier.stream == access.stream) {
      earlier = access;
      return;
    }
  }
  reads_.push_back(access);
}

void AccessHistory::write(const Access& access, const VectorClock& known, const void* block, RaceLog& log) {
  if (has_write_) check(access, "overwrites what is written by", last_write_, known, block, log);
  for (const Access& earlier : reads_) check(access, "overwrites what is read by", earlier, known, block, log);
  has_write_ = true;
  last_write_ = access;
  reads_.clear();
}

void AccessHistory::forget_finished(const VectorClock& finished) {
  if (has_write_ && finished.covers(last_write_.stream, last_write_.tick)) has_write_ = false;
  std::erase_if(reads_, [&](const Access& access) { return finished.covers(access.stream, access.tick); });
}

void AccessHistory::clear() {
  has_write_ = false;
  reads_.clear();
}

} // namespace sim
