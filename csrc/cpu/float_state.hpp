// Arithmetic as IEEE 754 has it for the length of a scope: rounding to nearest, denormals neither flushed nor read as zero.
//
// torch.set_flush_denormal and some libraries change the thread's mode. A rank whose communication thread flushes denormals would
// give other bits than its neighbours, so every public kernel sets the mode and restores the caller's.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>

namespace topkube {
class IeeeScope {
 public:
  IeeeScope() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~IeeeScope() { _mm_setcsr(saved_); }
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;

 private:
  unsigned saved_;
};
}  // namespace topkube
#else
#include <cfenv>

namespace topkube {
class IeeeScope {
 public:
  IeeeScope() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~IeeeScope() { std::fesetenv(&saved_); }
  IeeeScope(const IeeeScope&) = delete;
  IeeeScope& operator=(const IeeeScope&) = delete;

 private:
  std::fenv_t saved_;
};
}  // namespace topkube
#endif
