// `finish`: the work of `narrow`, `narrow` and `collect` in one kernel of one thread block cluster.
#pragma once

#include "collect.hpp"

namespace topkube {

// With so few candidates, eight blocks read them in the time of a launch. The length bounds what a fallback reads with eight blocks.
constexpr u32 finish_threads = 512;
constexpr u64 cluster_candidates = 1'000'000, cluster_length = 32'000'000;

union FinishShared {
  NarrowShared narrow;
  CollectShared collect;
};

// The blocks of a cluster run at the same time and can wait for each other, as the end of a kernel does otherwise.
template <class Source, class Value>
TOPKUBE_KERNEL(finish_threads) finish(Source source, Selection s, u32* indices, Value* values, float* acc) {
  auto& shared = gpu::shared<FinishShared>();
  for (u32 round = 0; round < 2; ++round) {
    narrow_bins(source, s, round, shared.narrow);
    gpu::sync_cluster();
  }
  collect_entries(source, s, indices, values, acc, shared.collect);
}

}  // namespace topkube
