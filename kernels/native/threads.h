// How threads share the work of a step, and memory that grows.

#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Tells whoever waits for a long step that it gets on: a call every quarter of a second, by the thread that called run().
class Pulse {
 public:
  explicit Pulse(void (*call)()) : call_(call), next_(Clock::now() + kInterval) {}

  void beat() {
    if (!call_ || ++beats_ % kBeatsPerLook != 0) return;  // a look at the clock costs more than the smallest items
    const auto now = Clock::now();
    if (now < next_) return;
    next_ = now + kInterval;
    call_();
  }

 private:
  typedef std::chrono::steady_clock Clock;
  static constexpr std::chrono::milliseconds kInterval{250};
  static constexpr unsigned kBeatsPerLook = 8;

  void (*call_)();
  Clock::time_point next_;
  unsigned beats_ = 0;
};

// A piece of a step that is shared out. It is over when all of its items are done, not when all threads have arrived: a
// thread whose core is busy with something else holds nobody up, unless in the middle of an item; it comes after the others
// and finds nothing left to claim.
struct alignas(64) Phase {
  std::atomic<int64_t> claimed{0};
  alignas(64) std::atomic<int64_t> done{0};

  void reset() {
    claimed.store(0, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
  }

  template <class Work>
  void share(int64_t count, int64_t at_once, Pulse& pulse, Work work) {
    for (;;) {
      const int64_t first = claimed.fetch_add(at_once, std::memory_order_relaxed);
      if (first >= count) break;
      const int64_t after = std::min(first + at_once, count);
      for (int64_t i = first; i < after; i++) work(i);
      done.fetch_add(after - first, std::memory_order_acq_rel);
      pulse.beat();
    }
    wait(count);
  }

  // One by one; work(i, next) also learns which item it gets after that, `count` or more if none. Only for small items: the
  // last one may be left to a thread that has another one to do first.
  template <class Work>
  void share_ahead(int64_t count, Pulse& pulse, Work work) {
    int64_t item = claimed.fetch_add(1, std::memory_order_relaxed);
    while (item < count) {
      const int64_t next = claimed.fetch_add(1, std::memory_order_relaxed);
      work(item, next);
      done.fetch_add(1, std::memory_order_acq_rel);
      pulse.beat();
      item = next;
    }
    wait(count);
  }

 private:
  // Waits spinning for some microseconds, the length of an uneven end; then it lets others have the core.
  void wait(int64_t count) const {
    for (int turns = 0; done.load(std::memory_order_acquire) < count; turns++) {
      if (turns > 4000) sched_yield();
#if defined(__x86_64__)
      else _mm_pause();
#endif
    }
  }
};

template <class T>
class Buffer {  // grows, never shrinks; aligned to cache lines; contents are lost when it grows
 public:
  T* at_least(size_t count) {
    if (count > size_) {
      data_.reset((T*)std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64));
      if (!data_) throw std::bad_alloc();
      size_ = count;
    }
    return data_.get();
  }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data_;
  size_t size_ = 0;
};

}  // namespace
