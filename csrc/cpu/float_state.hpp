// A scope with the arithmetic of IEEE 754: rounding to nearest; denormals are neither flushed nor read as zero.
//
// torch.set_flush_denormal and some libraries change the thread's mode. If the communication thread of one rank flushed denormals,
// its results would differ from those of other ranks. So every public kernel sets the mode and restores the caller's mode.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>

namespace topkube {
class IeeeScope {
 public:
  // 0x1f80: exceptions are masked, results are rounded to nearest, denormals are kept.
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
