// The inner loops of every kernel, compiled once per path: TOPKUBE_PATH names it and CMake gives the instruction set.
//
// Nothing in this unit may leave it but the one table: it uses no function of the standard library that the linker could share
// with a unit for an older CPU.
#include "dtype.hpp"
#include "path_kernels.hpp"

#define TOPKUBE_TABLE_(path) path##_kernels
#define TOPKUBE_TABLE(path) TOPKUBE_TABLE_(path)
#define TOPKUBE_NAME_(path) #path
#define TOPKUBE_NAME(path) TOPKUBE_NAME_(path)

namespace topkube {
namespace {

// Plain loops: the compiler vectorises them, and lane-wise arithmetic has the same bits at any width.

template <class T>
void widen(float* out, const void* input, std::size_t length) {
  const auto* in = static_cast<const typename T::Item*>(input);
  for (std::size_t i = 0; i < length; ++i) out[i] = T::load(in[i]);
}

template <class T>
void widen_add(float* out, const void* input, std::size_t length) {
  const auto* in = static_cast<const typename T::Item*>(input);
  for (std::size_t i = 0; i < length; ++i) out[i] += T::load(in[i]);
}

template <class T>
void narrow(void* out, const float* input, std::size_t length, float scale) {
  auto* to = static_cast<typename T::Item*>(out);
  for (std::size_t i = 0; i < length; ++i) to[i] = T::round(input[i] * scale);
}

void add_f32(float* out, const float* a, const float* b, std::size_t length, float scale) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < length; ++i) out[i] = (a[i] + b[i]) * scale;
}

template <class Bits, Bits infinity>
bool is_finite(const void* data, std::size_t length) {
  const auto* in = static_cast<const Bits*>(data);
  constexpr std::size_t block = 4096;  // stop early where a gradient overflowed, without a branch per element
  for (std::size_t start = 0; start < length; start += block) {
    const std::size_t end = start + block < length ? start + block : length;
    Bits found = 0;
    for (std::size_t i = start; i < end; ++i) found |= static_cast<Bits>((in[i] & infinity) == infinity);
    if (found) return false;
  }
  return true;
}

}  // namespace

extern const PathKernels TOPKUBE_TABLE(TOPKUBE_PATH);
const PathKernels TOPKUBE_TABLE(TOPKUBE_PATH) = {
    .name = TOPKUBE_NAME(TOPKUBE_PATH),
    .widen = {widen<F32>, widen<BF16>, widen<F16>},
    .widen_add = {widen_add<F32>, widen_add<BF16>, widen_add<F16>},
    .narrow = {narrow<F32>, narrow<BF16>, narrow<F16>},
    .is_finite = {is_finite<std::uint32_t, 0x7f800000u>, is_finite<std::uint16_t, 0x7f80>, is_finite<std::uint16_t, 0x7c00>},
    .add_f32 = add_f32,
};

}  // namespace topkube
