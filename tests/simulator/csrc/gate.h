// A barrier that tests hold and release in place of racing a clock.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>

namespace sim {

class Gate {
 public:
  // Returns the number of releases so far, for wait_for_release_after().
  int64_t hold() {
    std::lock_guard lock(mutex_);
    held_ = true;
    return releases_;
  }

  void release() {
    {
      std::lock_guard lock(mutex_);
      held_ = false;
      releases_++;
    }
    opened_.notify_all();
  }

  bool held() const {
    std::lock_guard lock(mutex_);
    return held_;
  }

  void wait_while_held() {
    wait([this] { return !held_; });
  }

  // Until release() was called after `seen` releases had been counted.
  void wait_for_release_after(int64_t seen) {
    wait([this, seen] { return releases_ > seen; });
  }

 private:
  // A test that waits for what it holds itself would hang for ever: after this long the work fails instead, and the
  // error surfaces in that wait. No correct test comes near it.
  static constexpr std::chrono::seconds kDeadlock{60};

  template <class Condition>
  void wait(Condition open) {
    std::unique_lock lock(mutex_);
    if (!opened_.wait_for(lock, kDeadlock, open))
      throw std::runtime_error("sim: work was held for 60 s: the test waits for something it holds itself");
  }

  mutable std::mutex mutex_;
  std::condition_variable opened_;
  bool held_ = false;
  int64_t releases_ = 0;
};

} // namespace sim
