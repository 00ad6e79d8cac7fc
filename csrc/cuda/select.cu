// The C functions topk and mstopk, and the function that reads the statistics of a selection.
#include "launch_select.hpp"
#include "mstopk.hpp"

namespace topkube {
namespace {

template <class T>
u64 topk(gpu::Launcher* launcher, const void* data, u64 length, u64 k, u32* indices, void* values, void* previous, void* state,
         void* workspace) {
  using Source = Bits<T>;
  using Word = typename Source::Word;
  Arena arena(workspace);
  const Selection selection = lay_out(length, k, are_aligned(data), previous, state, arena);
  if (launcher) {
    const Source source{static_cast<const Word*>(data)};
    launch_prepare(*launcher, source, selection);
    launch_filter(*launcher, source, selection);
    launch_rest(*launcher, source, selection, indices, static_cast<Word*>(values), static_cast<float*>(nullptr));
  }
  return arena.used();
}

template <class T>
u64 mstopk(gpu::Launcher* launcher, const void* data, u64 length, u64 k, int iterations, u64 seed, u32* indices, void* values,
           void* previous, void* state, void* workspace) {
  using Source = Bits<T>;
  using Word = typename Source::Word;
  Arena arena(workspace);
  const Selection selection = lay_out(length, std::min(k + 1, length), are_aligned(data), previous, state, arena);
  const u64 blocks = (length + summary_block - 1) / summary_block;
  double* sums = arena.take<double>(blocks);
  u32* largest = arena.take<u32>(blocks);
  if (launcher) {
    const Source source{static_cast<const Word*>(data)};
    launch_prepare(*launcher, source, selection);
    launcher->launch(summarise_magnitudes<T>, launcher->blocks_for(blocks, 16, 4), summary_threads, source, length, sums, largest);
    launcher->launch<CombineShared>(combine_summaries, 1, combine_threads, selection, k, sums, largest, blocks);
    launch_filter(*launcher, source, selection);
    launch_narrow(*launcher, source, selection);
    launcher->launch(bisect<T>, 1, 32, selection, k, iterations);
    launcher->launch<CountShared>(count<Source>, launcher->blocks_for(length, 4096, 8), count_threads, source, selection, k, seed);
    launch_collect(*launcher, source, selection, indices, static_cast<Word*>(values), static_cast<float*>(nullptr));
  }
  return arena.used();
}

}  // namespace
}  // namespace topkube

using namespace topkube;

TOPKUBE_API topkube_cuda_topk(int device, void* stream, const void* data, int dtype, u64 length, u64 k, u32* indices, void* values,
                              void* previous, void* state, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      return topk<decltype(type)>(launcher, data, length, k, indices, values, previous, state, workspace);
    });
  });
}

TOPKUBE_API topkube_cuda_mstopk(int device, void* stream, const void* data, int dtype, u64 length, u64 k, int iterations, u64 seed,
                                u32* indices, void* values, void* previous, void* state, void* workspace, u64* needed) {
  return with_dtype(dtype, [&](auto type) {
    return plan_or_run(device, stream, workspace, needed, [&](gpu::Launcher* launcher) {
      return mstopk<decltype(type)>(launcher, data, length, k, iterations, seed, indices, values, previous, state, workspace);
    });
  });
}

// Selections write statistics of their work into 256 more bytes, `state`. This function reads a copy of `state` in host memory: the
// mode, if the bounds came from the previous selection, and the number of candidates; for mstopk also the thresholds, and how many
// magnitudes reach them.
TOPKUBE_API topkube_cuda_effort(const void* state, u64* from_the_data, u64* reused, u64* candidates, float* thresholds,
                                u64* above) {
  const State& copy = *static_cast<const State*>(state);
  *reused = copy.reused;
  *from_the_data = copy.mode;
  *candidates = copy.candidates;
  for (int i = 0; i < 2; ++i) {
    thresholds[i] = copy.thresholds[i];
    above[i] = copy.above[i];
  }
  return 0;
}
