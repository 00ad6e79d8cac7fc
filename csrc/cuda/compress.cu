// The C function topkube_cuda_compress: adds the residual and selects in one pass.
#include "launch_select.hpp"

namespace topkube {
namespace {

template <class T>
u64 compress(gpu::Launcher* launcher, const void* gradient, const float* residual, float* acc, u64 length, u64 k, u32* indices,
             float* values, void* previous, void* state, void* workspace) {
  using Source = Sums<T>;
  Arena arena(workspace);
  const Selection selection = lay_out(length, k, are_aligned(gradient, residual, acc), previous, state, arena);
  if (launcher) {
    const Source source{static_cast<const typename T::Item*>(gradient), residual, acc};
    const Bits<F32> sums{reinterpret_cast<const u32*>(acc)};
    launch_prepare(*launcher, source, selection);
    launch_filter(*launcher, source, selection);
    launch_rest(*launcher, sums, selection, indices, reinterpret_cast<u32*>(values), acc);
  }
  return arena.used();
}

}  // namespace
}  // namespace topkube

using namespace topkube;

TOPKUBE_API topkube_cuda_compress(int device, void* stream, const void* gradient, int dtype, const float* residual, float* acc,
                                  u64 length, u64 k, u32* indices, float* values, void* previous, void* state, void* workspace,
                                  u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      return compress<decltype(type)>(launcher, gradient, residual, acc, length, k, indices, values, previous, state, workspace);
    });
  });
}
